"""What is drawn: the neighbourhood of a batch, and the key that it is drawn by."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

MAX_ENTRIES = 2**31 - 1  # of a batch


class BatchKey(NamedTuple):
    """Which batch it is. All that a sampler may draw at random depends on these three numbers."""

    seed: int
    epoch: int
    batch: int


class Sample(NamedTuple):
    """The sampled neighbourhood of one batch.

    Row ``i`` lists the sampled in-neighbours of ``nodes[i]``. Nodes stand in the order of hops, and only the
    last hop's have no row: so the first rows of this one CSR are the CSR of every later layer.

    Attributes:
        nodes: Ids of the batch's nodes, int64, the seeds first, shape ``(n,)``.
        indptr: Where each row starts, shape ``(rows + 1,)``.
        indices: The rows' entries, as positions in ``nodes``, shape ``(nnz,)``.
        num_sampled_nodes: New nodes per hop; hop 0 is the seeds.
        num_sampled_edges: Edges per hop.
        edge_ids: Each edge's position in the graph's ``indices``, or None if the graph has no edge arrays.
        edge_weight: The batch's ``edge_weight``, in place of the graph's. None: there is none of the sampler's own.
        node_norm: The batch's ``node_norm``, a weight for the loss of each node. None: there is none.
        is_constant: The same sample will come again: what is built from it is worth keeping.
        extra: What else the batch is to hold.
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


def refuse_repeated(seeds: Tensor) -> None:
    """Say which seed of a batch was given more than once, if one was."""
    ids, counts = seeds.unique(return_counts=True)
    if (counts > 1).any():
        raise ValueError(
            f"The seeds of a batch must be distinct, but node {int(ids[counts > 1][0])} is given "
            f"{int(counts[counts > 1][0])} times. Pass seeds.unique()."
        )
