"""Rows of a block's nodes that stay in the table of all nodes: sums over senders are read from there.

    product    sum(v) = sum over u of value(u, v) row(u), for the block's nodes v; row(u) is read from the table
    backward   gradient(sum(v)) and value(u, v) are kept, as what the block owes its senders
    the end    gradient(u) += sum over v of value(u, v) gradient(sum(v)), of all blocks, for all senders u

So neither rows of senders nor their gradients are copied, however often blocks share senders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage.rows_in_order import ReadInOrder, WriteInOrder, in_ram
from lightning_gnn_dist.sampling.block import PRODUCTS, Adjacency, Block

_TOLD = {
    *(torch.autograd.grad, Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("shape", "ndim", "dtype", "device", "layout", "is_cuda")),
    *(vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "is_sparse", "is_quantized")),
}


class Edges(NamedTuple):
    """The edges of one type into a block's nodes.

    Attributes:
        number: That of the type.
        places: The senders as the block's matrices have them.
        senders: The senders' places in the table.
    """

    number: int
    places: Tensor
    senders: Tensor


class Owed(NamedTuple):
    """What a block owes the senders of some edges: the gradients of their sums, and the matrix's values.

    Attributes:
        number: Of the edges' type.
        call: How many products with these edges the layer has made before.
        gradients: Of the sums of the block's nodes.
        values: Of the edges.
    """

    number: int
    call: int
    gradients: Tensor
    values: Tensor


class RowsInPlace(Tensor):
    """What a layer reads of a block's nodes as ``x``, without a copy for its own nodes and for sums and means.

    Whatever else a layer does with it, such as ``x[senders]``, it does with a copy of the rows.
    """

    multiplied_in_place = True
    table: Tensor
    at: Tensor
    own: Tensor
    edges: list[Edges]
    owed: list[Owed]
    copied: Tensor | None

    @staticmethod
    def of(table: Tensor, at: Tensor, start: int, stop: int, edges: Iterable[Edges]) -> RowsInPlace:
        """Show rows of a table.

        Args:
            table: The rows of all nodes.
            at: Where those stand that are shown; the block's own are the first.
            start: Where the block's own begin.
            stop: Where they end.
            edges: The edges that these nodes send.
        """
        kind: dict[str, Any] = {"dtype": table.dtype, "device": table.device, "requires_grad": table.requires_grad}
        rows: Any = Tensor._make_wrapper_subclass(RowsInPlace, (len(at), *table.shape[1:]), **kind)
        rows.table, rows.at, rows.edges, rows.owed, rows.copied = table.detach(), at, list(edges), [], None
        rows.own = rows.table[start:stop].requires_grad_(table.requires_grad)
        shown: RowsInPlace = rows
        return shown

    @property
    def leaves(self) -> list[Tensor]:
        """What may get a gradient: the own rows, and what else is read of all rows that are shown."""
        return [self.own, self] if self.copied is None else [self.own, self, self.copied]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func in _TOLD:
                return func(*args, **kwargs)
            if func is Tensor.__getitem__ and isinstance(args[0], cls) and (end := args[0]._end(args[1])) is not None:
                return args[0].own[:end]
            edges = _edges_of(*args[:2]) if func in PRODUCTS else None
        how = None if edges is None else (args[2:] or [*kwargs.values()] or [None])[0]
        if edges is not None and how in (None, "sum", "mean"):
            return _Product.apply(args[1], args[0], edges, how)  # type: ignore[no-untyped-call]
        return func(*_each(args, _copy), **_each(kwargs, _copy))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*_each(args, _copy_alone), **_each(kwargs or {}, _copy_alone))

    def _end(self, places: object) -> int | None:
        """Where rows end that are the first of the block's own."""
        if isinstance(places, slice) and places.start in (None, 0) and places.step in (None, 1):
            end = places.stop
            return end if isinstance(end, int) and 0 <= end <= len(self.own) else None
        return None


def _each(held: Any, function: Callable[[RowsInPlace], Tensor]) -> Any:
    if isinstance(held, RowsInPlace):
        return function(held)
    if isinstance(held, Mapping):
        return {name: _each(one, function) for name, one in held.items()}
    return type(held)(_each(one, function) for one in held) if type(held) in (list, tuple) else held


def _copy(rows: RowsInPlace) -> Tensor:
    if rows.copied is None:
        rows.copied = rows.table.index_select(0, rows.at).requires_grad_(rows.own.requires_grad)
    return rows.copied


def _copy_alone(rows: RowsInPlace) -> Tensor:
    """Without a gradient, which whoever asks below autograd gives the rows themselves."""
    return _copy(rows).detach()


def _edges_of(matrix: Any, rows: Any) -> Edges | None:
    """The edges of a matrix, if they are some that nodes send whose rows are in place."""
    if not isinstance(matrix, Adjacency) or not isinstance(rows, RowsInPlace) or rows.dim() != 2:
        return None
    places = matrix.col_indices().data_ptr()
    return next((edges for edges in rows.edges if edges.places.data_ptr() == places), None)


