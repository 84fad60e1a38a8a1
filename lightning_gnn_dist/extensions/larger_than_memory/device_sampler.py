"""Sampling on the device of the graph's tensors: all batches of a bulk share the launches of a hop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.weighted import checked_weights
from lightning_gnn_dist.extensions.larger_than_memory.device_draws import (
    Frontier,
    column_norms,
    drawn_edges,
    drawn_layer,
    keys_of,
    normalized,
)
from lightning_gnn_dist.extensions.larger_than_memory.stack import Edges, Stack
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.sampling.base import Sampler, check_bulk
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler, LayerSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

PADDED = 1 << 23  # edges that a hop may have room for, 100 bytes each, without knowing how many there are
KINDS = "NeighborSampler without weight, LadiesSampler, FastGCNSampler"
NODES_AT_ONCE = 1 << 27  # nodes of the graph times batches sampled together: 4 bytes each, 40 in layer-wise sampling


@runtime_checkable
class DrawsAround(Protocol):
    """A sampler that finds seeds for another, as one of edges does for their ends."""

    @property
    def sampler(self) -> Sampler:
        """What draws around them."""

    def drawn_by(self, sampler: Sampler, rows: Graph) -> Sampler:
        """Return the same around which another draws; what it asks of the graph itself it asks of ``rows`` in RAM."""


def draws_anywhere(sampler: Sampler) -> bool:
    """Whether a :class:`DeviceSampler` can draw its batches, or, for links, their neighbourhoods."""
    nodes = sampler.sampler if isinstance(sampler, DrawsAround) else sampler
    if type(nodes) is NeighborSampler:  # a subclass may draw otherwise
        return nodes.weight is None
    return type(nodes) in (LadiesSampler, FastGCNSampler)


def drawn_there(sampler: Sampler, home: Graph) -> Sampler:
    """A sampler that draws the same batches from a copy of ``home`` on a device.

    The targets of links are drawn in RAM, few numbers for each, and only their neighbourhoods on the device.
    """
    if isinstance(sampler, DrawsAround):
        return sampler.drawn_by(drawn_there(sampler.sampler, home), home)
    return DeviceSampler(sampler)  # type: ignore[arg-type]  # it checks the type itself


@dataclass(frozen=True)
class DeviceSampler:
    """The batches of another sampler, drawn in torch operators on the device of the graph's tensors.

    Made for a graph on a GPU. Nodes, edges and their order are exactly those of the compiled sampler; edge weights may
    differ in the last digit. It takes 4 bytes for each node of the graph and each batch sampled together, at most 2**27
    of these at a time. On a CPU it is several times slower.

    The host waits for a GPU once for all batches sampled together, and further for

    - each hop of a ``NeighborSampler`` that takes all neighbours (-1), once; and each hop that could have over 2**23
      edges, once;
    - each hop of the other samplers, once for its edges, once for those kept, and once for each rescaling of chances.

    Args:
        sampler: A ``NeighborSampler`` that draws all neighbours equally likely, a ``LadiesSampler`` or a
            ``FastGCNSampler``.
    """

    sampler: NeighborSampler | LayerSampler

    def __post_init__(self) -> None:
        if isinstance(self.sampler, DrawsAround) or not draws_anywhere(self.sampler):
            raise TypeError(f"On a device the sampler must be one of {KINDS}, got {shown(self.sampler)}.")

    @property
    def num_hops(self) -> int:
        return self.sampler.num_hops

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk, samples = check_bulk(graph, seeds, keys, untyped="DeviceSampler"), list[Sample]()
        remembered(graph, DeviceSampler, graph.check_edges)  # an index out of range ends a CUDA context
        size = max(1, NODES_AT_ONCE // max(1, graph.num_nodes))
        for start in range(0, len(bulk), size):
            of_seeds, batch_keys = zip(*bulk[start : start + size], strict=True)
            stack = Stack(of_seeds, graph.num_nodes, graph.indices.device)
            for hop, keys_of_hop in enumerate(keys_of(batch_keys, self.num_hops, graph.indices.device)):
                stack.grow(self._hop(graph, stack, keys_of_hop, hop))
            samples += stack.samples(with_ids=bool(graph.edge_arrays))
        return samples

    def _hop(self, graph: Graph, stack: Stack, keys: Tensor, hop: int) -> Edges:
        sampler = self.sampler
        if isinstance(sampler, NeighborSampler):
            size = sampler.per_hop[hop] if graph.num_edges else -1
            if stack.nodes.numel() * size > PADDED:
                stack.trim()
            row, position = drawn_edges(Frontier.of(graph, stack, keys), size, replace=sampler.replace)
            return Edges(row, graph.indices[position], position, None)
        name, norms = sampler.weight, None
        weights = None if name is None else checked_weights(graph, name)
        if isinstance(sampler, FastGCNSampler):
            norms = remembered(graph, ("column norms", name), lambda: column_norms(graph, weights))
        rows = Frontier.of(graph, stack, keys)
        edges, whole = drawn_layer(graph, stack, rows, sampler.num_nodes[hop], norms, weights)
        return normalized(edges, whole) if sampler.normalize else edges
