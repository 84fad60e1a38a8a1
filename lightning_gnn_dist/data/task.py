"""What a data module learns and judges, nodes or edges, and the loaders of its evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batches import Batches, Deal
from lightning_gnn_dist.batches.global_batches import OwnSeeds
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.boundary import seeds_around
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.access import GraphAccess
from lightning_gnn_dist.homes.local_graph import LocalGraph, train_nodes
from lightning_gnn_dist.homes.run import ForgetsRun
from lightning_gnn_dist.layers.choice import Evaluated, is_limited
from lightning_gnn_dist.layers.exactness import Exactness, Outlook
from lightning_gnn_dist.layers.layered_loader import EvaluationLoader, Targets
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.user_ids import Columns


class Learned(NamedTuple):
    """What a rank learns of a part.

    Attributes:
        seeds: Its nodes or edges, by the ids that the source knows: the rank's own first, then those of other ranks
            that it learns from too.
        num_own: How many are its own, which is how many a pass takes.
        inputs: Where each stands among all training nodes of the graph; None for edges.
        source: Makes batches of them.
    """

    seeds: Tensor
    num_own: int
    inputs: Tensor | None
    source: BatchSource


class Judged(NamedTuple):
    """What an evaluation judges.

    Attributes:
        ids: Nodes, or numbers of held edges, of all ranks.
        whose: Says of how many there are, for an error.
        sampler: Returns what draws batches around them, with so many hops more than an evaluation takes.
        num_ids: They lie below this number. Default: the number of nodes.
        targets: Returns what a batch of some of them evaluates.
        dealt: Returns the sampler for so many batches.
    """

    ids: Tensor | range
    whose: str
    sampler: Callable[[int], Sampler]
    num_ids: int | None = None
    targets: Callable[[Tensor], Targets] = Targets
    dealt: Callable[[Sampler, int], Sampler] = lambda sampler, _: sampler

    def check_shared(self, num_ranks: int) -> None:
        """Refuse fewer of them than there are ranks."""
        if len(self.ids) < num_ranks:
            raise ValueError(
                f"{self.whose}, but {num_ranks} ranks share the evaluation: mark more, take "
                "fewer ranks, or leave it out, limit_val_batches=0."
            )


def evaluation_of(judged: Judged, home: GraphAccess, exactness: Exactness, data: object) -> Batches:
    """Return the loader of this rank's share of an evaluation. Collective.

    Args:
        judged: What is judged.
        home: Where the graph lives.
        exactness: Says whether figures are those of the whole graph.
        data: The data module, whose hooks may change batches.
    """
    run, costs = home.running, home.costs
    exactness.check(run.trainer)
    num_ranks, count = run.num_ranks, len(judged.ids)
    judged.check_shared(num_ranks)
    evaluated = Evaluated(judged.ids, lambda ids: judged.targets(ids).nodes.unique(), num_ranks)
    sampler, model = judged.sampler(0), run.layers_of_model(data, is_typed=have_names(home.types))
    size = run.settings.evaluation.batch_size or run.settings.batch_size
    if run.settings.evaluation.batch_size is None and not is_limited(run.trainer):
        size = costs.batch_size(evaluated, sampler, model)
    rows, num_batches = costs.ready_rows(evaluated, size, model), evaluated.num_batches(size)
    sampler = judged.dealt(sampler, num_batches)
    source = home.evaluation_source(sampler, judged.num_ids)
    outlook = Outlook(
        evaluated,
        lambda more_hops: home.evaluation_source(judged.sampler(more_hops), judged.num_ids),
        costs.bytes_around,
        lambda: num_batches == 1 and num_ranks == 1 and costs.is_whole_graph(evaluated.nodes),
        run.dtype,
    )
    look, num_hops = partial(exactness.look, run.trainer, outlook), run.settings.training_sampler.num_hops
    make = partial(EvaluationLoader, num_hops, look, rows, judged.targets)
    share, places = (replace(evaluated, ids=ids).share(costs.place) for ids in (judged.ids, range(count)))
    how = run.options_of_batches
    if source.is_short:
        how["bulk_size"] = 1
    return make(source, Deal(share, num_batches, run.seed, shuffle=False, inputs=places), **how)


class Task(ForgetsRun, ABC):
    """What is learned and judged in a graph, wherever it lives.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
    """

    has_inputs: ClassVar[bool]  # whether training batches say where their seeds stand among all
    probes: ClassVar[bool] = True  # whether a rank may look at any of them before an evaluation

    def __init__(self, home: GraphAccess, values: ValueCheck) -> None:
        self.home, self.values = home, values

    @abstractmethod
    def check(self, rows: Graph) -> None:
        """Refuse what of the graph is here if samplers do not suit it. Not collective."""

    def check_whole(self, graph: Graph) -> None:
        """Refuse bad values in a graph that is here as a whole, before ranks start; of files ranks read their own."""
        if graph.path is None:
            self.values.of_arrays(graph)

    @abstractmethod
    def begin(self, *, is_fit: bool) -> None:
        """Refuse ranks with nothing to learn. Collective."""

    @abstractmethod
    def most(self) -> int:
        """Return how much the rank learns that learns most, the same on all ranks."""

    def num_batches(self) -> int:
        """Return the number of batches of a pass over a part, the same for all ranks and parts."""
        return 1 if self.home.exchanges else -(-self.most() // self.home.running.settings.batch_size)

    @abstractmethod
    def of_corrections(self) -> Tensor | OwnSeeds:
        """Return all training nodes of the whole graph or the rank's own, or the positions of all training edges."""

    @abstractmethod
    def learned(self, part: Graph) -> Learned:
        """Return what the rank learns of a part, after a check of its values."""

    def inputs_of(self, part: Graph, seeds: Tensor) -> Tensor | None:
        """Return where each seed of a part stands among all training nodes of the graph, or None for edges."""
        return None

    @abstractmethod
    def across(self, sampler: Sampler) -> Sampler:
        """Return what samples the whole graph around what is learned."""

    @abstractmethod
    def judged(self, name: str) -> Judged:
        """Return the ``"val"`` or ``"test"`` nodes or edges. Collective, the first time, of shards."""

    def check_prediction(self) -> None:  # optional
        """Refuse to predict rows of nodes where nodes have no rows of their own."""

    def predicted(self, some: Tensor | None) -> Judged:
        """Return what is predicted: some nodes of the whole graph, or all of the type that is learned from."""
        self.check_prediction()
        if some is not None:
            lacking = max(0, self.home.running.num_ranks - len(some))  # ranks without a node of their own take the last
            return judged_nodes(self.home, torch.cat([some, some[-1:].expand(lacking)]), "only() was given")
        ids = self.home.ids
        return judged_nodes(self.home, torch.arange(ids.start, ids.stop), "the graph has")

    def columns(self, some: Tensor | None, ids_of: Path | None) -> Columns:
        """Return how a table names the rows of what is predicted.

        Args:
            some: The nodes that are predicted; None is all.
            ids_of: The prepared graph whose ids they have. Default: this one.
        """
        home = self.home
        path = None if home.whole is None else home.whole.path
        nodes = None if some is None else (some - home.ids.start).numpy()
        found: Columns = extension("ids of nodes")(ids_of, path, home.types.seed_type(), len(home.ids), nodes)
        return found

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"values": ValueCheck(is_on=self.values.is_on)}


