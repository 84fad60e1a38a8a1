"""Finds out where a graph lives from what a data module is given, and of which type its seeds are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.checks import check_instance, check_path, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.prepare.bounds import TypedBounds
from lightning_gnn_dist.prepare.shard import Bounds, holds_shards
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


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


def with_seed_type(graph: Graph, seed_type: str | None) -> Graph:
    """Return the graph, of which a typed one has chosen the type of its seeds: that with a ``train_mask``."""
    if not have_names(graph.types):
        _refuse(seed_type, "this one")
        return graph
    if seed_type is None and graph.types.seeds is not None:
        return graph
    return graph.with_seeds(graph.types.seed_type() if seed_type is None else seed_type)


def bounds_with_seed_type(bounds: Bounds, seed_type: str | None, path: Path) -> Bounds:
    """Do as :func:`with_seed_type` for shards: by default the type is the one that the graph had chosen."""
    if not have_names(bounds.types):
        _refuse(seed_type, f"that of {path}")
        return bounds
    return replace(bounds, types=bounds.types.with_seeds(bounds.types.seed_type() if seed_type is None else seed_type))


def _refuse(seed_type: str | None, graph: str) -> None:
    if seed_type is not None:
        raise ValueError(f"seed_type ({shown(seed_type)}) is for a graph with types, and {graph} has none.")


def check_typed(types: GraphTypes | TypedBounds, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse numbers of other types, and what does not take a typed graph, if this is one."""
    if not have_names(types):
        return
    for sampler in settings.samplers:
        if isinstance(sampler, NeighborSampler):
            sampler.of_types(types)
    if boundary.keeps_rows and settings.leaves_types_out:
        raise ValueError(
            f"boundary=History() computes rows by edges of all types, and {settings.of_parts()} leaves some out: give "
            "each edge type a number above 0, or take boundary=Halo()."
        )
    if settings.loading.sample_on == "device":
        raise ValueError('sample_on="device" is for graphs without types: leave it out, and batches are drawn in RAM.')


def check_samplers(graph: Graph, settings: BatchSettings) -> None:
    """Refuse samplers that do not take a typed graph, if this is one."""
    for sampler in settings.samplers if have_names(graph.types) else ():
        sampler.sample_bulk(graph, [], [])  # refuses the graph, or draws nothing
