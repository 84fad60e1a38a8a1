"""Batches of edges: some edges, negatives or labels for each, and the neighbourhoods of all ends.

seeds -> targets -> their ends -> neighbourhoods without the targets, or what each end had seen before
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.links import TargetType, without_targets
from lightning_gnn_dist.sampling.targets.home import Home, WholeGraph
from lightning_gnn_dist.sampling.targets.tables import HeldLinks, OwnLinks, Targets
from lightning_gnn_dist.sampling.targets.trees import trees_around
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sampling.turns import Steps, answered

Found = list[tuple[Sample, Tensor]]  # for each batch a sample, and the places of the ends of its targets, shape (2, m)


@dataclass(frozen=True, eq=False)
class LinkSampler:
    """Samples around edges. Its seeds are those of a table of edges.

    A batch's targets are its edges, then their negatives; ``edge_label_index`` holds the positions of both ends in the
    batch, ``edge_label`` ones and zeros, or the label of each edge. A :class:`TemporalSampler` draws a tree for each
    end at the time of the target; others draw one neighbourhood of all ends.

    Args:
        sampler: Draws the neighbourhoods of the ends.
        links: The edges: those of the graph, or held ones.
        target_type: The edge type of the targets, if the graph has types.
        rows: The graph in RAM to look up edges and draw negatives in, if the sampled graph is a copy on a device.
    """

    sampler: Sampler
    links: OwnLinks | HeldLinks
    target_type: TargetType | None = None
    rows: Graph | None = None

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        home = WholeGraph(graph, graph if self.rows is None else self.rows)
        return answered(self.sample_across(home, seeds, keys), list)

    def sample_across(self, home: Home, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        """A sample for each batch, wherever the graph lives.

        Of shards that takes one turn for negatives, seldom two, one for each hop, and one for equal times.
        """
        drawn, kind = self.sampler, self.target_type
        time = drawn.time if isinstance(drawn, TemporalSampler) else None
        targets = yield from self.links.targets(home, seeds, keys, kind, time)
        if isinstance(drawn, TemporalSampler):
            found = yield from trees_around(home, drawn, targets, keys, kind)
        else:
            found = yield from self._around(home, targets, keys)
        number = None if kind is None else kind.number
        return [
            sample._replace(extra={**sample.extra, **of.in_batch(ends)}, is_constant=False, target_type=number)
            for (sample, ends), of in zip(found, targets, strict=True)
        ]

    def _around(self, home: Home, targets: Sequence[Targets], keys: Sequence[BatchKey]) -> Steps[Found]:
        """The neighbourhoods of the ends, without the targets if they are hidden."""
        seeds = [of.seeds() for of in targets]
        samples = yield from home.draw(self.sampler, [nodes for nodes, _ in seeds], keys)
        found = []
        for sample, (_, places), of in zip(samples, seeds, targets, strict=True):
            ends = places.to(sample.nodes.device)
            if self.links.hides:
                sample = without_targets(home.rows, sample, ends[:, : of.num_edges], self.target_type)
            found.append((sample, ends))
        return found
