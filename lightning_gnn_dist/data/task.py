"""What a data module learns and judges: nodes, or edges."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from lightning_gnn_dist.batches.global_batches import OwnSeeds
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.around import seeds_around
from lightning_gnn_dist.data.evaluating import Judged
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.home import Home
from lightning_gnn_dist.homes.running import ForgetsRun
from lightning_gnn_dist.homes.times import check_temporal
from lightning_gnn_dist.sampling.base import Sampler


class Task(ForgetsRun, ABC):
    """What is learned and judged in a graph, wherever it lives.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
    """

    has_inputs: ClassVar[bool]  # whether training batches say where their seeds stand among all
    probes: ClassVar[bool] = True  # whether a rank may look at any of them before an evaluation

    def __init__(self, home: Home, values: ValueCheck) -> None:
        self.home, self.values = home, values

    @abstractmethod
    def check(self, rows: Graph) -> None:
        """Refuse what of the graph is here if samplers do not suit it. Not collective."""

    @abstractmethod
    def begin(self, *, is_fit: bool) -> None:
        """Refuse ranks with nothing to learn. Collective."""

    @abstractmethod
    def most(self) -> int:
        """Return how much the rank learns that learns most, the same on all ranks."""

    @abstractmethod
    def of_corrections(self) -> Tensor | OwnSeeds:
        """Return all training nodes of the whole graph or the rank's own, or the positions of all training edges."""

    @abstractmethod
    def seeds_and_source(self, part: Graph) -> tuple[Tensor, BatchSource]:
        """Return what the rank learns of a part, after a check of its values, and the source of its batches."""

    def inputs_of(self, part: Graph, seeds: Tensor) -> Tensor | None:
        """Return where each seed of a part stands among all training nodes of the graph, or None for edges."""
        return None

    def seeds_around(self, part: Graph) -> Tensor:
        """Return the seeds of other ranks that this one learns from too, by their ids in a part, after a check."""
        return torch.empty(0, dtype=torch.int64)

    @abstractmethod
    def across(self, sampler: Sampler) -> Sampler:
        """Return what samples the whole graph around what is learned."""

    @abstractmethod
    def judged(self, name: str) -> Judged:
        """Return the ``"val"`` or ``"test"`` nodes or edges. Collective, the first time, of shards."""

    def check_prediction(self) -> None:  # optional
        """Refuse to predict rows of nodes where nodes have no rows of their own."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"values": ValueCheck(is_on=self.values.is_on)}


class NodeTask(Task):
    """The nodes that masks of the graph mark."""

    has_inputs = True

    def check(self, rows: Graph) -> None:
        check_temporal(rows, self.home.running.settings, self.home.boundary)

    def begin(self, *, is_fit: bool) -> None:
        self.home.begin_nodes(is_fit=is_fit)

    def most(self) -> int:
        return self.home.most_seeds()

    def of_corrections(self) -> Tensor | OwnSeeds:
        run = self.home.running
        if run.settings.global_batching.deal != "own":
            return self.home.split("train")
        return OwnSeeds(*self.home.own_training(), run.rank, run.num_ranks)

    def seeds_and_source(self, part: Graph) -> tuple[Tensor, BatchSource]:
        seeds = self.home.own_seeds(part)
        self.values.of_training(part, seeds)
        return self.home.training_source(part, seeds, self.home.running.settings.of_parts())

    def inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        return self.home.inputs_of(part, seeds)

    def seeds_around(self, part: Graph) -> Tensor:
        home, hops = self.home, self.home.boundary.seed_hops
        if not hops or not home.is_cut:
            return super().seeds_around(part)
        seeds = seeds_around(part, home.own_nodes(part), home.shown(part).node_arrays["train_mask"], hops)
        self.values.of_labels(part, seeds, "train_mask")
        return seeds

    def across(self, sampler: Sampler) -> Sampler:
        return sampler

    def judged(self, name: str) -> Judged:
        nodes = self.home.split(name)
        self.home.check_labels(self.values, nodes, f"{name}_mask")
        return judged_nodes(self.home, nodes, f"{name}_mask marks")


def judged_nodes(home: Home, nodes: Tensor, whose: str) -> Judged:
    """Return nodes as what is judged; ``whose`` begins a sentence about how many there are."""
    sampler: Callable[[int], Sampler] = home.running.sampler_of_evaluation
    return Judged(nodes, f"{whose} {nodes.numel()} nodes", sampler)
