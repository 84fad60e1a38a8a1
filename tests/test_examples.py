"""The examples run as they stand, from a script, with the ranks that Lightning starts for them."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger

from tests.conftest import module_of
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
    if not path.stem.startswith(("from_", "compare_"))  # tests/test_converting.py, and a picture
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


@pytest.fixture
def compare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Draw curves in this process, and return why not."""
    monkeypatch.chdir(tmp_path)
    script = module_of(EXAMPLES / "compare_runs.py")

    def draw(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["compare_runs.py", *words])
        try:
            script.main()
        except SystemExit as stop:
            return str(stop)
        return ""

    return draw


def log_run(folder: Path, name: str, metric: str = "accuracy") -> None:
    """Write what a fit of three epochs leaves: bytes and metrics of a step in lines of their own."""
    logger = CSVLogger(folder / "runs", name)
    for epoch in range(3):
        step = 10 * epoch + 9
        logger.log_metrics({"comm/bytes_sent": 1e6 * epoch, "val_loss": 1.0 / (epoch + 1), "epoch": epoch}, step)
        logger.log_metrics({metric: 0.5 + epoch / 10, "epoch": epoch}, step)
    logger.log_metrics({"report/bytes_sent": 3e6}, 30)
    logger.save()


def test_curves_of_runs_are_drawn(
    tmp_path: Path, compare: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    log_run(tmp_path, "llcg"), log_run(tmp_path, "grappa")
    runs = ["runs/llcg/version_0", "runs/grappa/version_0/metrics.csv"]
    svg = ["--over", "comm/bytes_sent", "--out", "there/curves.svg"]
    for words, out in (([], "curves.png"), (["--metric", "val_loss"], "curves.png"), (svg, "there/curves.svg")):
        assert compare(*runs, *words) == "" and capsys.readouterr().out.strip() == out
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    picture = (tmp_path / "there" / "curves.svg").read_text()
    said = ("llcg/version_0", "grappa/version_0", "accuracy", "comm/bytes_sent")
    assert all(words in picture for words in said)


def test_what_cannot_be_drawn_is_said(tmp_path: Path, compare: Callable[..., str]) -> None:
    log_run(tmp_path, "llcg"), log_run(tmp_path, "grappa")
    runs = ["runs/llcg/version_0", "runs/grappa/version_0"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "metrics.csv").write_text("epoch,step,f1\n0,9,0.5\n")
    (tmp_path / "empty.csv").touch()
    for words, said in (
        (["runs/llcg"], "There is no file runs/llcg/metrics.csv. Did you mean runs/llcg/version_0?"),
        (["empty.csv"], "empty.csv is no table of CSVLogger: it has no column 'step'."),
        (["nowhere"], "There is no file nowhere. CSVLogger writes one"),
        ([*runs, "other"], "These runs have no metric in common: runs/llcg/version_0, runs/grappa/version_0, other."),
        ([*runs, "--metric", "mrr"], "Not all of these runs have a column 'mrr'. In common they have comm/bytes_sent"),
        ([*runs, "--over", "time"], "Not all of these runs have a column 'time'."),
        ([*runs, "--out", "curves.what"], "curves.what cannot be written: Format 'what' is not supported"),
    ):
        assert compare(*words).startswith(said)


def test_the_first_example_is_short() -> None:
    assert len((EXAMPLES / "node_classification.py").read_text().splitlines()) <= 60
