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
@pytest.mark.parametrize(
    ("name", "metric", "least"),
    [
        ("node_classification", "accuracy", 0.6),
        ("llcg", "accuracy", 0.6),
        ("grappa", "accuracy", 0.6),
        ("link_prediction", "mrr", 0.4),
    ],
)
def test_an_example_trains_and_tests(name: str, metric: str, least: float, tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-2000:]
    # Lightning's table, whose lines depend on the terminal, comes last
    results = re.findall(rf"{metric}\W+([0-9.]+)", run.stdout)
    assert results, run.stdout[-2000:]
    assert float(results[-1]) > least
