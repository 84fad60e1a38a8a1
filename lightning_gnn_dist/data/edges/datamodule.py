"""What data modules of edges share, whether hosts have the graph or shards of it: batches around edges of tables."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.data.edges.asked import AskedEdges, check_held_back
from lightning_gnn_dist.data.exchanging import ExchangingDataModule
from lightning_gnn_dist.data.temporal.checks import check_rows_of_nodes
from lightning_gnn_dist.evaluation.layered_loader import Targets
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.targets.sampler import LinkSampler
from lightning_gnn_dist.sampling.targets.tables import HeldLinks


class EdgeDataModule(ExchangingDataModule):
    """Batches around the edges of a graph, and around held ones."""

    _has_inputs = False  # nobody lists the training edges
    _way_to_hold: str  # says how to hold edges of a {name} back
    _asked: AskedEdges

    # What a subclass says.

    @abstractmethod
    def _rows_of_edges(self) -> Graph:
        """Return the graph, or the own shard, whose edges are learned, with their labels."""

    @abstractmethod
    def _candidates_anywhere(self) -> Candidates:
        """Return the nodes of the whole graph that false receivers are drawn from."""

    @abstractmethod
    def _held_links(self, name: str) -> HeldLinks:
        """Return held edges, at least this rank's share of them. Collective, the first time."""

    def _first_edge(self) -> int:
        """Return the number that asks for the edge at position 0 of these rows."""
        return 0

    # What Lightning calls.

    @property
    def num_negatives(self) -> int:
        """False receivers for each training edge."""
        return self._asked.num_negatives

    def predict_dataloader(self) -> BatchLoader:
        check_rows_of_nodes(self._rows_of_edges(), self._settings, self._asked.receiver_type)
        return super().predict_dataloader()

    # What it is made of.

    def _whole_sampler(self) -> LinkSampler:
        return self._across(super()._whole_sampler())

    def _across(self, sampler: Sampler) -> LinkSampler:
        """Return a sampler around edges in the whole graph."""
        return self._asked.around_own(sampler, self._rows_of_edges(), self._candidates_anywhere(), self._first_edge())

    def _around_part(self, part: Graph, own: Tensor) -> LinkSampler:
        """Return a sampler around edges of a part, with its own nodes as false receivers."""
        return self._asked.around_own(
            self.sampler, part, self._asked.candidates(part, self._asked.receivers(part, own))
        )

    def _judging_loader(self, name: str) -> BatchLoader:
        """Return the loader of this rank's share of the held edges. Collective, the first time, of shards."""
        check_held_back(name, self._asked.links.held, self._way_to_hold.format(name=name))
        held, count = self._held_links(name), int(self._asked.links.held[name][-1])

        def sampler_of(more_hops: int) -> Sampler:
            return self._asked.around(held, self._eval_sampler(more_hops))

        def targets_of(ids: Tensor) -> Targets:
            asked = held.targets_of(ids)
            nodes, ends = asked.seeds()
            return Targets(nodes, asked.in_batch(ends))

        return self._eval_loader(sampler_of, range(count), f"There are {count} {name} edges", count, targets_of)
