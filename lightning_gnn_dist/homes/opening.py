"""Where a graph lives, told from what a data module is given; and what does not go with its types, or with shards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.boundary.boundary import Boundary, check_seed_hops
from lightning_gnn_dist.checks import check_instance, check_path, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.shard import Bounds, holds_shards
from lightning_gnn_dist.graph.shard_bounds import TypedBounds
from lightning_gnn_dist.graph.storage.store import tables_at
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.typed.tables import TIME, Tables
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sharded.source import check_sampler
from lightning_gnn_dist.wire.collectives import all_gather_rows

HOPS_OF_TASK = [1, 16, 8]  # the row that a question is about, then its neighbours of each type, then theirs
HOPS_OF_PAIRS = [16, 8, 4]  # the same, and the neighbours of what is recommended


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


def chosen_seed_type(types: GraphTypes | TypedBounds, task: str | None, whose: str) -> str | None:
    """Return the type of the seeds of a typed graph, by default the one that it has chosen or that has a mask."""
    if have_names(types):
        return types.seed_type() if task is None else task
    if task is not None:
        raise ValueError(f"task ({shown(task)}) is for a graph with types, and {whose} has none.")
    return None


def sampler_of_task(tables: Tables | None, task: str | None) -> Sampler | None:
    """Return what draws batches of a task of a database; None of other graphs.

    Args:
        tables: What became of the tables of the database, if there is one.
        task: The task. None stands for the only one that has labels.
    """
    labelled = [] if tables is None else [name for name, each in tables.tasks.items() if each.receiver is None]
    if tables is None or (len(labelled) != 1 if task is None else task not in tables.tasks):
        return None
    hops = HOPS_OF_TASK if task is None or task in labelled else HOPS_OF_PAIRS
    if not tables.timed:
        return NeighborSampler(hops)
    timed: Sampler = extension("by time")(hops, TIME, pick="latest")
    return timed


def tables_of(given: Graph | Path) -> Tables | None:
    """Return what became of the tables of a database, of a graph or of the folder of its shards."""
    return given.types.tables if isinstance(given, Graph) else tables_at(given)


def check_labelled(tables: Tables | None, task: str | None) -> None:
    """Refuse what is neither a task of a database nor one of its tables, and tasks that recommend."""
    if (
        tables is not None
        and task is not None
        and task not in tables.features
        and tables.task(task).receiver is not None
    ):
        raise ValueError(
            f"task {shown(task)} recommends, and has no labels: learn it by LinkDataModule(graph, task=...)."
        )


def check_typed(types: GraphTypes | TypedBounds, settings: BatchSettings) -> None:
    """Refuse numbers of other types, and what does not take a typed graph, if this is one."""
    if not have_names(types):
        return
    for sampler in settings.samplers:
        if isinstance(sampler, NeighborSampler):
            sampler.of_types(types)
    if settings.loading.sample_on == "device":
        raise ValueError('sample_on="device" is for graphs without types: leave it out, and batches are drawn in RAM.')


def check_samplers(graph: Graph, settings: BatchSettings) -> None:
    """Refuse samplers that do not take a typed graph, if this is one."""
    for sampler in settings.samplers if have_names(graph.types) else ():
        sampler.sample_bulk(graph, [], [])  # refuses the graph, or draws nothing


_MOST_BYTES = 2048  # of what is said


def check_shards(bounds: Bounds, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse settings, boundaries and samplers that do not work without the whole graph, or not with its types."""
    if not boundary.takes_shards:
        raise ValueError(f"boundary must be Isolated(), Halo(), Exchange() or Fetch() for shards, got {boundary}.")
    if settings.loading.sample_on != "cpu":
        raise ValueError(f'sample_on must be "cpu" for shards, whose batches are made in RAM, got {settings.loading}.')
    check_typed(bounds.types, settings)
    check_seed_hops(boundary, is_typed=have_names(bounds.types))
    across = [settings.of_corrections()]  # these are asked of the ranks that own what they draw
    across += [settings.of_evaluation()] if have_names(bounds.types) else []
    across += [settings.of_parts()] if boundary.sees_whole_graph else []
    for sampler in across:
        check_sampler(sampler, bounds.types)


def check_copies(path: Path, bounds: Bounds, num_ranks: int) -> None:
    """Refuse an exchange among ranks of which several hold the same shard."""
    if num_ranks != bounds.num_shards:
        raise ValueError(
            f"boundary=Exchange() takes one rank for each shard, and {num_ranks} ranks hold the {bounds.num_shards} "
            f"shards of {path}: start {bounds.num_shards} ranks, divide the graph into {num_ranks} shards, or take "
            "boundary=Halo()."
        )


def check_on_all_ranks(check: Callable[[], None], shard: int) -> None:
    """Check the own shard. All ranks raise or none: whose shard is right says why another is refused. Collective.

    Args:
        check: Raises a ValueError if the shard is refused.
        shard: The number of the own shard.
    """
    refusal: ValueError | None = None
    try:
        check()
    except ValueError as error:
        refusal = error
    said = b"" if refusal is None else f"Shard {shard}: {refusal}".encode()[:_MOST_BYTES]
    row = torch.zeros(_MOST_BYTES, dtype=torch.uint8)
    row[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in all_gather_rows(row)]
    if refusal is not None:
        raise refusal
    if others := [text for text in texts if text]:
        raise ValueError(others[0])
