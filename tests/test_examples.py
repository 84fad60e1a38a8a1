"""The examples run as they stand, from a script, with the ranks that Lightning starts for them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.python_server import fast_python

EXAMPLES = Path(__file__).parents[1] / "examples"
LEAST = {
    "link_prediction": ("mrr", 0.4),
    "typed_links": ("mrr", 0.4),
    "edge_ratings": ("r2", 0.4),
    "recommender": ("mrr", 0.45),
    "relational": ("auroc", 0.7),
}  # of the others: an accuracy of 0.6

OPTIONS = {
    "whole_graph": ["", "--shards shares"],
    "typed_graph": ["", "--shards shares"],
    "link_prediction": ["", "--shards shares"],
    "node_rows": ["", "--owned"],
    "strategies": ["llcg", "tma", "history", "grappa"],
}
LINES = [
    f"{path.stem} {options}".strip()
    for path in sorted(EXAMPLES.glob("*.py"))
    if not path.stem.startswith("from_")  # tests/test_converting.py
    for options in OPTIONS.get(path.stem, [""])
]


@pytest.mark.slow
@pytest.mark.parametrize("line", LINES)
def test_an_example_trains_and_tests(line: str, tmp_path: Path) -> None:
    name, *options = line.split()
    python = fast_python()
    if name == "ray_train":
        pytest.importorskip("ray", reason='Ray is not installed: pip install "ray[train]"')
        python = sys.executable  # whose processes Ray starts
    command = [python, str(EXAMPLES / f"{name}.py"), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    metric, least = LEAST.get(name, ("accuracy", 0.6))
    (result,) = re.findall(rf"{metric}\D+(0\.\d+)", run.stdout)[-1:]  # of the test, after those of all rounds
    assert float(result) > least


def test_the_first_example_is_short() -> None:
    assert len((EXAMPLES / "node_classification.py").read_text().splitlines()) <= 60
