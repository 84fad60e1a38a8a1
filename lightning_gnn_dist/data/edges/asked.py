"""Which edges batches ask for, and how: what data modules of edges share, whether hosts have the graph or shards of it.

graph -> positions of the edges that are learned -> the graph as batches show it -> a sampler around these edges
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, Fetch, Halo, Isolated
from lightning_gnn_dist.boundary.halo_seeds import check_seed_hops
from lightning_gnn_dist.checks import check_at_least_if_given, shown
from lightning_gnn_dist.data.edges.labels import arrays_of_edges, name_of_targets, targets_carry, without_labels
from lightning_gnn_dist.data.temporal.events import times_of_receivers
from lightning_gnn_dist.data.temporal.split import is_labelled
from lightning_gnn_dist.data.typed.links import LinkEnds
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.engine.typed.apart import places_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.cluster import ClusterSampler
from lightning_gnn_dist.sampling.layer import LayerSampler
from lightning_gnn_dist.sampling.links import HeldLinkSampler, LinkSampler, positions_of_links
from lightning_gnn_dist.sampling.matrix import MatrixSampler
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.pagerank.sampler import PageRankSampler
from lightning_gnn_dist.sampling.shadow import ShadowSampler
from lightning_gnn_dist.sampling.temporal.links import EventSampler, EventShape, HeldEventSampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sampling.walk import RandomWalkSampler


@dataclass(frozen=True, eq=False)
class AskedEdges:
    """The edges that batches ask for: of which type, and whether for their being there or for their labels.

    Attributes:
        ends: Between which nodes they are.
        edge_type: Of a graph with types, theirs.
        reverse: The edge type that has them turned round, if there is one.
        undirected: Whether the graph has both directions of each.
        labels: The name of the array that is predicted, if they have labels.
        hide: Whether the edges that a batch asks for carry no messages in it.
        time: The name of the array of their times, if they are split by it.
        until: Then the time of the first held edge, as an integer that compares as times do. Earlier ones are learned.
    """

    ends: LinkEnds
    edge_type: EdgeType | None
    reverse: EdgeType | None
    undirected: bool
    labels: str | None
    hide: bool
    time: str | None = None
    until: int | None = None

    @property
    def receiver_type(self) -> str | None:
        """The node type that edges lead to, if the graph has types."""
        return None if self.edge_type is None else self.edge_type[2]

    def positions(self, graph: Graph, owner: Tensor, *, across: bool) -> Tensor:
        """Return where the edges to learn are whose ends, or with ``across`` whose receivers, have one owner."""
        kind, loops = self.ends.target_type, self.labels is not None
        found = positions_of_links(graph, owner, self.undirected, kind, loops=loops, across=across)
        return self.of_labels_and_times(graph, found)

    def of_labels_and_times(self, graph: Graph, found: Tensor) -> Tensor:
        """Return those of some positions whose edges have a label, and are learned by their time."""
        if self.labels is None and self.time is None:
            return found
        arrays, kind = arrays_of_edges(graph, self.edge_type), self.ends.target_type
        rows = found if kind is None else places_of(graph, kind.number, found)
        if self.labels is not None:
            is_asked = is_labelled(arrays[self.labels][rows])
            found, rows = found[is_asked], rows[is_asked]
        if self.time is None or self.until is None:
            return found
        return found[as_integers(arrays[self.time][rows]) < self.until]

    def shown(self, part: Graph) -> Graph:
        """Return a part as batches show it: without the labels of its edges, also those turned round."""
        name, kinds = self.labels, {self.edge_type, self.reverse or self.edge_type}
        holding = [kind for kind in kinds if name in arrays_of_edges(part, kind)]
        if name is None or not holding:
            return part

        def made() -> Graph:
            return reduce(lambda graph, kind: without_labels(graph, kind, name), holding, part)

        return remembered(part, "without labels", made)

    def carried(self, arrays: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return what batches say of their targets; None where these are true and false edges."""
        return None if self.labels is None else targets_carry(self.labels, arrays)

    def receivers(self, part: Graph, own: Tensor) -> range | Tensor:
        """Return the nodes of a part that false receivers are drawn from: the rank's own, if they may receive."""
        if part.types is None or self.edge_type is None:
            return range(int(own.sum()))  # they come first
        nodes = part.types.nodes_of(self.edge_type[2])
        return own[nodes.start : nodes.stop].nonzero().view(-1) + nodes.start

    def around(self, sampler: Sampler, num_negatives: int, candidates: range | Tensor, graph: Graph) -> LinkSampler:
        """Return a sampler around edges of a graph, with negatives among some nodes."""
        carried = self.carried(arrays_of_edges(graph, self.edge_type))
        asked = num_negatives, candidates, self.undirected, self.ends.target_type
        return LinkSampler(sampler, *asked, carried=carried, hides=self.hide)

    def around_events(
        self, sampler: TemporalSampler, num_negatives: int, candidates: range | Tensor, graph: Graph
    ) -> EventSampler:
        """Do as :meth:`around` for edges at their times."""
        kind = self.receiver_type
        first = 0 if graph.types is None or kind is None else graph.types.nodes_of(kind).start
        there = Candidates.of(candidates, times_of_receivers(graph, sampler.time, kind), first)
        return self.events_among(sampler, num_negatives, there, graph)

    def events_among(
        self, sampler: TemporalSampler, num_negatives: int, candidates: Candidates, graph: Graph
    ) -> EventSampler:
        """Do as :meth:`around_events`, with negatives among nodes of which it is known since when they are there."""
        arrays = arrays_of_edges(graph, self.edge_type)
        asked = num_negatives, candidates, self.undirected, arrays[sampler.time], self.carried(arrays)
        return EventSampler(self.events(sampler), *asked)

    def events(self, sampler: TemporalSampler) -> EventShape:
        """Return what batches of events and of held ones have in common."""
        return EventShape(sampler, name_of_targets(sampler.time), self.ends.target_type)

    def around_held(
        self, sampler: Sampler, edges: Tensor, negatives: Tensor | None, arrays: Mapping[str, Tensor]
    ) -> HeldLinkSampler:
        """Return a sampler around held edges; those with labels have no negatives."""
        false = torch.empty(edges.shape[1], 0, dtype=torch.int64) if negatives is None else negatives
        first = self.ends.senders.start, self.ends.receivers.start
        return HeldLinkSampler(sampler, edges, false, self.ends.target_type, first, self.carried(arrays))

    def around_held_events(
        self, sampler: TemporalSampler, edges: Tensor, negatives: Tensor | None, arrays: Mapping[str, Tensor]
    ) -> HeldEventSampler:
        """Do as :meth:`around_held` for edges at their times."""
        held, ends = self.around_held(sampler, edges, negatives, arrays), self.ends
        false = held.negatives.to(torch.int64) + ends.receivers.start
        return HeldEventSampler(self.events(sampler), ends.in_graph(edges), arrays[sampler.time], false, held.carried)


