"""Where the graph lives, and what data modules ask of it: this host has all of it, or each rank has a shard."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.boundary import Boundary, Outside
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import check_instance, check_path, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import TypeNames
from lightning_gnn_dist.homes.run import ForgetsRun, RunContext
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.layers.choice import Judged
from lightning_gnn_dist.layers.layered_loader import ReadyRows
from lightning_gnn_dist.layers.through_layers import Layer, ModelLayers
from lightning_gnn_dist.names import EXTENSIONS, extension
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

Shown = Callable[[Graph], Graph]
Check = Callable[[Graph], None]


class OnePart:
    """What a rank holds, in every super-epoch the same.

    Args:
        graph: Its nodes and the edges among them.

    Attributes:
        uncovered: The counts of seeds of weight 0 and of all seeds in the running part; (0, 0) where no node has its
            own weight.
        figures: Numbers to log.
    """

    uncovered: tuple[int, int] = (0, 0)
    figures: Mapping[str, float] = MappingProxyType({})

    def __init__(self, graph: Graph) -> None:
        self._graph = graph

    def at(self, super_epoch: int) -> Graph:
        """Return the part of a super-epoch, and forget the part before."""
        return self._graph

    def current(self) -> Graph:
        """Return the part that was asked for last, and at first the part of super-epoch 0."""
        return self.at(0)

    @property
    def is_resident(self) -> Tensor:
        """Which nodes of the running part the boundary did not add."""
        return torch.ones(self._graph.num_nodes, dtype=torch.bool)

    def close(self) -> None:
        """End what runs in the background."""


class Owners(NamedTuple):
    """Which rank owns each node of a part.

    Attributes:
        ids: The nodes of the part by their ids in the whole graph, which all ranks number alike.
        ranks: The rank that owns each of them.
    """

    ids: Tensor
    ranks: Tensor


class Seeds(NamedTuple):
    """The training nodes that a rank learns from.

    Attributes:
        here: Their ids in the part.
        asked: Their ids as the source of their batches knows them.
        places: Where each of them stands among all training nodes of the graph.
    """

    here: Tensor
    asked: Tensor
    places: Tensor


class GraphAccess(ForgetsRun, ABC):
    """Where the graph lives, and which part of it this rank trains on.

    A part is a graph in RAM; what a method says of nodes or seeds of a part is by their ids in it.

    Args:
        running: The run, and how its batches are made.
        boundary: What becomes of senders outside the part.
        coverage: Gives nodes weights for the loss, where the boundary loses some of what they see.

    Attributes:
        whole: The graph, where every host has it.
        folder: The folder where this host has some of the graph; None where it has all.
        types: The types of nodes and edges; a graph without types has one of each, without a name.
        asked: The boundary that the user gave; ``boundary`` is what it is in this run.
        coverage: What gives nodes weights for the loss; None where there are none, or where nothing is lost.
    """

    whole: Graph | None = None
    folder: Path | None = None
    types: TypeNames

    def __init__(self, running: RunContext, boundary: Boundary, coverage: Coverage | None) -> None:
        self.running, self.asked, self.boundary = running, boundary, boundary
        self.coverage = None if boundary.exchanges or boundary.keeps_rows else coverage

    # The graph.

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the graph, by which a strategy sees whether all ranks have the same one."""

    @property
    def digests(self) -> dict[str, Any]:
        """Digests of what else ranks must have alike: the graph's arrays, and which rank holds what."""
        return {}

    @abstractmethod
    def split(self, name: str) -> Tensor:
        """Return the nodes of the whole graph that a mask marks, ``"train"`` for ``train_mask``. Collective."""

    # The run.

    @property
    def is_cut(self) -> bool:
        """Whether this rank trains on less than the whole graph."""
        return self.turns > 1 or (self.running.num_ranks > 1 and not self.boundary.sees_whole_graph)

    @property
    def turns(self) -> int:
        """How many super-epochs an epoch has, in each of which the rank learns from some of its seeds."""
        return 1

    @property
    def exchanges(self) -> bool:
        """Whether ranks exchange rows in every step."""
        return self.is_cut and self.boundary.exchanges

    def prepare(self) -> None:  # optional
        """Do what one process of each host does for all."""

    def open(self, check: Check, check_of_all: Check) -> None:  # optional
        """Open the graph in a run that all ranks have agreed on. Collective.

        Args:
            check: Refuses what of the graph was not here before.
            check_of_all: Refuses what the rows of all ranks are together. Collective.
        """

    @abstractmethod
    def begin_fit(self) -> None:
        """Settle the part that is trained on. Collective."""

    def close(self) -> None:
        """End what runs in the background, and forget what only the run has."""
        for part in (vars(self).get("outside"), vars(self).get("parts")):
            if part is not None:
                part.close()
        self.rest()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"running": self.running.at_rest()}

    def abort(self) -> None:  # optional
        """End connections at once, so that no thread waits for a rank that will never answer."""

    def state(self) -> dict[str, Any]:
        """Return what a resumed fit keeps."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:  # optional
        """Go on with what the fit of a checkpoint has kept."""

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log."""
        return {}

    # The part.

    @cached_property
    def outside(self) -> Outside | None:
        """What batches of a part know of nodes outside it, beside what the part has; None: nothing."""
        return self.boundary.wrap(self)

    @abstractmethod
    def partition(self, num_parts: int) -> Partition:
        """Return which part each node is in."""

    def every(self) -> int | None:
        """Return the passes in a super-epoch, or None if a rank's part never changes."""
        return None

    @cached_property
    @abstractmethod
    def parts(self) -> OnePart:
        """The parts that this rank trains on in this run. Collective, the first time."""

    @abstractmethod
    def shown(self, part: Graph) -> Graph:
        """Return a part as batches show it."""

    def against_averaging(self) -> str | None:
        """Return why averaging alone loses accuracy on these parts, and what to do; None where it loses little."""
        return None

    # The nodes that are learned.

    @abstractmethod
    def settle_seeds(self) -> None:
        """Find out what ranks learn in a fit, and refuse one in which some rank has nothing to learn. Collective."""

    @abstractmethod
    def most_seeds(self) -> int:
        """Return how many nodes the rank learns that learns most, the same on all ranks."""

    @abstractmethod
    def seeds_of(self, part: Graph) -> Seeds:
        """Return what the rank learns from of a part."""

    # Batches.

    @abstractmethod
    def training_source(self, part: Graph, sampler: Sampler) -> BatchSource:
        """Return the source of training batches of a part."""

    @abstractmethod
    def whole_source(self, sampler: Sampler, *, evaluates: bool = False) -> BatchSource:
        """Return the source of batches of the whole graph; that of an evaluation may spare memory."""

    # What an evaluation costs.

    @property
    def place(self) -> int:
        """The place of this rank's share among the equal shares of an evaluation."""
        return self.running.rank

    @abstractmethod
    def size_of_evaluation(self, judged: Judged, sampler: Sampler, model: ModelLayers | None) -> int:
        """Return how many seeds a batch has, the same on all ranks. Collective."""

    @abstractmethod
    def ready_rows(self, judged: Judged, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        """Return what computes the rows of all seeds layer by layer, or None where batches do it at less cost."""

    @abstractmethod
    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        """Return the bytes of a batch around each of some lists of nodes, with one hop more than an evaluation has.

        None where these are more than ``most``, or where that hop brings no edge. Collective.
        """

    # Rows of nodes outside the part.

    @abstractmethod
    def with_senders(self, part: Graph, layers: list[Layer]) -> tuple[Graph, Tensor, Owners]:
        """Return a part as batches show it, with all nodes that send to it, and what layers read of the whole graph.

        Also the rank's own training nodes in it, and who owns its nodes. Collective.
        """


def folder_of(given: object, name: str) -> Any | None:
    """Return what opens the folder that a data module is given as its argument ``name``, if it is no saved graph."""
    if not isinstance(given, str | Path):
        return None
    path = check_path(name, given)
    files = [name for name in EXTENSIONS if name.endswith(".json") and (path / name).exists()]
    return extension(files[0])(path) if files else None


def graph_of(given: Graph | Data | HeteroData | str | Path) -> Graph:
    """Return the graph that a data module is given."""
    if isinstance(given, Graph):
        return given
    if isinstance(given, str | Path):
        return Graph.open(check_path("graph", given))
    check_instance("graph", given, Data | HeteroData, "a Graph, a PyG Data, or the path of a saved graph or of shards")
    return Graph.from_pyg(given)


def with_seeds_of(graph: Graph, task: str | None) -> Graph:
    """Return a graph whose seeds are of the type ``task``, by default the one that it has chosen or that has a mask."""
    kind = chosen_seed_type(graph.types, task, "this one")
    return graph if kind is None or kind == graph.types.seeds else graph.with_seeds(kind)


def chosen_seed_type(types: TypeNames, task: str | None, whose: str) -> str | None:
    """Return the type of the seeds of a typed graph, by default the one that it has chosen or that has a mask."""
    if types.have_names:
        return types.seed_type() if task is None else task
    if task is not None:
        raise ValueError(f"task ({shown(task)}) is for a graph with types, and {whose} has none.")
    return None


def check_typed(types: TypeNames, settings: BatchSettings, graph: Graph | None = None) -> None:
    """Refuse numbers of other types, and what does not take a typed graph, or this one, if it is one."""
    if not types.have_names:
        return
    for sampler in settings.samplers:
        if isinstance(sampler, NeighborSampler):
            sampler.of_types(types)
    if settings.loading.sample_on == "device":
        raise ValueError('sample_on="device" is for graphs without types: leave it out, and batches are drawn in RAM.')
    if graph is not None:
        for sampler in settings.samplers:
            sampler.sample_bulk(graph, [], [])  # refuses the graph, or draws nothing