class _Product(torch.autograd.Function):
    """The sums, or means, of the rows of a table over some edges."""

    @staticmethod
    def forward(ctx: Any, rows: RowsInPlace, matrix: Tensor, edges: Edges, how: str | None) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            indptr, values = matrix.crow_indices(), matrix.values()
        ctx.known = rows, edges.number, values, indptr.diff().clamp_(min=1) if how == "mean" else None
        block = Block(len(indptr) - 1, len(rows.table), indptr, edges.senders, values)
        return _product(block.weighted_adj, rows.table, how)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, number, values, degrees = ctx.known
        if len(values):  # those of no edges may be of any type
            gradient = gradient if degrees is None else gradient / degrees[:, None]
            call = sum(each.number == number for each in rows.owed)
            rows.owed.append(Owed(number, call, gradient, values))
        return None, None, None, None


class Debts:
    """What the blocks of a layer owe senders whose rows they have read, until each sender gets it at once.

    Args:
        blocks: All edges that the layer computes on, for each edge type.
        senders: The node type that sends them.
        table: Makes a table, of rows like some, with so many.
        num_bytes: Bytes that may be taken at a time.
    """

    def __init__(
        self, blocks: Sequence[Block], senders: Sequence[int], table: Callable[[Tensor, int], Tensor], num_bytes: int
    ) -> None:
        self._blocks, self._senders, self._table, self._num_bytes = blocks, senders, table, num_bytes
        self._kept = dict[tuple[int, int], tuple[Tensor, WriteInOrder, Tensor]]()  # by number and call
        self._of_copies = dict[int, Tensor]()

    def keep(self, owed: Iterable[Owed], places: Sequence[tuple[slice, slice]]) -> None:
        """Keep what a block owes for sums.

        Args:
            owed: By its rows of a type.
            places: For each edge type, which receivers and which edges are the block's.
        """
        for number, call, gradients, values in owed:
            if (number, call) not in self._kept:
                block = self._blocks[number]
                table = self._table(gradients, block.num_dst)
                self._kept[number, call] = table, WriteInOrder(table), values.new_zeros(block.num_edges)
            _, of_receivers, of_edges = self._kept[number, call]
            receivers, edges = places[number]
            of_receivers.put(receivers.start, gradients)
            of_edges[edges] = values

    def keep_of_copies(self, number: int, rows: RowsInPlace, gradients: Iterable[Tensor | None]) -> None:
        """Keep the gradients of copies of the rows of a type."""
        for some in gradients:
            if some is not None:
                if number not in self._of_copies:
                    self._of_copies[number] = self._table(rows.table, len(rows.table))
                self._of_copies[number].index_add_(0, rows.at, some)

    def pay(self, totals: Sequence[Tensor | None]) -> None:
        """Add it to the gradients of the nodes of each type."""
        while self._kept:
            (number, _), (table, of_receivers, values) = self._kept.popitem()
            of_receivers.end()
            if (total := totals[self._senders[number]]) is not None:
                turned = _TurnedRound(self._blocks[number], values)
                gradients, matrices = in_ram(table), turned.some(self._most_rows(table))
                _add(total, ((start, stop, _product(matrix, gradients)) for start, stop, matrix in matrices))
        for number, of_copies in self._of_copies.items():
            if (total := totals[number]) is not None:
                cuts = [*range(0, len(total), self._most_rows(total)), len(total)]
                _add(total, ((start, stop, of_copies[start:stop]) for start, stop in pairwise(cuts)))

    def _most_rows(self, like: Tensor) -> int:
        return max(1, self._num_bytes // max(1, 2 * bytes_of_row(like)))


def _add(total: Tensor, pieces: Iterable[tuple[int, int, Tensor]]) -> None:
    """Add pieces to a table, which are in its order."""
    reading, writing = ReadInOrder(total), WriteInOrder(total)
    for start, stop, piece in pieces:
        writing.put(start, reading.rows(start, stop).add_(piece))
    writing.end()


def bytes_of_row(rows: Tensor | None) -> int:
    return 0 if rows is None else prod(rows.shape[1:]) * rows.element_size()


def _product(matrix: Tensor, rows: Tensor, how: str | None = None) -> Tensor:
    """A product of a block's matrix; of a CPU by the faster of torch's ways to add up."""
    if how is None and rows.device.type == "cpu":
        how = "sum"
    found: Tensor = torch.sparse.mm(matrix, rows, *([] if how is None else [how]))
    return found


class _TurnedRound:
    """Matrices from a block's nodes to their senders.

    Args:
        block: All edges.
        values: Their values.
    """

    def __init__(self, block: Block, values: Tensor) -> None:
        senders, order = block.indices.sort(stable=True)
        ends = torch.arange(block.num_src + 1, dtype=senders.dtype, device=senders.device)
        self._indptr = torch.searchsorted(senders, ends, out_int32=senders.dtype == torch.int32)
        del senders, ends  # all edges take much memory
        rows = torch.arange(block.num_dst, dtype=block.indices.dtype, device=order.device)
        self._receivers = rows.repeat_interleave(block.indptr.diff(), output_size=len(order))[order]
        self._values, self._num_dst = values[order], block.num_dst

    def some(self, most_rows: int) -> Iterator[tuple[int, int, Tensor]]:
        """Yield matrices for some senders after the other, and which these are."""
        num_src = len(self._indptr) - 1
        for start in range(0, num_src, most_rows):
            stop = min(start + most_rows, num_src)
            first, last = int(self._indptr[start]), int(self._indptr[stop])
            csr = self._indptr[start : stop + 1] - first, self._receivers[first:last], self._values[first:last]
            yield start, stop, Block(stop - start, self._num_dst, *csr).weighted_adj
