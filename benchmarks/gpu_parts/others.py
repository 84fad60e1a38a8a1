"""What is made beside training: evaluation, corrections and links, on the device and in RAM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from gpu_parts.common import DEVICE, Scale, least_seconds, made_graph, on_device, peak_since_last
from gpu_parts.rows import Rows

from lightning_gnn_dist.batches.batches import Batches, Deal, GlobalBatches, Learning
from lightning_gnn_dist.batches.source import GraphSource, stream_to
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.extensions.larger_than_memory.placement import PlacedSource, Placement
from lightning_gnn_dist.extensions.links.link_sampler import LinkSampler, OwnLinks
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.settings import SampleOn
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

BATCHES = 8


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    graph, size, nodes = made_graph(scale, BATCHES), scale.batch_size, NeighborSampler([15, 10])
    seeds, few = permutation(graph.num_nodes, 1, 0), size // 4
    edges = permutation(graph.num_edges, 1, 0)[: BATCHES * size]
    links = LinkSampler(nodes, OwnLinks(1, Candidates(range(graph.num_nodes)), undirected=False))

    def evaluation(place: SampleOn) -> Iterable[Any]:
        source = source_on(place, graph, NeighborSampler([-1, -1]))
        learning = Learning(source, Deal(seeds[: BATCHES * few], BATCHES, 0, shuffle=False))
        return Batches(lambda _: learning, BATCHES, bulk_size=1)

    def corrections(place: SampleOn) -> Iterable[Any]:
        return Corrections(GlobalBatches(source_on(place, graph, nodes), seeds, size, seed=0))

    def of_links(place: SampleOn) -> Iterable[Any]:
        learning = Learning(source_on(place, graph, links), Deal(edges, BATCHES, 0))
        return Batches(lambda _: learning, BATCHES, bulk_size=4)

    for name, make in (
        (f"evaluation, {few} seeds with all neighbours of two hops", evaluation),
        (f"corrections, {size} seeds [15, 10], one batch at a time", corrections),
        (f"links, {size} edges and a false one each, [15, 10], bulks of 4", of_links),
    ):
        for place in ("device", "cpu"):
            with rows.guarded(f"{name}, made on {place}"):
                tell(rows, scale, f"{name}, made on {place}", make(place))


class Corrections:
    """The first corrections of a round, as often as they are asked for."""

    def __init__(self, batches: GlobalBatches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches.of_round(0, stop=BATCHES))


def source_on(place: SampleOn, graph: Graph, sampler: Sampler) -> GraphSource:
    placement = Placement(DEVICE, place)
    return PlacedSource(graph, sampler, placement=placement, stream=stream_to(DEVICE))


def tell(rows: Rows, scale: Scale, name: str, batches: Iterable[Any]) -> None:
    seconds = least_seconds(partial(taken, batches), scale.repeats) / BATCHES
    rows.add(name, 1e3 * seconds, "ms a batch", note=peak_since_last())


def taken(batches: Iterable[Any]) -> None:
    for batch in on_device(batches):
        del batch