class NodeTask(Task):
    """The nodes that masks of the graph mark."""

    has_inputs = True

    @abstractmethod
    def own_seeds(self, part: Graph) -> Tensor:
        """Return the training nodes of a part that are the rank's own."""

    @abstractmethod
    def own_nodes(self, part: Graph) -> Tensor:
        """Return the nodes of a part that are the rank's own."""

    @abstractmethod
    def own_training(self) -> tuple[Tensor, Tensor, int]:
        """Return the rank's own training nodes by their ids in the graph, where each stands, and how many all have."""

    def check(self, rows: Graph) -> None:
        ours, *others = self.home.running.settings.samplers
        if isinstance(ours, SeesByTime):
            for other in others:
                other.check_graph(rows)  # type: ignore[attr-defined]  # it has the same times
            ours.check_data(rows)

    def of_corrections(self) -> Tensor | OwnSeeds:
        run = self.home.running
        if run.settings.global_batching.deal != "own":
            return self.home.split("train")
        return OwnSeeds(*self.own_training(), run.rank, run.num_ranks)

    def learned(self, part: Graph) -> Learned:
        home, own = self.home, self.own_seeds(part)
        self.values.of_training(part, own)
        seeds, source = home.training_source(part, own, home.running.settings.training_sampler)
        if (hops := home.boundary.seed_hops) and home.is_cut:
            around = seeds_around(part, self.own_nodes(part), home.shown(part).node_arrays["train_mask"], hops)
            self.values.of_labels(part, around, "train_mask")
            seeds = torch.cat([seeds, around])
        return Learned(seeds, own.numel(), self.inputs_of(part, seeds), source)

    def across(self, sampler: Sampler) -> Sampler:
        return sampler

    def judged(self, name: str) -> Judged:
        nodes = self.home.split(name)
        if self.home.whole is not None:
            self.values.of_labels(self.home.whole, nodes, f"{name}_mask")
        return judged_nodes(self.home, nodes, f"{name}_mask marks")


class WholeNodes(NodeTask):
    """Nodes of a graph that every host has."""

    home: LocalGraph

    def check_whole(self, graph: Graph) -> None:
        self.values.of_labels(graph, train_nodes(graph), "train_mask")
        super().check_whole(graph)

    def begin(self, *, is_fit: bool) -> None:
        if is_fit and self.home.is_cut:
            self.home.check_run(self.num_batches())

    def most(self) -> int:
        return self.home.plan.most_seeds()

    def own_seeds(self, part: Graph) -> Tensor:
        seeds = part.split("train")
        return seeds if part is not self.home.whole or self.home.num_parts == 1 else seeds[self._is_own(seeds)]

    def own_nodes(self, part: Graph) -> Tensor:
        return self._is_own(part.node_arrays["n_id"]).nonzero().view(-1)

    def inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        rows = seeds if part is self.home.whole else part.node_arrays["n_id"][seeds]
        return torch.searchsorted(self.home.split("train"), rows)

    def own_training(self) -> tuple[Tensor, Tensor, int]:
        seeds = self.home.split("train")
        own = self._is_own(seeds).nonzero().view(-1)
        return seeds[own], own, seeds.numel()

    def _is_own(self, nodes: Tensor) -> Tensor:
        """Return which nodes of the whole graph are learned from where this rank's part is, in super-epoch 0."""
        return self.home.plan.by_rank().assignment[nodes] == self.home.running.rank


def judged_nodes(home: GraphAccess, nodes: Tensor, whose: str) -> Judged:
    """Return nodes as what is judged; ``whose`` begins a sentence about how many there are."""
    sampler: Callable[[int], Sampler] = home.running.sampler_of_evaluation
    return Judged(nodes, f"{whose} {nodes.numel()} nodes", sampler)
