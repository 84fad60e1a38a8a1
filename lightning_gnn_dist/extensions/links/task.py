"""The edges of a split as what is learned and judged, where every host has the graph, or where ranks have shards."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.data.task import Judged, Task
from lightning_gnn_dist.extensions.links.asked import AskedEdges, check_held_back
from lightning_gnn_dist.extensions.links.link_sampler import LinkSampler
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.extensions.links.positions import edges_at
from lightning_gnn_dist.extensions.links.targets import HeldLinks
from lightning_gnn_dist.extensions.links.times import check_event_samplers, check_rows_of_nodes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.access import GraphAccess
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.layers.layered_loader import Targets
from lightning_gnn_dist.sampling.base import Sampler


class EdgeTask(Task):
    """The edges that batches ask for: those of the graph are learned, held ones are judged.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
        asked: Which edges these are.
    """

    has_inputs = False  # nobody lists the training edges
    _way_to_hold: str  # says how to hold edges of a {name} back

    def __init__(self, home: GraphAccess, values: ValueCheck, asked: AskedEdges) -> None:
        super().__init__(home, values)
        self.asked = asked

    @abstractmethod
    def rows(self) -> Graph:
        """Return the graph, or the own shard, whose edges are learned, with their labels."""

    @abstractmethod
    def candidates(self) -> Candidates:
        """Return the nodes of the whole graph that false receivers are drawn from."""

    @abstractmethod
    def held(self, name: str) -> HeldLinks:
        """Return held edges, at least this rank's share of them. Collective, the first time."""

    def first_edge(self) -> int:
        """Return the number that asks for the edge at position 0 of these rows."""
        return 0

    def check(self, rows: Graph) -> None:
        links = self.asked.links
        check_event_samplers(rows, self.home.running.settings, links.time, links.edge_type)

    def check_prediction(self) -> None:
        check_rows_of_nodes(self.rows(), self.home.running.settings, self.asked.receiver_type)

    def across(self, sampler: Sampler) -> LinkSampler:
        return self.asked.around_own(sampler, self.rows(), self.candidates(), self.first_edge())

    def around_part(self, part: Graph, own: Tensor) -> LinkSampler:
        """Return what samples a part around its edges, with its own nodes as false receivers."""
        candidates = self.asked.candidates(part, self.asked.receivers(part, own))
        return self.asked.around_own(self.home.running.settings.of_parts(), part, candidates)

    def positions(self, graph: Graph, owner: Tensor) -> Tensor:
        """Return where the training edges are whose ends, or whose receivers if batches see all, have one owner."""
        return self.asked.positions(graph, owner, across=self.home.boundary.sees_whole_graph)

    def judged(self, name: str) -> Judged:
        check_held_back(name, self.asked.links.held, self._way_to_hold.format(name=name))
        held, count = self.held(name), int(self.asked.links.held[name][-1])

        def sampler(more_hops: int) -> Sampler:
            return self.asked.around(held, self.home.running.sampler_of_evaluation(more_hops))

        def targets(ids: Tensor) -> Targets:
            asked = held.targets_of(ids)
            nodes, ends = asked.seeds()
            return Targets(nodes, asked.in_batch(ends), self.asked.links.edge_type)

        return Judged(range(count), f"There are {count} {name} edges", sampler, count, targets)


class WholeEdges(EdgeTask):
    """The edges of a split in a graph that every host has.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
        asked: Which edges batches ask for.
        split: The split.
    """

    home: LocalGraph
    _way_to_hold = "give split_edges() a share for them, split_edges(graph, {name}=0.1)."

    def __init__(self, home: LocalGraph, values: ValueCheck, asked: AskedEdges, split: LinkSplit | None) -> None:
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
        assert self._split is not None
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
        return self.home.plan_for(num_ranks).most(what, count, otherwise)

    def of_corrections(self) -> Tensor:
        everyone = torch.zeros(1, dtype=torch.int64).expand(self.home.whole.num_nodes)
        seeds = self.positions(self.home.whole, everyone)
        if not seeds.numel():
            links = self.asked.links
            which = "" if links.edge_type is None else f" of type {links.edge_type}"
            with_label = "" if links.labels is None else f" with labels ({links.labels})"
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
