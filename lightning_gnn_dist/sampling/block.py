"""One layer's edges: a bipartite CSR from the nodes of a hop to the nodes of the hop before."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Block:
    """The edges that one layer computes on: row ``i`` lists the senders of node ``i``.

    Sources and destinations are the first ``num_src`` and the first ``num_dst`` nodes of the batch, so
    a layer reads as ``x = conv((x, x[:block.num_dst]), block.adj)``. Layers that take no sparse matrix, such as
    attention, take ``block.edge_index`` instead; so must all layers under mixed precision, which torch's sparse
    products do not support.

    Args:
        num_dst: Number of nodes that receive.
        num_src: Number of nodes that send, the receiving nodes included, which come first.
        indptr: Where each row starts, shape ``(num_dst + 1,)``.
        indices: The senders, row after row, shape ``(nnz,)``. int32 wherever it fits: torch's sparse
            products take the same time with int64, or up to a fifth more.
        weight: One number per edge, or None for ones.
        dtype: Type of the values of ``adj`` where ``weight`` is None.
    """

    num_dst: int
    num_src: int
    indptr: Tensor
    indices: Tensor
    weight: Tensor | None = None
    dtype: torch.dtype = torch.float32

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @cached_property
    def adj(self) -> Tensor:
        """The sparse matrix ``(num_dst, num_src)``. Built at the first use, without a copy of the arrays."""
        spend_warning()
        values = self.weight
        if values is None:
            values = torch.ones(self.num_edges, dtype=self.dtype, device=self.indices.device)
        # Not checked, because rows need not be sorted and may hold an edge twice.
        return torch.sparse_csr_tensor(
            self.indptr, self.indices, values, (self.num_dst, self.num_src), check_invariants=False
        )

    @cached_property
    def edge_index(self) -> Tensor:
        """The same edges, int64, shape ``(2, nnz)``, senders first. Built at the first use."""
        edge_index = torch.empty((2, self.num_edges), dtype=torch.int64, device=self.indices.device)
        edge_index[0] = self.indices
        rows = torch.arange(self.num_dst, device=self.indices.device)
        edge_index[1] = rows.repeat_interleave(self.indptr.diff(), output_size=self.num_edges)
        return edge_index

    def head(self, num_dst: int, num_src: int, num_edges: int) -> Block:
        """The block of the first ``num_dst`` rows, as views; they have ``num_edges`` edges."""
        weight = None if self.weight is None else self.weight[:num_edges]
        return Block(num_dst, num_src, self.indptr[: num_dst + 1], self.indices[:num_edges], weight, self.dtype)

    def apply(self, function: Callable[[Tensor], Tensor]) -> Block:
        """The block with ``function`` applied to its tensors; this block itself if that changes none."""
        indptr, indices = function(self.indptr), function(self.indices)
        weight = None if self.weight is None else function(self.weight)
        if indptr is self.indptr and indices is self.indices and weight is self.weight:
            return self
        return replace(self, indptr=indptr, indices=indices, weight=weight)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Block:
        return self.apply(lambda tensor: tensor.to(device=device, non_blocking=non_blocking))

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}  # not what is cached


def rebase(blocks: tuple[Block, ...], outermost: Block) -> tuple[Block, ...]:
    """The same blocks as views of ``outermost``, a block with the structure of ``blocks[0]``."""
    return outermost, *(outermost.head(block.num_dst, block.num_src, block.num_edges) for block in blocks[1:])


@cache
def spend_warning() -> None:
    """Provoke torch's warning about CSR tensors, which comes once per process, where nobody sees it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        none = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(none, none[:0], torch.zeros(0), (0, 0), check_invariants=False)
