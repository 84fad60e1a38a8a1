"""Edges as what is learned and judged: which of them batches ask for, and how, wherever the graph lives.

graph -> positions of the edges that are learned -> the graph as batches show it -> a sampler around these edges
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batches import Deal, Learning
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.checks import brief, check_at_least_if_given, shown
from lightning_gnn_dist.data.task import Task
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.edges import Edges, LinkEnds, ends_of
from lightning_gnn_dist.extensions.links.link_sampler import (
    LABEL,
    HeldLinks,
    LinkSampler,
    OwnLinks,
    edges_at,
    name_of_targets,
    positions_of_links,
)
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler, check_event_samplers
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.extensions.temporal.times import as_integers, times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.typed.names import TypeRanges
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.access import GraphAccess
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.layers.choice import Judged, Targets
from lightning_gnn_dist.sampling.base import Sampler


def sampler_of_events(sampler: Sampler | None, time: str | None) -> Sampler | None:
    """Return the sampler of a data module of edges, where none was named one that knows their times.

    Refuse one that shows later events, and one that draws by times where edges are not split by them.
    """
    if time is None:
        if isinstance(sampler, TemporalSampler):
            raise ValueError(
                "TemporalSampler draws around edges at their times, and this split holds them back at random: split "
                f"them by time, split_edges(graph, time={shown(sampler.time)}), or take NeighborSampler."
            )
        return sampler
    if sampler is None:
        return TemporalSampler([15, 10], time)
    if not isinstance(sampler, TemporalSampler) or sampler.time != time:
        raise ValueError(
            f"The graph of this split has the edges of all times ({time}), and {shown(sampler)} does not draw by "
            f"these: take TemporalSampler([15, 10], time={shown(time)})."
        )
    return sampler


@dataclass(frozen=True, eq=False)
class AskedEdges:
    """The edges that batches ask for.

    Attributes:
        links: Of which type they are, whether they are asked for their being there or for their labels, and when.
        ends: Between which nodes they are.
        num_negatives: False receivers for each that is learned.
    """

    links: LinkBounds
    ends: LinkEnds
    num_negatives: int

    @classmethod
    def of(cls, links: LinkBounds, types: TypeRanges, num_negatives: int | None) -> AskedEdges:
        """The edges of a graph of such types; by default with 1 negative, and none beside labels."""
        check_at_least_if_given(1, num_negatives=num_negatives)
        if links.labels is not None and num_negatives is not None:
            raise ValueError("num_negatives is for splits without labels: leave it out.")
        default = 1 if links.labels is None else 0
        ends = ends_of(types, links.edge_type, links.reverse)
        return cls(links, ends, default if num_negatives is None else num_negatives)

    @property
    def receiver_type(self) -> str:
        """The node type that edges lead to; without a name in a graph without types."""
        return "" if self.links.edge_type is None else self.links.edge_type[2]

    def positions(self, graph: Graph, owner: Tensor, *, across: bool) -> Tensor:
        """Return where the edges to learn are whose ends, or with ``across`` whose receivers, have one owner."""
        kind, loops = self.ends.target_type, self.links.labels is not None
        found = positions_of_links(graph, owner, self.links.undirected, kind, loops=loops, across=across)
        return self.of_labels_and_times(graph, found)

    def of_labels_and_times(self, graph: Graph, found: Tensor) -> Tensor:
        """Return those of some positions whose edges have a label, and are learned by their time."""
        if self.links.labels is None and self.links.time is None:
            return found
        arrays, rows = self.edges(graph).arrays, places_of(graph, self.ends.target_type.number, found)
        if self.links.labels is not None:
            is_asked = is_labelled(arrays[self.links.labels][rows])
            found, rows = found[is_asked], rows[is_asked]
        if self.links.time is None or self.links.until is None:
            return found
        return found[as_integers(arrays[self.links.time][rows]) < self.links.until]

    def shown(self, part: Graph) -> Graph:
        """Return a part as batches show it: without the labels of its edges, also those turned round."""
        name, edges = self.links.labels, self.edges(part)
        both = dict.fromkeys([edges.kind, edges.reverse or edges.kind])
        holding = [kind for kind in both if name in part.types.edge_arrays[kind]]
        if name is None or not holding:
            return part
        made = partial(reduce, lambda graph, kind: Edges(graph, kind).without([name]), holding, part)
        found: Graph = remembered(part, "without labels", made)
        return found

    def edges(self, graph: Graph) -> Edges:
        """Return those of a graph."""
        return Edges.of(graph, self.links.edge_type, self.links.reverse)

    def receivers(self, part: Graph, own: Tensor) -> range | Tensor:
        """Return the nodes of a part that false receivers are drawn from: the rank's own, if they may receive."""
        if self.links.edge_type is None:
            return range(int(own.sum()))  # they come first
        nodes = part.types.nodes_of(self.links.edge_type[2])
        return own[nodes.start : nodes.stop].nonzero().view(-1) + nodes.start

    def candidates(self, graph: Graph, nodes: range | Tensor) -> Candidates:
        """Return some nodes of a graph to draw false receivers from; by time, since when each of them is there."""
        if self.links.time is None:
            return Candidates(nodes)
        kind = self.receiver_type
        first = graph.types.nodes_of(kind).start
        return Candidates.of(nodes, times_of_receivers(graph, self.links.time, kind), first)

    def around_own(self, sampler: Sampler, graph: Graph, candidates: Candidates, first: int = 0) -> LinkSampler:
        """Return a sampler around edges of a graph; the one at position 0 is asked for by the number ``first``."""
        carried, time = self._carried(self.edges(graph).arrays), self.links.time
        if isinstance(sampler, TemporalSampler) and time != sampler.time:
            time = None  # nobody sees these edges: a question has no false receiver among its answers of any time
        own = OwnLinks(self.num_negatives, candidates, self.links.undirected, carried, first, time)
        return self.around(own, sampler)

    def held(self, edges: Tensor, negatives: Tensor | None, arrays: Mapping[str, Tensor], first: int = 0) -> HeldLinks:
        """Return held edges as a table; those with labels have no negatives."""
        false = torch.empty(edges.shape[1], 0, dtype=torch.int64) if negatives is None else negatives
        nodes = self.ends.senders.start, self.ends.receivers.start
        return HeldLinks(edges, false, nodes, self._carried(arrays), first)

    def around(self, links: OwnLinks | HeldLinks, sampler: Sampler) -> LinkSampler:
        """Return a sampler around edges of a table."""
        return LinkSampler(sampler, links, self.ends.target_type)

    def _carried(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what batches say of edges: of those with labels all that they carry, otherwise their times alone."""
        labels, time = self.links.labels, self.links.time
        said = arrays if labels is not None else [] if time is None else [time]
        return {LABEL if name == labels else name_of_targets(name): arrays[name] for name in said}


def check_settings_of_edges(settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse boundaries that do not go with edges, and samplers that repeat nodes, or whose weights are for seeds."""
    if not isinstance(boundary, Boundary) or not boundary.takes_edges:
        raise ValueError(f"boundary must be Isolated(), Halo() or Fetch() for edges, got {shown(boundary)}.")
    if boundary.seed_hops:
        raise ValueError(f"boundary={brief(boundary)} is for nodes as seeds, not for edges: leave seed_hops out.")
    for sampler in (settings.sampler, settings.global_batching.sampler):
        if getattr(sampler, "is_for_nodes", False):
            raise ValueError(
                "The ends of edges are sampled around by NeighborSampler or WholePartSampler, got "
                f"{type(sampler).__name__}: its batches or weights are for single nodes."
            )


def check_held_back(name: str, held: Mapping[str, object], way_out: str) -> None:
    """Refuse to evaluate on edges that were not held back."""
    if name not in held:
        without = " Trainer(limit_val_batches=0) fits without them." if name == "val" else ""
        raise ValueError(f"The split holds no {name} edges back (it has: {list(held)}): {way_out}{without}")


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
        check_event_samplers(rows, self.home.running.settings.samplers, links.time, links.edge_type)

    def check_prediction(self) -> None:
        sampler, kind = self.home.running.settings.of_evaluation(), self.asked.receiver_type
        if isinstance(sampler, TemporalSampler) and times_of_receivers(self.rows(), sampler.time, kind) is None:
            raise ValueError(
                f"Of a split by time ({sampler.time}) a node has rows at the times of its events, and no row of its "
                "own to predict: score events by trainer.test(...), or give nodes the times to predict them at, and "
                f"take PartitionedDataModule(graph, sampler=TemporalSampler(..., {shown(sampler.time)}, "
                "seed_time=...))."
            )

    def across(self, sampler: Sampler) -> LinkSampler:
        return self.asked.around_own(sampler, self.rows(), self.candidates(), self.first_edge())

    def around_part(self, part: Graph, own: Tensor) -> LinkSampler:
        """Return what samples a part around its edges, with its own nodes as false receivers."""
        candidates = self.asked.candidates(part, self.asked.receivers(part, own))
        return self.asked.around_own(self.home.running.settings.training_sampler, part, candidates)

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

        num_ranks = self.home.running.num_ranks
        return Judged(range(count), num_ranks, f"There are {count} {name} edges", sampler, targets)


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
        self._split, self._most = split, dict[int, int]()

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

    def learned(self, part: Graph, deal: Callable[..., Deal]) -> Learning:
        is_whole = part is self.home.graph
        own, shown = self._own(part), self.home.shown(part)
        self.values.of_arrays(shown)
        seeds = self.positions(self.home.whole if is_whole else part, own.to(torch.int64) - 1)
        sampler = self.across(self.home.running.settings.training_sampler) if is_whole else self.around_part(part, own)
        return Learning(self.home.source(shown, sampler), deal(seeds))

    def _own(self, part: Graph) -> Tensor:
        """Return which nodes of a part are the rank's own."""
        if part is self.home.graph and self.home.running.num_ranks > 1:
            return self.home.partition(self.home.running.num_ranks).assignment == self.home.running.rank
        own: Tensor | None = vars(part).get("node_arrays", {}).get("train_mask")
        return torch.ones(part.num_nodes, dtype=torch.bool) if own is None else own
