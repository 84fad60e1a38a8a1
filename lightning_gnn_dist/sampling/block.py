"""One layer's edges: a bipartite CSR from the nodes of a hop to the nodes of the hop before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

CORRECTED = (
    "The sampler of this batch gave its edges weights that make up for how it drew them, and block.adj leaves weights "
    "out. Use block.weighted_adj, with a layer that adds up, such as GraphConv or SAGEConv(aggr='sum'). To leave the "
    "weights out all the same, use block.edge_index, or RandomWalkSampler(num_hops, visits=0), which gives none."
)
UNWEIGHTED = (
    "block.weighted_adj holds batch.edge_weight, and this batch has none with one number for each edge: give the graph "
    "one, data.edge_weight, or use block.adj, where every edge counts 1. A sampler that weighs edges itself, such as "
    "LadiesSampler, does so in training alone, so name it the matrix of the graph: "
    "LadiesSampler([512, 512], weight='edge_weight')."
)
LEARNED = (
    "block.weighted_adj holds weights that are learned, and torch's gradients of a sparse matrix are wrong where its "
    "rows are not sorted, as here: multiply what senders send on block.edge_index."
)


class Adjacency(Tensor):
    """A sparse matrix of edges that multiplies rows of any floating type, also under mixed precision.

    The product has the type of the rows, and its sums are taken in float32 or wider. Layers that read the places of
    its entries, as attention does, get them in int64, which ``scatter`` needs.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PRODUCTS and len(args) > 1 and isinstance(args[0], cls):
                return _product(func, *args, **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            return found.long() if func in _PLACES else found

    def __reduce_ex__(self, protocol: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = _as(self, self.dtype)  # torch cannot make such a class of what it has read
        return plain.__reduce_ex__(protocol)


_PRODUCTS = {torch.sparse.mm, torch.mm, torch.matmul, Tensor.mm, Tensor.matmul, Tensor.__matmul__}
_PLACES = {Tensor.crow_indices, Tensor.col_indices}
_WIDE = (torch.float32, torch.float64)


def _product(func: Callable[..., Tensor], matrix: Tensor, rows: Tensor, *reduce: str, **named: str) -> Tensor:
    device = rows.device.type
    is_alike = matrix.dtype == rows.dtype and rows.dtype in _WIDE and not torch.is_autocast_enabled(device)
    if is_alike or rows.dim() != 2 or not rows.is_floating_point():
        return func(matrix, rows, *reduce, **named)
    (how,) = reduce or named.values() or (None,)
    with torch.autocast(device, enabled=False):  # it would cast the matrix, too
        if how in ("amax", "amin") and rows.dtype not in _WIDE:  # torch adds up gradients of a maximum in their type
            product: Tensor = torch.sparse.mm(_as(matrix, torch.float32), rows.float(), how).to(rows.dtype)
            return product
        if how is None and device == "cpu" and rows.dtype not in _WIDE:
            how = "sum"  # without a word torch calls a library that has no such types
        product = torch.sparse.mm(_as(matrix, rows.dtype), rows, *([] if how is None else [how]))
        return product


def _as(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    return _csr(matrix.crow_indices(), matrix.col_indices(), matrix.values().to(dtype), matrix.shape)


def _csr(indptr: Tensor, indices: Tensor, values: Tensor, shape: Sequence[int]) -> Tensor:
    spend_warning()
    # Not checked, because rows need not be sorted and may hold an edge twice.
    return torch.sparse_csr_tensor(indptr, indices, values, tuple(shape), check_invariants=False)


@dataclass(frozen=True, eq=False)
class Block:
    """The edges that one layer computes on: row ``i`` lists the senders of node ``i``.

    Sources and destinations are the first ``num_src`` and the first ``num_dst`` nodes of the batch, so
    a layer reads as ``x = conv((x, x[:block.num_dst]), block.adj)``. On ``adj`` a layer computes what it computes on
    ``batch.edge_index``, and on ``weighted_adj`` what it computes with ``batch.edge_weight`` beside that. Layers that
    take no sparse matrix, such as ``GINEConv``, take ``block.edge_index`` instead.

    Args:
        num_dst: Number of nodes that receive.
        num_src: Number of nodes that send, the receiving nodes included, which come first.
        indptr: Where each row starts, shape ``(num_dst + 1,)``.
        indices: The senders, row after row, shape ``(nnz,)``. int32 wherever it fits: torch's sparse
            products take the same time with int64, or up to a fifth more.
        weight: The batch's ``edge_weight``, or None if it has none.
        dtype: Type of the values of the matrices.
        is_corrected: Whether ``weight`` corrects for how the sampler drew the edges, so that sums without it are off.
    """

    num_dst: int
    num_src: int
    indptr: Tensor
    indices: Tensor
    weight: Tensor | None = None
    dtype: torch.dtype = torch.float32
    is_corrected: bool = False

    @property
    def num_edges(self) -> int:
        return self.indices.numel()

    @cached_property
    def adj(self) -> Tensor:
        """The sparse matrix ``(num_dst, num_src)`` of ones. Built at the first use, over the same arrays."""
        if self.is_corrected:
            raise ValueError(CORRECTED)
        return self._matrix(torch.ones(self.num_edges, dtype=self.dtype, device=self.indices.device))

    @cached_property
    def weighted_adj(self) -> Tensor:
        """The sparse matrix ``(num_dst, num_src)`` of ``batch.edge_weight``. Built at the first use."""
        if self.weight is None:
            raise AttributeError(UNWEIGHTED)
        if self.weight.requires_grad:
            raise ValueError(LEARNED)
        return self._matrix(self.weight)

    def _matrix(self, values: Tensor) -> Tensor:
        matrix = _csr(self.indptr, self.indices, values, (self.num_dst, self.num_src))
        return Tensor._make_subclass(Adjacency, matrix)

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
        indptr, indices = self.indptr[: num_dst + 1], self.indices[:num_edges]
        return Block(num_dst, num_src, indptr, indices, weight, self.dtype, self.is_corrected)

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


def innermost(blocks: tuple[Block, ...], num_layers: int) -> tuple[Block, ...]:
    """The blocks of so many layers, of 0 all. If some are left out, senders of the first one are all nodes."""
    found = blocks[-num_layers:]
    is_as_it_is = not found or found[0].num_src == blocks[0].num_src
    return found if is_as_it_is else (replace(found[0], num_src=blocks[0].num_src), *found[1:])


@cache
def spend_warning() -> None:
    """Provoke torch's warning about CSR tensors, which comes once per process, where nobody sees it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state", UserWarning)
        none = torch.zeros(1, dtype=torch.int64)
        torch.sparse_csr_tensor(none, none[:0], torch.zeros(0), (0, 0), check_invariants=False)
