"""Finds out where a graph lives from what a data module is given: a graph, the folder of a saved one, or of shards."""

from __future__ import annotations

from pathlib import Path

from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.checks import check_instance, check_path, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.prepare.shard import holds_shards


def folder_of_shards(given: object, name: str) -> Path | None:
    """Return the path that a data module is given as its argument ``name``, if it holds shards."""
    if not isinstance(given, str | Path):
        return None
    path = check_path(name, given)
    return path if holds_shards(path) else None


def graph_of(given: Graph | Data | HeteroData | str | Path) -> Graph:
    """Return the graph that a data module is given."""
    if isinstance(given, Graph):
        return given
    if isinstance(given, str | Path):
        return Graph.open(check_path("graph", given))
    check_instance("graph", given, Data | HeteroData, "a Graph, a PyG Data, or the path of a saved graph or of shards")
    return Graph.from_pyg(given)


def refuse_to_cut(path: Path, partitioner: object, holding: Holding) -> None:
    """Refuse to cut a graph that is in shards."""
    for name, value in (("partitioner", partitioner), ("holding", None if holding == Holding() else holding)):
        if value is not None:
            raise ValueError(
                f"{path} holds shards, and a graph is cut when it is divided: leave {name}={shown(value)} out, or give "
                "every host the whole graph."
            )
