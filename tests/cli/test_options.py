"""What is wrong on a command line is said in one line, with the nearest right name, before anything else is done."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer

from lightning_gnn_dist import Auto, Evaluation, FastGCNSampler, Graph, Halo, Holding, Loading, Rotate, communities
from lightning_gnn_dist.cli.config_file import check_files
from lightning_gnn_dist.cli.mistakes import check_strategy, hint, reading_checkpoint
from lightning_gnn_dist.cli.train import run
from lightning_gnn_dist.gone import GONE
from tests.cli.conftest import EXAMPLES, Refused

ODD = ("inf", "nan", "-1", "0", "1e300", "x")
MISTAKES = [
    (["inspect", "graph", "--parts", "x"], " inspect", "argument --parts: invalid positive value: 'x'"),
    (["prepare"], " prepare", "the following arguments are required: source, out"),
    (["nope"], "", "argument command: invalid choice: 'nope'"),
]
MISTAKES += [(["prepare", "a", "b", f"--memory={odd}"], " prepare", "argument --memory: ") for odd in ODD]


@pytest.mark.parametrize(("words", "command", "said"), MISTAKES)
def test_an_error_stands_without_the_usage(words: list[str], command: str, said: str, refused: Refused) -> None:
    error, way_out = refused(*words).splitlines()
    assert error.startswith(f"lightning-gnn-dist{command}: error: {said}")
    assert way_out == f"All options: lightning-gnn-dist{command} --help"


LLCG = ["fit", "--config=configs/llcg.yaml"]
ROWS = [
    (["draw", "out"], "lightning-gnn-dist draw"),
    (["inspect", "--forecast", "nodes=1"], "inspect --forecast"),
    (["fit", "--draw=true"], "fit --draw"),
    ([*LLCG, "--data.loading.fast=1"], "Loading.fast"),
    ([*LLCG, "--trainer.strategy.weights=old"], "LLCGStrategy.weights='old'"),
    ([*LLCG, "--trainer.strategy=lightning_gnn_dist.Old"], "Old"),
]


@pytest.mark.parametrize(("words", "row"), ROWS)
def test_what_went_is_answered_by_its_row(words, row, refused, monkeypatch) -> None:
    monkeypatch.setitem(GONE, row, "write another")
    lines = refused(*words).splitlines()
    assert len(lines) <= 4 and sum(f"{row} went: write another." in line for line in lines) == 1


SAID = {
    "trainer.max_epohcs=2": "Did you mean 'max_epochs'?",
    "trainer.strategy.correction_steps=2": "write 'correction.steps'",
    "trainer.strategy.drift.deca=2": "Did you mean 'decay'?",
    "data.partitioner=lightning_gnn_dist.MetisPartioner": "Did you mean 'MetisPartitioner'?",
    "data.partitioner=MetisPartioner": "Did you mean 'lightning_gnn_dist.MetisPartitioner'?",
    "model=nowhere.SAGE": "There is no module 'nowhere': it must be installed, or lie in",
    "data.zzz=1": "There is no 'zzz'. It takes graph, partitioner, ",
    "data.graph=nowhere": "error: nowhere is not a saved graph: there is no such folder.",
    "trainer.strategy.correction.steps=-1": "error: trainer.strategy.correction.steps must be ",
    "trainer.strategy.drift.towards=x": "strategy.drift.towards must be one of ['ranks', 'global'] or null, got",
    "data.partitioner=lightning_gnn_dist.MetisPartitioner --data.partitioner.balance=x": "['nodes', 'train'], got x.",
    "trainer.strategy.drift=ranks": "strategy.drift must be settings of towards, decay, anchor_steps or null, g",
    "trainer.strategy.launch.timeout=x": "strategy.launch.timeout: Not of type timedelta: Expected a string wit",
}


@pytest.mark.parametrize("option", SAID)
def test_what_is_misspelt_or_refused_is_said_in_one_line_with_the_nearest_right_name(option, refused) -> None:
    last = refused(*LLCG, *f"--{option}".split()).splitlines()[-1]
    assert last.startswith("error: ") and SAID[option] in last


def test_a_misspelt_key_of_a_file_meets_the_nearest_right_one(tmp_path: Path, refused: Refused) -> None:
    text = (EXAMPLES / "configs" / "llcg.yaml").read_text()
    for right, wrong in (("data", "\ndta:"), ("batch_size", "\n  btch_size:"), ("init_args", "\n    init_arg:")):
        line = next(line for line in ("\ndata:", "\n  batch_size:", "\n    init_args:") if right in line)
        (tmp_path / "wrong.yaml").write_text(text.replace(line, wrong))
        assert f"Did you mean {right!r}?" in refused("fit", f"--config={tmp_path}/wrong.yaml")


# Advice from the complaint alone.


NAMES = {"seed_everything", "data.graph", "data.batch_size", "data.bulk_size", "trainer.max_epochs", "model"}


GIVEN = "- Problem with given class_path"
ANSWERS = {
    "Subcommand 'fit' does not accept option 'trainr.max_epochs'": "Did you mean 'trainer'?",
    "unrecognized arguments: --data.grph=x -y": "Did you mean 'graph'?",
    f"{GIVEN} 'torch.optim.Adam':\n    Option 'wieght_decay' is not accepted": "Did you mean 'weight_decay'?",
    "Given value: {'class_pth': 'a.B', 'init_args': {}}": "Did you mean 'class_path'?",
    "Expected a <class 'int'>. Got value: x": None,
    f"{GIVEN} 'nowhere.B':\n    Option 'b' is not accepted": None,
    "Given value: {'class_path': 'a.B', 'init_args': {}}": None,
}


@pytest.mark.parametrize("message", ANSWERS)
def test_a_complaint_is_answered_or_left_alone(message: str) -> None:
    answer, expected = hint(message, NAMES), ANSWERS[message]
    assert answer is None if expected is None else expected in answer


STRATEGIES = {
    "grapa": "There is no 'grapa'. Did you mean 'grappa'?",
    "GrappaStrategy": "A class is named with its module. Did you mean 'lightning_gnn_dist.GrappaStrategy'?",
    "lightning_gnn_dist.GrapaStrategy": "Did you mean 'lightning_gnn_dist.GrappaStrategy'?",
    "my.Own": "named by class_path, --trainer.strategy.class_path=my.Own, or in a file strategy: {class",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_is_no_strategy_is_refused_with_what_is(name: str) -> None:
    with pytest.raises(ValueError, match=r"^trainer\.strategy: ") as refused:
        check_strategy(name)
    assert STRATEGIES[name] in str(refused.value)
    for known in ("auto", "ddp", "grappa", "lightning_gnn_dist.GrappaStrategy", None):
        check_strategy(known)


# What is wrong with a value of a configuration is said in one line that names where it stands.


GRAPH = {"graph": {"class_path": "lightning_gnn_dist.communities", "init_args": {"num_nodes": 60}}}


@pytest.fixture(autouse=True)
def without_arguments_of_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist"])  # LightningCLI warns of arguments beside its own


def start(data: dict[str, Any], folder: Path, *options: str) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump({"data": GRAPH | data}))
    model = "--model=lightning.pytorch.demos.boring_classes.BoringModel"
    quiet = ["--trainer.logger=false", "--trainer.enable_checkpointing=false", "--trainer.accelerator=cpu"]
    quiet += ["--seed_everything=0", "--report=false"]
    run(["fit", f"--config={folder}/config.yaml", model, *quiet, *options])


def test_a_value_is_a_line_and_a_boundary_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(Trainer, "fit", lambda self, model, datamodule: found.append(datamodule))
    values = {"loading": {"bulk_size": 8}, "holding": {"residency": "Rotate", "every": 2}, "boundary": "Halo"}
    start(values, tmp_path, "--data.loading.num_threads=2", "--data.evaluation.batch_size=9")
    inherits = {"class_path": "lightning_gnn_dist.FastGCNSampler", "init_args": {"num_nodes": [5, 5]}}
    cut = {"class_path": "Halo", "init_args": {"hops": 1}}
    start({"boundary": cut, "sampler": inherits}, tmp_path, "--data.boundary.bytes=1000")
    start({"boundary": "auto"}, tmp_path)
    first, second, third = found
    assert third.boundary == Auto() and second.sampler == FastGCNSampler([5, 5])
    assert (first.loading, first.holding) == (Loading(bulk_size=8, num_threads=2), Holding(Rotate(), every=2))
    assert (first.boundary, first.evaluation) == (Halo(), Evaluation(9))
    assert (second.boundary, second.loading) == (Halo(bytes=1000), Loading())


def halo(**init_args: Any) -> dict[str, Any]:
    return {"boundary": {"class_path": "Halo", "init_args": init_args}}


def of_residency(**value: Any) -> dict[str, Any]:
    return {"holding": {"residency": value}}


METIS = "lightning_gnn_dist.MetisPartitioner"
WRONG: list[tuple[dict[str, Any] | str, str]] = [
    ({"loading": {"bulk_size": 0}}, "data.loading.bulk_size must be an integer of at least 1, got 0."),
    ("data.loading.bulk_size=x", "data.loading.bulk_size must be an integer, got x."),
    ("data.loading.bulksize=8", "data.loading: There is no 'bulksize'. Did you mean 'bulk_size'?"),
    ({"loading": 8}, "data.loading must be settings such as {name: value}, got 8."),
    (halo(bytes="x"), "data.boundary.bytes must be an integer or null, got x."),
    (halo(byte=2), "data.boundary: There is no 'byte'. Did you mean 'bytes'?"),
    ({"boundary": {"hops": 5}}, "data.boundary: There is no 'hops'. It is an argument of "),
    (of_residency(chunks=5), "data.holding.residency: Fixed takes no 'chunks': name the class"),
    ({"evaluation": {"sampler": METIS}}, f"data.evaluation.sampler must be a Sampler or null, got {METIS}."),
    ("trainer.strategy=grapa", "trainer.strategy: There is no 'grapa'. Did you mean 'grappa'?"),
    ("data.holding=Rotate", "data.holding must be settings such as {name: value}, got Rotate."),
    ("data.boundary=halo", "data.boundary: A class is named with its module. Did you mean 'lightning_gnn_"),
    ({"boundary": "deepest"}, "data.boundary must be a Boundary or one of ['auto'], got deepest."),
    ("data=5", "data must be a PartitionedDataModule or null, got 5."),
    ({"evaluation": {"sampler": [5]}}, "data.evaluation.sampler must be an object, by its class or null, got "),
]


@pytest.mark.parametrize(("wrong", "reason"), WRONG)
def test_what_is_wrong_in_a_value_is_said_in_one_line_with_its_path(wrong, reason, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit):
        start(wrong, tmp_path) if isinstance(wrong, dict) else start({}, tmp_path, f"--{wrong}")
    before, _, error = capsys.readouterr().err.partition("\nerror: ")
    assert error.startswith(reason) and error.count("\n") == 1
    assert "usage:" not in before and before.endswith("--help")


# What this package refuses in a test or a prediction is told in one line; all other errors keep their traceback.


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


def test_a_refusal_of_a_test_is_one_line(tmp_path: Path, refused: Refused) -> None:
    assert refused("test", config(tmp_path)).rstrip().splitlines()[-1].startswith("error: ")


def test_what_a_users_step_is_refused_keeps_its_traceback(tmp_path, monkeypatch, run_here) -> None:
    (tmp_path / "my_broken_module.py").write_text(BROKEN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    file = config(tmp_path, "my_broken_module")
    graph = Graph.open(tmp_path / "graph")
    graph.node_arrays["test_mask"] = graph.node_arrays["val_mask"].clone()
    graph.save(tmp_path / "whole")
    with pytest.raises(ValueError, match="num_neighbors"):
        run_here("test", file, f"--data.graph={tmp_path}/whole")


def test_a_checkpoint_that_is_not_there_is_named(tmp_path: Path, refused: Refused) -> None:
    said = refused("predict", config(tmp_path), f"--ckpt_path={tmp_path}/*.ckpt")
    assert f"error: ckpt_path must be a file, and '{tmp_path}/*.ckpt' is none." in said


def test_checkpoints_that_lightning_finds_are_not_looked_for() -> None:
    for known in (None, "best", "last", "hpc", "registry", "registry:model:version:1", "s3://bucket/a.ckpt"):
        with reading_checkpoint(known):
            pass


# A configuration that cannot be meant is refused in one line: no traceback, no hang, no gigabytes.


CONFIGS = EXAMPLES / "configs"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("trainer: {max_epochs: 1}  # caf\xe9".encode("latin-1"), r"not in UTF-8 \(at byte 31\)"),
        (b"trainer: \0", "no YAML"),
        (b"", "must hold names with settings"),
        (b"- 1\n- 2\n", "must hold names with settings"),
        (b"trainer:\n\tmax_epochs: 1\n", "line 2, is no YAML: .*cannot start any token"),
        (b"data: {}\n---\ndata: {}\n", "single document"),
        (b"trainer: {}\ndata: {}\ntrainer: {}\n", "line 3, names 'trainer' for the second time"),
        (b"data: {seed: 1, seed: 2}\n", "line 1, names 'seed' for the second time"),
        (b"data: {? [1] : 2}\n", "a key that is no name"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_line(content, reason, tmp_path, refused) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    said = refused("fit", f"--config={file}")
    assert said.startswith(f"lightning-gnn-dist fit: {file}") and re.search(reason, said) and "\n" not in said


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configurations_pass(path: Path) -> None:
    check_files([f"--config={path}"])
    check_files(["--config", str(path), "--trainer.max_epochs=2"])


def test_files_with_aliases_pass_and_those_for_other_options_are_looked_at_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("data: &d {batch_size: 2}\nmodel: {<<: *d, size: 3}\ntrainer: {x: [1, 2]}\n")
    check_files([f"--config={tmp_path}/config.yaml"])
    (tmp_path / "model.yaml").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not in UTF-8"):
        check_files(["--model", f"{tmp_path}/model.yaml"])


def test_a_command_alone_is_told_what_it_needs(refused: Refused) -> None:
    assert "error: the following arguments are required: fit.data, fit.model" in refused("fit")


@pytest.mark.parametrize("path", ["nowhere.yaml", "", "."])
def test_a_configuration_must_be_a_file(path: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match="--config must be a"):
        check_files([f"--config={path}"])


def test_a_demo_of_too_few_nodes_is_refused_in_one_line(refused: Refused) -> None:
    assert "lightning-gnn-dist demo: num_nodes (3) must be at least twice" in refused("demo", "--nodes=3")
