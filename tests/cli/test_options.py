"""What is wrong on a command line is said in one line, with the nearest right name, before anything else is done."""

import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.gone import GONE

EXAMPLES = Path(__file__).parents[2] / "examples"


def refused(given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run a command in the folder of examples, with options that it refuses, and return what it writes as errors."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", *given])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "command", "said"),
    [
        (["inspect", "graph", "--parts", "x"], " inspect", "argument --parts: invalid positive value: 'x'"),
        (["prepare"], " prepare", "the following arguments are required: source, out"),
        (["nope"], "", "argument command: invalid choice: 'nope'"),
    ],
)
def test_an_error_stands_without_the_usage(
    words: list[str], command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    error, way_out = capsys.readouterr().err.splitlines()
    assert error.startswith(f"lightning-gnn-dist{command}: error: {said}")
    assert way_out == f"All options: lightning-gnn-dist{command} --help"


@pytest.mark.parametrize(
    ("words", "row"),
    [
        (["draw", "out"], "lightning-gnn-dist draw"),
        (["inspect", "--forecast", "nodes=1"], "inspect --forecast"),
        (["fit", "--draw=true"], "fit --draw"),
        (["fit", "--config=configs/llcg.yaml", "--data.loading.fast=1"], "Loading.fast"),
        (["fit", "--config=configs/llcg.yaml", "--trainer.strategy.wights=x"], "LLCGStrategy.wights"),
        (["fit", "--config=configs/llcg.yaml", "--trainer.strategy.weights=old"], "LLCGStrategy.weights='old'"),
        (["fit", "--config=configs/llcg.yaml", "--trainer.strategy=lightning_gnn_dist.Old"], "Old"),
        (["fit", "--config=configs/llcg.yaml", "--data.sampler=lightning_gnn_dist.OldSampler"], "OldSampler"),
    ],
)
def test_what_went_is_answered_by_its_row(
    words: list[str], row: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(GONE, row, "write another")
    lines = refused(words, capsys, monkeypatch).splitlines()
    assert len(lines) <= 4 and sum(f"{row} went: write another." in line for line in lines) == 1


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (["--trainer.max_epohcs=2"], "Did you mean 'max_epochs'?"),
        (["--data.smapler=lightning_gnn_dist.NeighborSampler"], "Did you mean 'sampler'?"),
        (["--data.sampler.init_args.num_neighbours=[1]"], "Did you mean 'num_neighbors'?"),
        (["--trainer.strategy.corection.steps=2"], "Did you mean 'correction'?"),
        (["--trainer.strategy.correction_steps=2"], "write 'correction.steps'"),
        (["--trainer.strategy.drift.deca=2"], "Did you mean 'decay'?"),
        (["--model.num_clases=2"], "Did you mean 'num_classes'?"),
        (["--data.partitioner=lightning_gnn_dist.MetisPartioner"], "Did you mean 'MetisPartitioner'?"),
        (["--data.graph.init_args.num_node=2"], "Did you mean 'num_nodes'?"),
        (["--data.sampler=LadiesSampler"], "Did you mean 'lightning_gnn_dist.LadiesSampler'?"),
        (["--data.partitioner=MetisPartioner"], "Did you mean 'lightning_gnn_dist.MetisPartitioner'?"),
        (["--model=nowhere.SAGE"], "There is no module 'nowhere'"),
        (["--data.zzz=1"], "There is no 'zzz'. It takes graph, partitioner, "),
    ],
)
def test_a_misspelt_name_meets_the_nearest_right_one(
    options: list[str], advice: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert advice in refused(["fit", "--config=configs/llcg.yaml", *options], capsys, monkeypatch).splitlines()[-1]


def test_a_misspelt_key_of_a_file_meets_the_nearest_right_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (EXAMPLES / "configs" / "llcg.yaml").read_text()
    for right, wrong in (("data", "\ndta:"), ("batch_size", "\n  btch_size:"), ("init_args", "\n    init_arg:")):
        line = next(line for line in ("\ndata:", "\n  batch_size:", "\n    init_args:") if right in line)
        (tmp_path / "wrong.yaml").write_text(text.replace(line, wrong))
        assert f"Did you mean {right!r}?" in refused(["fit", f"--config={tmp_path}/wrong.yaml"], capsys, monkeypatch)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--data.graph=nowhere", "error: nowhere is not a saved graph: there is no such folder."),
        ("--trainer.strategy.correction.steps=-1", "error: trainer.strategy.correction.steps must be "),
        (
            "--trainer.strategy.drift.towards=x",
            "strategy.drift.towards must be one of ['ranks', 'global'] or null, got",
        ),
        (
            "--trainer.strategy.drift=ranks",
            "strategy.drift must be settings of towards, decay, anchor_steps or null, g",
        ),
        (
            "--trainer.strategy.launch.timeout=x",
            "strategy.launch.timeout: Not of type timedelta: Expected a string wit",
        ),
        ("--trainer.strategy.launch.start_method=x", "launch.start_method must be one of ['popen', 'spawn', 'fork', "),
        ("--trainer.strategy.launch.backend=x", "None for what fits the device, got 'x'."),
    ],
)
def test_what_is_refused_is_said_in_one_line(
    option: str, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    last = refused(["fit", "--config=configs/llcg.yaml", option], capsys, monkeypatch).splitlines()[-1]
    assert last.startswith("error: ") and reason in last