def negatives_of(labels: str | None, num_negatives: int | None) -> int:
    """Return the false receivers of each training edge: by default 1, and none where edges have labels."""
    check_at_least_if_given(1, num_negatives=num_negatives)
    if labels is not None and num_negatives is not None:
        raise ValueError("num_negatives is for splits without labels: leave it out.")
    return (1 if labels is None else 0) if num_negatives is None else num_negatives


def check_sampler_of_edges(sampler: Sampler | None) -> None:
    """Refuse samplers that repeat nodes, or whose weights suppose that seeds are nodes."""
    drawn = sampler.sampler if isinstance(sampler, MatrixSampler) else sampler
    if isinstance(drawn, ShadowSampler | PageRankSampler | RandomWalkSampler | ClusterSampler | LayerSampler):
        raise ValueError(
            "The ends of edges are sampled around by NeighborSampler or WholePartSampler, got "
            f"{type(drawn).__name__}: its batches or weights are for single nodes."
        )


def check_boundary_of_edges(boundary: Boundary) -> None:
    """Refuse boundaries that do not go with edges."""
    if not isinstance(boundary, Isolated | Halo | Fetch):
        raise ValueError(f"boundary must be Isolated(), Halo() or Fetch() for edges, got {shown(boundary)}.")
    check_seed_hops(boundary, of_edges=True)


def check_held_back(name: str, held: Mapping[str, object], way_out: str) -> None:
    """Refuse to evaluate on edges that were not held back."""
    if name not in held:
        without = " Trainer(limit_val_batches=0) fits without them." if name == "val" else ""
        raise ValueError(f"The split holds no {name} edges back (it has: {list(held)}): {way_out}{without}")
