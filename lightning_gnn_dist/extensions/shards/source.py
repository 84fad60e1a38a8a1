"""Batches of a sharded graph: the same, bit for bit, as where every host has the graph.

frontier -> its owners draw neighbours, hop by hop -> ... -> the rows of all nodes of a bulk, others' fetched once
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import DeviceStream
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.larger_than_memory.ahead import AheadSource
from lightning_gnn_dist.extensions.links.link_sampler import LinkSampler
from lightning_gnn_dist.extensions.links.targets import FalseEnds
from lightning_gnn_dist.extensions.shards.draws import DrawRule, GrowingBatch, Names, draw_hops
from lightning_gnn_dist.extensions.shards.links import draw_false_ends
from lightning_gnn_dist.extensions.shards.owner import Message, Question
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.extensions.shards.temporal import prepare_times, sample_at_times, sample_timed, times_of_edges
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import TypeNames
from lightning_gnn_dist.homes.settings import Loading
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.turns import Steps

ShardedSampler = NeighborSampler | TemporalSampler | LinkSampler


def sample_bulk(
    graph: ShardedGraph, sampler: ShardedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
) -> Steps[list[Sample]]:
    """Draw what ``sampler`` draws from the whole graph, one sample for each batch.

    The samples' ``edge_ids`` count in the edges' types.
    """
    if isinstance(sampler, LinkSampler):
        return (yield from sampler.sample_across(Shards(graph), seeds, keys))
    if isinstance(sampler, TemporalSampler):
        return (yield from sample_timed(graph, sampler, seeds, keys))
    growing = [GrowingBatch(ids, graph.num_nodes) for ids in seeds]
    how = DrawRule(sampler.replace, sampler.weight)
    names, fanouts = Names.of_nodes(len(growing)), sampler.of_types(graph.types)
    return (yield from draw_hops(graph, growing, names, fanouts, keys, how))


@dataclass(frozen=True)
class Shards:
    """A graph in shards as the home of targets: this rank learns edges of its own shard, and asks owners for the rest.

    Args:
        graph: The graph.
    """

    graph: ShardedGraph

    @property
    def rows(self) -> Graph:
        return self.graph.shard.rows

    @property
    def num_nodes(self) -> int:
        return self.graph.num_nodes

    def ids_of_own(self, rows: Tensor) -> Tensor:
        return self.graph.ids_of_own(rows)

    def draw(self, sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        return sample_bulk(self.graph, check_sampler(sampler, self.graph.types), seeds, keys)

    def draw_at(
        self, sampler: TemporalSampler, seeds: Sequence[Tensor], times: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        return sample_at_times(self.graph, sampler, seeds, times, keys)

    def false_ends(self, wanted: FalseEnds) -> Steps[list[Tensor]]:
        return draw_false_ends(self.graph, wanted)

    def times_of_edges(self, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        return times_of_edges(self.graph, number, name, ids)


def check_sampler(sampler: object, types: TypeNames) -> ShardedSampler:
    """Return the sampler; refuse one that needs the whole graph on one host, or that knows none of the types."""
    if isinstance(sampler, LinkSampler):
        check_sampler(sampler.sampler, types)
        return sampler
    if isinstance(sampler, NeighborSampler | TemporalSampler):
        sampler.of_types(types)  # refuses numbers of other types
        return sampler
    raise ValueError(
        f"A sharded graph is sampled by NeighborSampler or TemporalSampler, got {shown(sampler)}: others ask for edges "
        "among nodes of several hosts. Choose one of these, or give every host the whole graph."
    )


class ShardedSource(AheadSource):
    """Makes the batches that a source of the whole graph would make.

    Rows of other ranks are asked for once for all nodes of a bulk, in the background where that is wished. Making a
    source is collective with a ``TemporalSampler``; making batches is not.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler`` or ``TemporalSampler``, or one that samples around edges.
        loading: How batches are made.
        num_ids: Seeds must lie below this number. Default: the number of nodes.
        stream: Brings batches to a device. With None they stay in RAM.
        widen: Which narrow types become float32. Default: all.
    """

    def __init__(
        self,
        graph: ShardedGraph,
        sampler: object,
        loading: Loading,
        *,
        num_ids: int | None = None,
        stream: DeviceStream | None = None,
        widen: Widen = True,
    ) -> None:
        super().__init__(graph, graph.num_nodes if num_ids is None else num_ids, loading, stream, widen)
        self._graph, self._sampler = graph, check_sampler(sampler, graph.types)
        if isinstance(self._sampler, TemporalSampler):
            prepare_times(graph, self._sampler.time)  # now, as all ranks are here, and not in the background

    def _ask(self, questions: list[Question]) -> list[list[Message]]:
        return self._graph.ask(questions)

    def _draw(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        return sample_bulk(self._graph, self._sampler, seeds, keys)
