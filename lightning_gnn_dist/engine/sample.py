"""A sampled neighbourhood of a batch, and the key under which it is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

MAX_ENTRIES = 2**31 - 1  # seeds and edges of a batch


class BatchKey(NamedTuple):
    """The name of a batch. What a sampler draws at random depends on these three numbers."""

    seed: int
    epoch: int
    batch: int


class Sample(NamedTuple):
    """The sampled neighbourhood of one batch.

    Row ``i`` lists the sampled in-neighbours of ``nodes[i]``. Nodes stand in the order of hops, and only the
    last hop's nodes have no row, so the CSR of every later layer is the first rows of this one.

    Attributes:
        nodes: Ids of the batch's nodes, int64, the seeds first, shape ``(n,)``.
        indptr: Where each row starts, shape ``(rows + 1,)``.
        indices: The rows' entries, as positions in ``nodes``, shape ``(nnz,)``.
        num_sampled_nodes: New nodes per hop; hop 0 is the seeds.
        num_sampled_edges: Edges per hop.
        edge_ids: Each edge's position in the graph's ``indices``, or None where nobody needs it.
        edge_weight: The batch's ``edge_weight``, float32, or None to keep the graph's.
        node_norm: The batch's ``node_norm``, a weight for the loss of each node, or None.
        is_constant: Whether the same sample will come again, so that what is built from it is worth keeping.
        extra: Further tensors for the batch, by name.
        edge_kinds: The type of each edge, if the sampler knows it; otherwise ``edge_ids`` tell.
        target_type: The number of the edge type of the targets, if these are edges of a typed graph.
    """

    nodes: Tensor
    indptr: Tensor
    indices: Tensor
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    edge_ids: Tensor | None
    edge_weight: Tensor | None = None
    node_norm: Tensor | None = None
    is_constant: bool = False
    extra: Mapping[str, Tensor] = MappingProxyType({})
    edge_kinds: Tensor | None = None
    target_type: int | None = None


def refuse_repeated(seeds: Tensor, way_out: str = "Pass seeds.unique()") -> None:
    """Refuse seeds of which one is given more than once."""
    ids, counts = seeds.unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"The seeds of a batch must be distinct, but node {int(ids[counts > 1][0])} is given "
            f"{int(counts[counts > 1][0])} times. {way_out}."
        )
