"""What is wrong with a value of a configuration is said in one line that names where it stands."""

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from lightning.pytorch import Trainer

from lightning_gnn_dist import Auto, Evaluation, Halo, Holding, Loading, Rotate
from lightning_gnn_dist.cli.train import run

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
    start({"boundary": {"class_path": "Halo", "init_args": {"hops": 1}}}, tmp_path, "--data.boundary.bytes=1000")
    start({"boundary": "auto"}, tmp_path)
    start({"boundary": {"class_path": "Auto", "init_args": {"bytes": 1000}}}, tmp_path)
    first, second, third, fourth = found
    assert (third.boundary, fourth.boundary) == (Auto(), Auto(1000))
    assert (first.loading, first.holding) == (Loading(bulk_size=8, num_threads=2), Holding(Rotate(), every=2))
    assert (first.boundary, first.evaluation) == (Halo(), Evaluation(9))
    assert (second.boundary, second.loading) == (Halo(bytes=1000), Loading())


def halo(**init_args: Any) -> dict[str, Any]:
    return {"boundary": {"class_path": "Halo", "init_args": init_args}}


@pytest.mark.parametrize(
    ("data", "options", "reason"),
    [
        ({"loading": {"bulk_size": 0}}, [], "data.loading.bulk_size must be an integer of at least 1, got 0."),
        ({}, ["--data.loading.bulk_size=x"], "data.loading.bulk_size must be an integer, got x."),
        ({}, ["--data.loading.bulksize=8"], "data.loading: There is no 'bulksize'. Did you mean 'bulk_size'?"),
        ({"loading": 8}, [], "data.loading must be settings such as {name: value}, got 8."),
        (halo(bytes="x"), [], "data.boundary.bytes must be an integer or null, got x."),
        (halo(byte=2), [], "data.boundary: There is no 'byte'. Did you mean 'bytes'?"),
        ({"boundary": {"hops": 5}}, [], "data.boundary: There is no 'hops'. It is an argument of "),
        (
            {"holding": {"residency": {"chunks": 5}}},
            [],
            "data.holding.residency: Fixed takes no 'chunks': name the class",
        ),
        (
            {"holding": {"residency": {"class_path": "Redeal", "init_args": {"num_supernodes": 0}}}},
            [],
            "data.holding.residency.num_supernodes must be an integer of at least 1, got 0.",
        ),
        (
            {"evaluation": {"sampler": "lightning_gnn_dist.MetisPartitioner"}},
            [],
            "data.evaluation.sampler must be a Sampler or null, got lightning_gnn_dist.MetisPartitioner.",
        ),
        ({}, ["--trainer.strategy=grapa"], "trainer.strategy: There is no 'grapa'. Did you mean 'grappa'?"),
        ({}, ["--trainer.strategy=my.Own"], "trainer.strategy: a class is named by class_path, --trainer.strategy.cl"),
        ({}, ["--data.holding=Rotate"], "data.holding must be settings such as {name: value}, got Rotate."),
        ({}, ["--data.boundary=halo"], "data.boundary: A class is named with its module. Did you mean 'lightning_gnn_"),
        ({}, ["--data.boundary=1"], "data.boundary must be a Boundary or one of ['auto'], got 1."),
        ({"boundary": "deepest"}, [], "data.boundary must be a Boundary or one of ['auto'], got deepest."),
        ({"boundary": [5]}, [], "data.boundary must be an object, by its class or one of ['auto'], got [5]."),
        ({"evaluation": {"sampler": [5]}}, [], "data.evaluation.sampler must be an object, by its class or null, got "),
    ],
)
def test_what_is_wrong_in_a_value_is_said_in_one_line_with_its_path(
    data: dict[str, Any], options: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        start(data, tmp_path, *options)
    before, _, error = capsys.readouterr().err.partition("\nerror: ")
    assert error.startswith(reason) and error.count("\n") == 1
    assert "usage:" not in before and before.endswith("--help")


def test_a_sampler_that_inherits_its_arguments_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(Trainer, "fit", lambda self, model, datamodule: found.append(datamodule.sampler))
    start(
        {"sampler": {"class_path": "lightning_gnn_dist.FastGCNSampler", "init_args": {"num_nodes": [5, 5]}}}, tmp_path
    )
    assert type(found[0]).__name__ == "FastGCNSampler"


def test_an_argument_of_a_value_is_told_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        start({"bulk_size": 1}, tmp_path)
    assert "There is no 'bulk_size': write 'loading.bulk_size" in capsys.readouterr().err.splitlines()[-1]
