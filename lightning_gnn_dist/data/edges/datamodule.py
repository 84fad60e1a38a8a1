"""What data modules of edges share, whether hosts have the graph or shards of it: batches around edges of tables."""

from __future__ import annotations

from torch import Tensor

from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.data.edges.asked import AskedEdges
from lightning_gnn_dist.data.exchanging import ExchangingDataModule
from lightning_gnn_dist.evaluation.layered_loader import Targets
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.targets.sampler import LinkSampler
from lightning_gnn_dist.sampling.targets.tables import HeldLinks


class EdgeDataModule(ExchangingDataModule):
    """Batches around the edges of a graph, and around held ones.

    Attributes:
        num_negatives: False receivers for each training edge.
    """

    _has_inputs = False  # nobody lists the training edges
    _asked: AskedEdges
    num_negatives: int

    def _around_own(self, sampler: Sampler, graph: Graph, candidates: Candidates, first: int = 0) -> LinkSampler:
        """Return a sampler around the edges of a graph; the one at position 0 is asked for by the number ``first``."""
        return self._asked.around(self._asked.own(graph, self.num_negatives, candidates, first), sampler)

    def _held_loader(self, held: HeldLinks, name: str, count: int) -> BatchLoader:
        """Return the loader of this rank's share of so many held edges."""

        def sampler_of(more_hops: int) -> Sampler:
            return self._asked.around(held, self._eval_sampler(more_hops))

        def targets_of(ids: Tensor) -> Targets:
            asked = held.targets_of(ids)
            nodes, ends = asked.seeds()
            return Targets(nodes, asked.in_batch(ends))

        return self._eval_loader(sampler_of, range(count), f"There are {count} {name} edges", count, targets_of)
