"""The benchmark of a GPU: a part that fails or hangs costs no other, and it says where it cannot run."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.python_server import fast_python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PARTS = ("machine", "draws", "steps", "epochs", "batches", "waits", "compiling", "others")


def benchmark(*arguments: object, python: str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [python, str(BENCHMARKS / "gpu.py"), *map(str, arguments)]
    more = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, env=more, capture_output=True, text=True, timeout=850, check=False)


def test_without_a_device_it_says_what_is_missing(tmp_path: Path) -> None:
    done = benchmark(tmp_path / "out", python=fast_python(), CUDA_VISIBLE_DEVICES="", PRETEND_CUDA="")
    assert done.returncode == 1 and not (tmp_path / "out").exists()
    assert done.stderr.startswith("No CUDA device: torch ") and done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.gpu
def test_all_parts_run(tmp_path: Path) -> None:
    test = "tests/gpu/test_precisions.py::test_a_fit_is_a_loop_by_hand[local_sgd-1-32-true]"
    done = benchmark(tmp_path, "--scale", "small", "--seconds", 800, "--tests", test)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((tmp_path / "results.json").read_text())
    failed = [row for row in found["rows"] if "failed" in row]
    if find_spec("pretend") is not None:
        assert {row["part"] for row in failed} <= {"compiling"}  # what torch.compile asks for is not pretended
    else:
        assert not failed
    figures = {(row["part"], row["what"]): row.get("value") for row in found["rows"]}
    assert figures["tests", "failed"] == figures["tests", "error"] == 0 < figures["tests", "passed"]
    assert {part for part, _ in figures} == {"tests", *PARTS}
    alike = [value for (part, what), value in figures.items() if "the batches of a CPU" in what]
    assert alike == ["yes"] * 5
    assert figures["waits", 'GrappaStrategy(), sample_on="cpu"'] < 2
    assert "at most 1.3: " in (tmp_path / "results.md").read_text()
