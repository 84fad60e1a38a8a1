"""What a data module learns and judges, nodes or edges, and the loaders of its evaluations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batches import Batches, Deal, Learning, OwnSeeds
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import check_arrays, check_labels
from lightning_gnn_dist.homes.access import GraphAccess
from lightning_gnn_dist.homes.local_graph import train_nodes
from lightning_gnn_dist.homes.run import ForgetsRun
from lightning_gnn_dist.layers.choice import Judged, is_limited
from lightning_gnn_dist.layers.exactness import Exactness, check_depth
from lightning_gnn_dist.layers.layered_loader import EvaluationLoader
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.user_ids import Columns


def evaluation_of(judged: Judged, home: GraphAccess, exactness: Exactness, data: object) -> Batches:
    """Return the loader of this rank's share of an evaluation. Collective.

    Args:
        judged: What is judged.
        home: Where the graph lives.
        exactness: Says whether figures are those of the whole graph.
        data: The data module, whose hooks may change batches.
    """
    run, settings = home.running, home.running.settings
    if run.module is not None:
        check_depth(run.module, settings.training_sampler)
    judged.check_shared(run.num_ranks)
    sampler, model = judged.sampler(0), run.layers_of_model(data, is_typed=home.types.have_names)
    size = settings.evaluation.batch_size or settings.batch_size
    if settings.evaluation.batch_size is None and not is_limited(run.trainer):
        size = home.size_of_evaluation(judged, sampler, model)
    rows, num_batches = home.ready_rows(judged, size, model), judged.num_batches(size)
    source = home.whole_source(judged.dealt(sampler, num_batches), evaluates=True)
    share, places = (replace(judged, ids=ids).share(home.place) for ids in (judged.ids, range(len(judged.ids))))
    learning = Learning(source, Deal(share, num_batches, run.seed, shuffle=False, inputs=places))
    look = partial(exactness.look, judged, home, num_batches)
    how = run.options_of_batches | ({"bulk_size": 1} if source.is_short else {})
    return EvaluationLoader(settings.training_sampler.num_hops, look, rows, judged, learning, **how)


class Task(ForgetsRun, ABC):
    """What is learned and judged in a graph, wherever it lives.

    Args:
        home: Where the graph lives.

    Attributes:
        checks_values: Whether bad values in what is learned or judged are refused.
    """

    has_inputs: ClassVar[bool]  # whether training batches say where their seeds stand among all
    probes: ClassVar[bool] = True  # whether a rank may look at any of them before an evaluation

    def __init__(self, home: GraphAccess) -> None:
        self.home, self.checks_values = home, home.running.settings.loading.check_values

    @abstractmethod
    def check(self, rows: Graph) -> None:
        """Refuse what of the graph is here if samplers do not suit it. Not collective."""

    def check_whole(self, graph: Graph) -> None:  # optional
        """Refuse what is to be learned of a graph that is here as a whole, before ranks start."""

    def check_of_all(self, rows: Graph) -> None:  # optional
        """Refuse what these rows are together with those of other ranks, where each has some. Collective."""

    def begin_fit(self) -> None:  # optional
        """Settle what is learned of the part, and refuse ranks with nothing to learn. Collective."""

    def close(self) -> None:
        """End what runs in the background, and forget what only the run has."""
        self.home.close()
        self.rest()

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
    def learned(self, part: Graph, num_batches: int, seed: int) -> Learning:
        """Return what so many batches of a pass over a part are made of, after a check of its values."""

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
        ids = self.home.types.seed_ids
        return judged_nodes(self.home, torch.arange(ids.start, ids.stop), "the graph has")

    def columns(self, some: Tensor | None, ids_of: Path | None) -> Columns:
        """Return how a table names the rows of what is predicted.

        Args:
            some: The nodes that are predicted; None is all.
            ids_of: The prepared graph whose ids they have. Default: this one.
        """
        home = self.home
        path = None if home.whole is None else home.whole.path
        nodes = None if some is None else (some - home.types.seed_ids.start).numpy()
        found: Columns = extension("ids of nodes")(
            ids_of, path, home.types.seed_type(), len(home.types.seed_ids), nodes
        )
        return found


class NodeTask(Task):
    """The nodes that masks of the graph mark."""

    has_inputs = True

    def check(self, rows: Graph) -> None:
        ours, *others = self.home.running.settings.samplers
        if isinstance(ours, SeesByTime):
            for other in others:
                other.check_graph(rows)  # type: ignore[attr-defined]  # it has the same times
            ours.check_data(rows)

    def check_whole(self, graph: Graph) -> None:
        seeds = train_nodes(graph)
        if self.checks_values:
            check_labels(graph, seeds, "train_mask")

    def check_of_all(self, rows: Graph) -> None:
        if isinstance(sampler := self.home.running.settings.training_sampler, SeesByTime):
            sampler.check_shard(rows)

    def begin_fit(self) -> None:
        self.home.settle_seeds()

    def most(self) -> int:
        return self.home.most_seeds()

    def of_corrections(self) -> Tensor:
        return self.home.split("train")

    def learned(self, part: Graph, num_batches: int, seed: int) -> Learning:
        home, seeds = self.home, self.home.seeds_of(part)
        if home.exchanges:
            assert home.outside is not None
            return home.outside.learning(part, seeds.places)
        if self.checks_values:
            check_arrays(part)
            check_labels(part, seeds.here, "train_mask")
        source = home.training_source(part, home.running.settings.training_sampler)
        return Learning(source, Deal(seeds.asked, num_batches, seed, inputs=seeds.places))

    def across(self, sampler: Sampler) -> Sampler:
        return sampler

    def judged(self, name: str) -> Judged:
        nodes = self.home.split(name)
        if self.checks_values and self.home.whole is not None:
            check_labels(self.home.whole, nodes, f"{name}_mask")
        return judged_nodes(self.home, nodes, f"{name}_mask marks")


def judged_nodes(home: GraphAccess, nodes: Tensor, whose: str) -> Judged:
    """Return nodes as what is judged; ``whose`` begins a sentence about how many there are."""
    run = home.running
    return Judged(nodes, run.num_ranks, f"{whose} {nodes.numel()} nodes", run.sampler_of_evaluation)
