"""The examples run as they stand, from a script, with the ranks that Lightning starts for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["node_classification", "llcg", "grappa", "tma"])
def test_an_example_trains_and_tests(name: str, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    accuracy = re.search(r"accuracy\W+([0-9.]+)", run.stdout)  # Lightning's table, whose lines depend on the terminal
    assert accuracy is not None, run.stdout[-2000:]
    assert float(accuracy[1]) > 0.6
