"""Which edges batches ask for, and how: what data modules of edges share, whether hosts have the graph or shards of it.

graph -> positions of the edges that are learned -> the graph as batches show it -> a sampler around these edges
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, check_seed_hops
from lightning_gnn_dist.checks import check_at_least_if_given, shown
from lightning_gnn_dist.engine.apart import places_of
from lightning_gnn_dist.extensions.links.ends import LinkEnds, ends_of
from lightning_gnn_dist.extensions.links.labels import arrays_of_edges, targets_carry, without_labels
from lightning_gnn_dist.extensions.links.link_sampler import LinkSampler
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.extensions.links.positions import positions_of_links
from lightning_gnn_dist.extensions.links.targets import HeldLinks, OwnLinks, name_of_targets
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.extensions.temporal.times import as_integers, times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.shard import LinkBounds, TypedBounds
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.cluster import ClusterSampler
from lightning_gnn_dist.sampling.layer_wise import LayerSampler
from lightning_gnn_dist.sampling.matrix import MatrixSampler
from lightning_gnn_dist.sampling.shadow import ShadowSampler
from lightning_gnn_dist.sampling.walk import RandomWalkSampler


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
    def of(cls, links: LinkBounds, types: GraphTypes | TypedBounds, num_negatives: int | None) -> AskedEdges:
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
        arrays, kind = arrays_of_edges(graph, self.links.edge_type), self.ends.target_type
        rows = found if kind is None else places_of(graph, kind.number, found)
        if self.links.labels is not None:
            is_asked = is_labelled(arrays[self.links.labels][rows])
            found, rows = found[is_asked], rows[is_asked]
        if self.links.time is None or self.links.until is None:
            return found
        return found[as_integers(arrays[self.links.time][rows]) < self.links.until]

    def shown(self, part: Graph) -> Graph:
        """Return a part as batches show it: without the labels of its edges, also those turned round."""
        name, kinds = self.links.labels, {self.links.edge_type, self.links.reverse or self.links.edge_type}
        holding = [kind for kind in kinds if name in arrays_of_edges(part, kind)]
        if name is None or not holding:
            return part

        def made() -> Graph:
            return reduce(lambda graph, kind: without_labels(graph, kind, name), holding, part)

        return remembered(part, "without labels", made)

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
        carried, time = self._carried(arrays_of_edges(graph, self.links.edge_type)), self.links.time
        if isinstance(sampler, TemporalSampler) and time != sampler.time:
            time = None  # nobody sees these edges: a question has no false receiver among its answers of any time
        of_edges = self.num_negatives, candidates, self.links.undirected, carried, self.links.hide
        own = OwnLinks(*of_edges, first, time)
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
        if self.links.labels is not None:
            return targets_carry(self.links.labels, arrays)
        return {} if self.links.time is None else {name_of_targets(self.links.time): arrays[self.links.time]}


def check_settings_of_edges(settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse boundaries that do not go with edges, and samplers that repeat nodes, or whose weights are for seeds."""
    if not isinstance(boundary, Boundary) or not boundary.takes_edges:
        raise ValueError(f"boundary must be Isolated(), Halo() or Fetch() for edges, got {shown(boundary)}.")
    check_seed_hops(boundary, of_edges=True)
    for sampler in (settings.sampler, settings.global_batching.sampler):
        drawn = sampler.sampler if isinstance(sampler, MatrixSampler) else sampler
        if isinstance(drawn, ShadowSampler | RandomWalkSampler | ClusterSampler | LayerSampler):
            raise ValueError(
                "The ends of edges are sampled around by NeighborSampler or WholePartSampler, got "
                f"{type(drawn).__name__}: its batches or weights are for single nodes."
            )


def check_held_back(name: str, held: Mapping[str, object], way_out: str) -> None:
    """Refuse to evaluate on edges that were not held back."""
    if name not in held:
        without = " Trainer(limit_val_batches=0) fits without them." if name == "val" else ""
        raise ValueError(f"The split holds no {name} edges back (it has: {list(held)}): {way_out}{without}")
