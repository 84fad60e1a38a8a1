"""`fit` and its like from configurations: the shipped ones run, and every setting of the package can be written."""

import csv
import json
import os
import re
import sys
from argparse import Namespace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ActionConfigFile
from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.cli.options import nodes_named, words_in
from lightning_gnn_dist.cli.train import nodes_asked
from tests.cli.conftest import EXAMPLES, Command, Refused, shipped
from tests.ranks import run_ranks

OF_EXTENSIONS = {"links.yaml", "recommending.yaml", "relational.yaml", "whole_graph.yaml"}  # tried by their tests
CONFIGS = sorted({path.name for path in (EXAMPLES / "configs").glob("*.yaml")} - OF_EXTENSIONS)
SMALL = ["--data.graph.init_args.num_nodes=2000", "--trainer.enable_progress_bar=false"]
SMALL += ["--trainer.log_every_n_steps=1"]


def command(rank: int, world_size: int, *arguments: str) -> None:
    """What the console script does in one rank."""
    os.chdir(EXAMPLES)
    sys.argv = ["lightning-gnn-dist", *arguments]
    main()


def logged(run: Path, name: str = "accuracy") -> list[float]:
    rows = csv.DictReader((run / "metrics.csv").read_text().splitlines())
    return [float(row[name]) for row in rows if row[name]]


@shipped
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_trains_and_is_kept_beside_its_logs(name: str, tmp_path: Path) -> None:
    check_config(name, tmp_path)


def check_config(name: str, tmp_path: Path, metric: str = "accuracy") -> None:
    config = re.sub(r"num_nodes: \d+", "num_nodes: 2000", (EXAMPLES / "configs" / name).read_text())
    (tmp_path / name).write_text(config)
    small = [*SMALL[1:], "--trainer.max_epochs=2", "--trainer.check_val_every_n_epoch=1"]
    small += [f"--trainer.logger.init_args.save_dir={tmp_path}"]
    (devices,) = re.findall(r"devices: (\d)", config)
    run_ranks(command, int(devices), "fit", f"--config={tmp_path}/{name}", *small)
    (run,) = (tmp_path / Path(name).stem).iterdir()
    found = logged(run, metric)
    assert len(found) == 2 and found[-1] > 0.15  # of eight classes, or a hundred false edges, in a few steps
    assert "num_nodes: 2000" in (run / "config.yaml").read_text()
    if name == "llcg.yaml":  # other commands take what is kept
        run_ranks(command, int(devices), "validate", f"--config={run}/config.yaml", "--trainer.logger=false")
    assert len(logged(run, "report/training_seconds")) == 1  # the command line adds RunReport


def test_every_strategy_of_the_package_has_a_config() -> None:
    text = "".join((EXAMPLES / "configs" / name).read_text() for name in CONFIGS)
    assert all(strategy in text for strategy in ("LocalSGDStrategy", "LLCGStrategy", "TMAStrategy", "GrappaStrategy"))


def evaluate(rank: int, world_size: int, folder: str) -> None:
    save = [*SMALL, f"--trainer.logger.init_args.save_dir={folder}", "--trainer.max_epochs=1"]
    command(rank, world_size, "fit", "--config=configs/local_sgd.yaml", *save)
    (checkpoint,) = Path(folder).rglob("*.ckpt")
    for subcommand in ("validate", "test"):
        command(rank, world_size, subcommand, "--config=configs/local_sgd.yaml", *save, f"--ckpt_path={checkpoint}")


@shipped
@pytest.mark.slow
def test_a_checkpoint_is_evaluated(tmp_path: Path) -> None:
    run_ranks(evaluate, 2, str(tmp_path))
    fitted, validated, tested = (logged(run) for run in sorted((tmp_path / "local_sgd").iterdir()))
    assert len(tested) == 1
    assert fitted == validated  # as the fit did at its end


