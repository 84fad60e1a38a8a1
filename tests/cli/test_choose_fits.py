"""`choose` on every configuration that ships, and on shards, links, types and times: what it writes trains."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_gnn_dist import Graph, LinkSplit, MetisPartitioner, communities, save_shards, split_edges
from lightning_gnn_dist.cli.main import main
from tests.cli.test_train import CONFIGS, EXAMPLES
from tests.data_fitting import small_graph
from tests.ranks import RankError, run_ranks
from tests.typed_sage import typed_graph_of_papers

QUIET = ["enable_progress_bar", "enable_checkpointing", "enable_model_summary", "logger"]
REFUSED = {
    "whole_graph.yaml": "this fit is for one of the two: name its strategy. boundary=Exchange",
    "llcg_paper.yaml": "DiscrepancyProbe measures at meetings, and not all that may be chosen has some: leave it out",
}


def command(rank: int, world_size: int, *arguments: str) -> None:
    """What the console script does in one rank."""
    os.chdir(EXAMPLES)
    sys.argv = ["lightning-gnn-dist", *arguments]
    main()


def chosen(config: dict[str, Any], folder: Path, ranks: int) -> dict[str, Any]:
    """Choose for a configuration, train with what is written, and return it."""
    config = {"seed_everything": 0, **config}
    config["trainer"] |= {"accelerator": "cpu", "devices": ranks, **dict.fromkeys(QUIET, False)}
    (folder / "fit.yaml").write_text(yaml.safe_dump(config))
    out = folder / "chosen.yaml"
    run_ranks(command, ranks, "choose", f"--config={folder}/fit.yaml", f"--out={out}", timeout=120)
    run_ranks(command, ranks, "fit", f"--config={out}", "--trainer.max_epochs=1", timeout=120)
    found: dict[str, Any] = yaml.safe_load(out.read_text())
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_config_is_chosen_for_or_refused(name: str, tmp_path: Path) -> None:
    text = re.sub(r"num_nodes: \d+", "num_nodes: 2000", (EXAMPLES / "configs" / name).read_text())
    config = yaml.safe_load(text)
    if name in REFUSED:
        with pytest.raises(RankError, match=REFUSED[name]):
            chosen(config, tmp_path, config["trainer"]["devices"])
        assert not (tmp_path / "chosen.yaml").exists()
        return
    found = chosen(config, tmp_path, config["trainer"]["devices"])
    told = "max_epochs=8 stays, as rounds of EverySeconds(seconds=1.0) have no known number of steps: give another."
    assert (told in (tmp_path / "chosen.yaml").read_text()) == (name == "tma.yaml")
    assert found["model"]["class_path"] == config["model"]["class_path"]


def nodes(graph: Graph | Path, sampler: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    data = {"graph": str(graph), "sampler": sampler, "batch_size": 64}
    return {"model": model, "data": data, "trainer": {"max_epochs": 4}}


def drawn(kind: str = "NeighborSampler", **more: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_gnn_dist.{kind}", "init_args": {"num_neighbors": [4, 4], **more}}


def shared(graph: Graph | LinkSplit, folder: Path) -> Path:
    cut = graph.graph if isinstance(graph, LinkSplit) else graph
    save_shards(graph, MetisPartitioner()(cut, 2, seed=0), folder / "shards")
    return folder / "shards"


def saved(graph: Graph, folder: Path) -> Path:
    graph.save(folder / "graph")
    return folder / "graph"


SAGE_12 = {"class_path": "node_classification.SAGE", "init_args": {"num_features": 12, "num_classes": 4}}


def shards(folder: Path) -> dict[str, Any]:
    return nodes(shared(small_graph(), folder), drawn(), SAGE_12)


def typed(folder: Path, keep: Callable[[Graph, Path], Path], **sampler: Any) -> dict[str, Any]:
    graph = typed_graph_of_papers()
    assert graph.types is not None and graph.types.edge_types is not None
    edge_types = [list(kind) for kind in graph.to_pyg().edge_types]
    model = {"class_path": "tests.typed_sage.HeteroSAGE", "init_args": {"edge_types": edge_types}}
    return nodes(keep(graph, folder), drawn(**sampler), model)


def link_shards(folder: Path) -> dict[str, Any]:
    split = split_edges(small_graph(), 0.1, 0.1)
    of_links = {"split": str(shared(split, folder)), "sampler": drawn(), "batch_size": 256}
    data = {"class_path": "lightning_gnn_dist.LinkDataModule", "init_args": of_links}
    model = {"class_path": "tests.link_model.LinkSAGE", "init_args": {"num_features": 12}}
    return {"model": model, "data": data, "trainer": {"max_epochs": 4}}


BY_TIME = {"kind": "TemporalSampler", "time": "time"}
KINDS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "shards": shards,
    "links on shards": link_shards,
    "types": lambda folder: typed(folder, saved),
    "types on shards": lambda folder: typed(folder, shared),
    "types and times": lambda folder: typed(folder, saved, **BY_TIME),
    "types and times on shards": lambda folder: typed(folder, shared, **BY_TIME),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_is_chosen_for(kind: str, tmp_path: Path) -> None:
    found = chosen(KINDS[kind](tmp_path), tmp_path, 2)
    data = found["data"]["init_args"]
    assert "boundary" in data and ("partitioner" in data) == ("shards" not in kind)  # shards are cut as they are


def test_a_boundary_for_one_of_two_ways_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    small = communities(200, 4, num_features=12, train_share=0.5, seed=0)
    for boundary, why in (("Exchange", "LocalSGDStrategy does not exchange"), ("History", "GrappaStrategy has no")):
        sampler = {"class_path": "lightning_gnn_dist.WholePartSampler", "init_args": {"num_hops": 2}}
        config = nodes(tmp_path / boundary, sampler if boundary == "Exchange" else drawn(), SAGE_12)
        small.save(tmp_path / boundary)
        config["data"]["boundary"] = boundary
        with pytest.raises(RankError, match=f"this fit is for one of the two: name its strategy.*{why}"):
            chosen(config, tmp_path, 2)
    assert not (tmp_path / "chosen.yaml").exists()
