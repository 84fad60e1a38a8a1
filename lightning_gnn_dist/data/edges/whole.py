"""The edges of a split that every host has: each rank learns those of its part."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.data.edges.asked import AskedEdges
from lightning_gnn_dist.data.edges.task import EdgeTask
from lightning_gnn_dist.data.links import LinkSplit
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.whole import WholeHome
from lightning_gnn_dist.sampling.links import edges_at
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.targets.tables import HeldLinks


class WholeEdges(EdgeTask):
    """The edges of a split in a graph that every host has.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
        asked: Which edges batches ask for.
        split: The split.
    """

    home: WholeHome
    _way_to_hold = "give split_edges() a share for them, split_edges(graph, {name}=0.1)."

    def __init__(self, home: WholeHome, values: ValueCheck, asked: AskedEdges, split: LinkSplit) -> None:
        super().__init__(home, values, asked)
        self._split = split
        self._most: dict[int, int] = {}

    def begin(self, *, is_fit: bool) -> None:
        """Do nothing: ``most()`` refuses ranks with nothing to learn, on all ranks alike."""

    def rows(self) -> Graph:
        return self.home.whole

    def candidates(self) -> Candidates:
        return self.asked.candidates(self.home.whole, self.asked.ends.receivers)

    def held(self, name: str) -> HeldLinks:
        arrays = self._split.held_arrays.get(name, {})
        return self.asked.held(self._split.edges[name], self._split.negatives.get(name), arrays)

    def most(self) -> int:
        num_ranks = self.home.running.num_ranks
        if num_ranks not in self._most:
            self._most[num_ranks] = self._count_most(num_ranks)
        return self._most[num_ranks]

    def _count_most(self, num_ranks: int) -> int:
        total = self.of_corrections().numel()
        if num_ranks == 1:
            return total
        assignment = self.home.partition(num_ranks).assignment

        def count(owner: Tensor) -> Tensor:
            rank_of_node = owner[assignment]
            _, receivers = edges_at(self.home.graph, self.positions(self.home.whole, rank_of_node))
            return torch.bincount(rank_of_node[receivers], minlength=num_ranks)

        what, otherwise = f"{total} training edges", "or MetisPartitioner(), which keeps most edges inside parts"
        if self.home.boundary.sees_whole_graph:
            what, otherwise = f"nodes that the {what} lead to", "or another partition"
        return self.home.cut.most(num_ranks, what, count, otherwise)

    def of_corrections(self) -> Tensor:
        everyone = torch.zeros(1, dtype=torch.int64).expand(self.home.whole.num_nodes)
        seeds = self.positions(self.home.whole, everyone)
        if not seeds.numel():
            which = "" if self._split.edge_type is None else f" of type {self._split.edge_type}"
            with_label = "" if self._split.labels is None else f" with labels ({self._split.labels})"
            raise ValueError(f"The graph has no edges{which}{with_label} to learn from.")
        return seeds

    def seeds_and_source(self, part: Graph) -> tuple[Tensor, BatchSource]:
        is_whole = part is self.home.graph
        own, shown = self._own(part), self.home.shown(part)
        self.values.of_arrays(shown)
        seeds = self.positions(self.home.whole if is_whole else part, own.to(torch.int64) - 1)
        sampler = self.across(self.home.running.settings.of_parts()) if is_whole else self.around_part(part, own)
        return seeds, self.home.source(shown, sampler, part.num_edges)

    def _own(self, part: Graph) -> Tensor:
        """Return which nodes of a part are the rank's own."""
        if part is self.home.graph and self.home.running.num_ranks > 1:
            return self.home.partition(self.home.running.num_ranks).assignment == self.home.running.rank
        own: Tensor | None = vars(part).get("node_arrays", {}).get("train_mask")
        return torch.ones(part.num_nodes, dtype=torch.bool) if own is None else own