def init(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_gnn_dist.{name}", "init_args": init_args}


@cache
def parser() -> LightningArgumentParser:
    made = LightningArgumentParser(exit_on_error=False)
    made.add_lightning_class_args(Trainer, "trainer")
    made.add_lightning_class_args(lgd.PartitionedDataModule, "data")
    made.add_argument("--config", action=ActionConfigFile)
    return made


def parsed(data: dict[str, Any] | None = None, **trainer: Any) -> Any:
    graph = {"graph": init("communities", num_nodes=500)}
    config = {"data": graph | (data or {}), "trainer": {"logger": False, "barebones": True} | trainer}
    # As the command does it: jsonargparse fills values otherwise where no arguments were parsed before in the process.
    return parser().instantiate(parser().parse_args([f"--config={json.dumps(config)}"]))


def test_settings_of_data_can_be_written() -> None:
    written = {
        "sampler": init("WholePartSampler", num_hops=2),
        "global_batching": {"sampler": init("NeighborSampler", num_neighbors=[-1, 5])},
        "boundary": "Halo",
        "evaluation": {"batch_size": 7},
        "holding": {"cache_dir": "there", "residency": init("Redeal", num_supernodes=40)},
        "coverage": init("Coverage", level="batch", shrinkage=1.0),
    }
    data = parsed(written).data
    assert data.sampler == lgd.WholePartSampler(2) and data.coverage == lgd.Coverage("batch", shrinkage=1.0)
    assert data.global_batching == lgd.GlobalBatching(None, lgd.NeighborSampler([-1, 5]))
    assert (data.boundary, data.evaluation) == (lgd.Halo(), lgd.Evaluation(7))
    assert data.holding == lgd.Holding(lgd.Redeal(40), cache_dir="there")
    other = parsed({"coverage": None, "boundary": "lightning_gnn_dist.Fetch"}).data
    assert other.coverage is None and other.boundary == lgd.Fetch()


def test_a_graph_is_a_path_or_made_to_order(tmp_path: Path) -> None:
    assert parsed().data.graph.num_nodes == 500
    lgd.communities(400).save(tmp_path / "graph")
    assert parsed({"graph": str(tmp_path / "graph")}).data.graph.num_nodes == 400


def test_strategies_and_clocks_can_be_written() -> None:
    clock = init("EverySteps", steps=4, growth=1.5, limit=9)
    patient = init("LocalSGDStrategy", clock=clock, launch={"timeout": "0:01:30"}, weights="nodes")
    local = parsed(strategy=patient).trainer.strategy
    assert local.clock == lgd.EverySteps(4, 1.5, 9)
    assert local.weights == "nodes" and local._timeout == timedelta(seconds=90)
    settings = {"drift": None, "correction": {"optimizer": "persistent"}}
    strategy = parsed(strategy=init("LLCGStrategy", clock=init("EveryPass", passes=2), **settings)).trainer.strategy
    assert strategy.clock == lgd.EveryPass(2) and strategy.drift is None
    assert strategy.correction == lgd.Correction(optimizer="persistent")


def test_drift_can_be_written_in_part() -> None:
    for name, written, drift in (
        ("LLCGStrategy", {"decay": 0.9}, lgd.Drift("global", decay=0.9)),
        ("LLCGStrategy", init("Drift", towards="ranks"), lgd.Drift("ranks")),
        ("TMAStrategy", {"anchor_steps": 8}, lgd.Drift("ranks", anchor_steps=8)),
    ):
        assert parsed(strategy=init(name, drift=written)).trainer.strategy.drift == drift


@pytest.mark.parametrize("steps", [3, 1.0])
def test_a_share_of_steps_stays_a_share(steps: int | float) -> None:
    found = parsed(strategy=init("LLCGStrategy", correction={"steps": steps})).trainer.strategy.correction.steps
    assert found == steps and type(found) is type(steps)


def test_the_papers_method_can_be_written() -> None:
    written = yaml.safe_load((EXAMPLES / "configs" / "llcg_paper.yaml").read_text())["trainer"]["strategy"]
    for strategy, way in ((init("LLCGStrategy.as_published"), {}), (written, {"way": "rank0"})):
        made = parsed(strategy=strategy).trainer.strategy
        assert made.correction == lgd.Correction.as_published(**way)
        assert made.drift is made.outer is None and made.weights == "uniform"


def test_what_others_refuse_keeps_its_traceback(tmp_path, monkeypatch, run_here) -> None:
    broken = "class Broken(SAGE):\n    def __init__(self): raise ValueError('mine')\n"
    (tmp_path / "broken_model.py").write_text(f"from node_classification import SAGE\n{broken}")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "model.yaml").write_text("class_path: broken_model.Broken\n")
    with pytest.raises(ValueError, match="mine"):
        run_here("fit", "--config=configs/llcg.yaml", f"--model={tmp_path}/model.yaml")


