"""Where a graph lives, told from what a data module is given; and what does not go with its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import check_instance, check_path, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import TypeNames, have_names
from lightning_gnn_dist.graph.typed.tables import TIME, Tables
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.home import Home
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.names import EXTENSIONS, extension
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

HOPS_OF_TASK = [1, 16, 8]  # the row that a question is about, then its neighbours of each type, then theirs
HOPS_OF_PAIRS = [16, 8, 4]  # the same, and the neighbours of what is recommended


class Folder(Protocol):
    """A folder that is no saved graph, and says by a file what it is: each rank has some of a graph there."""

    path: Path

    @property
    def tables(self) -> Tables | None:
        """What became of the tables of a database."""

    def home(
        self,
        running: Running,
        boundary: Boundary,
        coverage: Coverage | None,
        *,
        task: str | None,
        partitioner: object,
        holding: Holding,
    ) -> Home:
        """Return the home of its nodes; refuse to cut what is cut."""

    def links(self) -> tuple[Any, Any]:
        """Return which edges it holds, as ``LinkBounds``, and its types."""

    def edges(self, running: Running, boundary: Boundary, values: ValueCheck, asked: Any) -> Any:
        """Return its edges as what is learned: an ``EdgeTask`` of ``AskedEdges``."""

    def refuse_to_cut(self, partitioner: object, holding: Holding) -> None:
        """Refuse to cut what is cut."""


def folder_of(given: object, name: str) -> Folder | None:
    """Return the folder that a data module is given as its argument ``name``, if it is no saved graph."""
    if not isinstance(given, str | Path):
        return None
    path = check_path(name, given)
    files = [name for name in EXTENSIONS if name.endswith(".json") and (path / name).exists()]
    found: Folder | None = extension(files[0])(path) if files else None
    return found


def graph_of(given: Graph | Data | HeteroData | str | Path) -> Graph:
    """Return the graph that a data module is given."""
    if isinstance(given, Graph):
        return given
    if isinstance(given, str | Path):
        return Graph.open(check_path("graph", given))
    check_instance("graph", given, Data | HeteroData, "a Graph, a PyG Data, or the path of a saved graph or of shards")
    return Graph.from_pyg(given)


def chosen_seed_type(types: TypeNames, task: str | None, whose: str) -> str | None:
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


def check_typed(types: TypeNames, settings: BatchSettings) -> None:
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
