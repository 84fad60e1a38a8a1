"""The edges of a graph, or those of a split that carry labels or times, as what is learned and judged."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from lightning_gnn_dist.data.edges.asked import AskedEdges, check_held_back
from lightning_gnn_dist.data.evaluating import Judged
from lightning_gnn_dist.data.task import Task
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.home import Home
from lightning_gnn_dist.homes.times import check_event_samplers, check_rows_of_nodes
from lightning_gnn_dist.layers.evaluating.layered_loader import Targets
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.targets.sampler import LinkSampler
from lightning_gnn_dist.sampling.targets.tables import HeldLinks


class EdgeTask(Task):
    """The edges that batches ask for: those of the graph are learned, held ones are judged.

    Args:
        home: Where the graph lives.
        values: Refuses bad values in what is learned from.
        asked: Which edges these are.
    """

    has_inputs = False  # nobody lists the training edges
    _way_to_hold: str  # says how to hold edges of a {name} back

    def __init__(self, home: Home, values: ValueCheck, asked: AskedEdges) -> None:
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