def test_predict_writes_a_row_for_every_node_or_those_that_are_named(tmp_path: Path, run_here: Command) -> None:
    (tmp_path / "ids.txt").write_text("7\n1999\n0\n")
    config = ["predict", "--config=configs/ddp.yaml", *SMALL, "--trainer.devices=1"]
    run_here(*config, f"--output={tmp_path}/some.npy", f"--nodes={tmp_path}/ids.txt")
    run_here(*config, f"--output={tmp_path}/all.npy")
    everything = np.load(tmp_path / "all.npy")
    assert everything.shape == (2000, 8)
    np.testing.assert_allclose(np.load(tmp_path / "some.npy"), everything[[7, 1999, 0]], atol=1e-5)


def test_nodes_are_named_by_ids_of_tables(tmp_path: Path) -> None:
    names = ["c", "a b", "d", "e"]
    (tmp_path / "nodes.csv").write_text("\n".join(["id,w", *(f"{name},1" for name in names)]))
    (tmp_path / "edges.csv").write_text("source,target\nc,d\nd,e\ne,a b\na b,c\n")
    lgd.prepare_graph(tmp_path / "edges.csv", tmp_path / "graph", nodes=tmp_path / "nodes.csv", undirected=True)
    graph = lgd.Graph.open(tmp_path / "graph")
    options = Namespace(nodes="e,a b", by_user_id=True, ids_of=None)
    assert torch.as_tensor(nodes_asked(lgd.PartitionedDataModule(graph), options)).tolist() == [3, 1]


def test_nodes_are_named_by_ids_or_files(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("7\n1999\n0\n")
    (tmp_path / "words.txt").write_text("a b\nc\n\n")
    assert words_in(str(tmp_path / "words.txt")) == ["a b", "c"] and words_in("a b, c") == ["a b", "c"]
    for text in ("7,1999, 0", tmp_path / "ids.txt"):
        assert nodes_named(str(text)) == [7, 1999, 0]
    assert nodes_named(",".join(["1999"] * 200)) == [1999] * 200
    (tmp_path / "none.txt").write_text("\n")
    with pytest.raises(ValueError, match=r"none\.txt names no node: write an id in each line"):
        nodes_named(str(tmp_path / "none.txt"))
    with pytest.raises(ValueError, match=r"must be ids with commas .*, or a file of ids that is there, got 'x' in 1,x"):
        nodes_named("1,x")
    with pytest.raises(ValueError, match=r"rows.npy is no text: write an id in each line, numpy.savetxt"):
        nodes_named("rows.npy")


def test_nodes_that_are_none_are_refused(refused: Refused, tmp_path: Path) -> None:
    config = ["--config=configs/ddp.yaml", *SMALL, f"--output={tmp_path}/some.npy", "--nodes=2000"]
    assert "nodes must lie in [0, 2000), got 2000." in refused("predict", *config)
    assert not (tmp_path / "some.npy").exists()


def test_predict_without_a_file_is_refused(refused: Refused) -> None:
    given = ["predict", "--config=configs/ddp.yaml", "--trainer.logger=false"]
    assert "predict would keep nothing: name a file" in refused(*given)
