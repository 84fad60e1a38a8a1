"""What this package refuses in a test or a prediction is told in one line; all other errors keep their traceback."""

import sys
from pathlib import Path

import pytest

from lightning_gnn_dist import Graph, communities
from lightning_gnn_dist.checks import check_seed, check_word
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.mistakes import own_refusal, reading_checkpoint
from lightning_gnn_dist.graph.convert import distinct_ids

CONFIG = """\
seed_everything: 0
model: {class_path: MODULE.SAGE, init_args: {num_features: 64, num_classes: 8}}
data: {graph: GRAPH}
trainer: {accelerator: cpu, devices: 1, logger: false, enable_progress_bar: false}
"""
BROKEN = """\
from lightning_gnn_dist import NeighborSampler
from lightning_gnn_dist.cli.demo import SAGE as Base

class SAGE(Base):
    def test_step(self, batch):
        return NeighborSampler([0])
"""


def config(folder: Path, module: str = "lightning_gnn_dist.cli.demo") -> str:
    """Write a fit of a graph without nodes to test, and return its name."""
    graph = communities(60, 8)
    del graph.node_arrays["test_mask"]
    graph.save(folder / "graph")
    (folder / "fit.yaml").write_text(CONFIG.replace("MODULE", module).replace("GRAPH", f"{folder}/graph"))
    return f"--config={folder}/fit.yaml"


def test_a_refusal_of_a_test_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "test", config(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err.rstrip().splitlines()[-1].startswith("error: ")


def test_what_a_users_step_is_refused_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_broken_module.py").write_text(BROKEN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = config(tmp_path, "my_broken_module")
    graph = Graph.open(tmp_path / "graph")
    graph.node_arrays["test_mask"] = graph.node_arrays["val_mask"].clone()
    graph.save(tmp_path / "whole")
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "test", file, f"--data.graph={tmp_path}/whole"])
    with pytest.raises(ValueError, match="num_neighbors"):
        main()


@pytest.mark.parametrize("name", ["predict", "fit"])
def test_a_checkpoint_that_is_not_there_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [config(tmp_path), f"--ckpt_path={tmp_path}/*.ckpt"]
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", name, *arguments])
    with pytest.raises(SystemExit):
        main()
    assert f"error: ckpt_path must be a file, and '{tmp_path}/*.ckpt' is none." in capsys.readouterr().err


def test_checkpoints_that_lightning_finds_are_not_looked_for() -> None:
    for known in (None, "best", "last", "hpc", "registry", "registry:model:version:1", "s3://bucket/a.ckpt"):
        with reading_checkpoint(known):
            pass


def error_of(function: object, *arguments: object) -> BaseException:
    try:
        function(*arguments)  # type: ignore[operator]
    except Exception as error:
        return error
    raise AssertionError


def test_the_file_of_the_last_frame_says_whose_error_it_is() -> None:
    stated, called = error_of(check_seed, -1), error_of(distinct_ids, "nodes", [2**70], 5)
    assert own_refusal(stated, None) == str(stated) and own_refusal(stated, "somebody") == str(stated)
    assert own_refusal(stated, __name__) is None  # this module called it, as a model's step does
    assert own_refusal(error_of(check_word, "name", 3, "x"), None) is not None
    assert own_refusal(error_of(int, "x"), None) is None
    assert own_refusal(called, None) == str(called)  # though torch was called there
