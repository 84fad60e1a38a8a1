"""Layers that compute their rows block by block, and again in the backward pass (SAR, arXiv:2111.06483; NeuGraph).

    forward    for each block of a layer's nodes: rows of its senders -> its rows, and nothing else is kept
    backward   for each block: the same again, with the same random numbers, and its gradients

So a step holds the rows between layers, of which those that would take too much memory are in files, and all that one
block takes. What is computed is what the layer computes on all nodes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_gnn_dist.batches.one_hop import LayerView, Nodes, RowsOfTypes, one_hop
from lightning_gnn_dist.graph.storage.rows_in_order import ReadInOrder, RowsInFile, WriteInOrder, in_file, in_ram
from lightning_gnn_dist.joint import RowsOfRanks
from lightning_gnn_dist.layers.norms import norm_of_batch
from lightning_gnn_dist.layers.rows_in_place import Debts, Edges, RowsInPlace, bytes_of_row
from lightning_gnn_dist.sampling.block import Block

_OF_INPUT, _OF_OUTPUT, _OF_A_SENDER, _OF_AN_EDGE = 4, 6, 3, 2  # rows of a block: made on the way, copies, messages
_BYTES_OF_AN_EDGE = 64  # its places, and the block's matrix and the transposed one
Ranges = list[tuple[int, int]]  # of each node type, which of the layer's nodes
_Read = list[RowsInPlace | None]  # of each node type
LayerRows = Callable[[Any, Any, int], RowsOfTypes]  # of a layer, its batch and its number


@runtime_checkable
class Prepares(Protocol):
    """A layer that reads what must be counted over all edges of a batch."""

    def prepare(self, batch: Any) -> None:
        """Write that into a batch."""


def in_blocks(
    module: object, layers: Sequence[Any], batch: Any, num_bytes: int, layer_rows: LayerRows
) -> tuple[list[Callable[[Any], Any]], Any]:
    """The layers of a module, each of which computes block by block, and the batch as they read it.

    Args:
        module: The module whose layers they are, and whose weights they learn.
        layers: Its layers.
        batch: The batch that they run on.
        num_bytes: Bytes that their rows may take: half of them a block, the others what is kept between layers.
        layer_rows: Returns the rows that a layer makes of a batch of one hop.
    """
    weights = _weights_of(module)
    for store in batch.stores:
        for name, value in store._mapping.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(
                    f"batch.{name} requires a gradient, and WholePartSampler(bytes=...) computes layers again in the "
                    f"backward pass, which would not reach it: compute {name} within the first of layers()."
                )
    of_table = num_bytes // 2 // (len(layers) + 1)  # rows behind each layer, and gradients of two
    found = [_InBlocks(layer, n, weights, num_bytes // 2, of_table, layer_rows) for n, layer in enumerate(layers)]
    return list(found), batch


def _weights_of(module: object) -> list[Tensor]:
    """The weights of a module whose rows do not depend on each other."""
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"WholePartSampler(bytes=...) finds the weights of layers() in a torch.nn.Module, got "
            f"{type(module).__name__}."
        )
    if (norm := norm_of_batch(module)) is not None and module.training:
        raise ValueError(
            f"{norm} normalises by the rows of all nodes at once, and WholePartSampler(bytes=...) computes them block "
            "by block: use torch.nn.LayerNorm, or leave bytes out."
        )
    for name, child in module.named_modules():
        if isinstance(child, RowsOfRanks) and child.settled_version() is not None:
            raise ValueError(
                f"{name} has rows that live with one rank each, and WholePartSampler(bytes=...) would ask for them "
                "block by block: leave bytes out."
            )
    return [weight for weight in module.parameters() if weight.requires_grad]


@dataclass(frozen=True, eq=False)
class _InBlocks:
    """A layer that computes block by block.

    Args:
        layer: The layer.
        index: Its number.
        weights: What it may learn.
        bytes_of_block: Bytes that a block may take.
        bytes_of_table: Bytes that rows of all nodes may take in RAM.
        layer_rows: Returns the rows that a layer makes of a batch of one hop.
    """

    layer: Any
    index: int
    weights: Sequence[Tensor]
    bytes_of_block: int
    bytes_of_table: int
    layer_rows: LayerRows

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, view: Any) -> Any:
        stores = view.node_stores
        inputs: RowsOfTypes = [store._mapping.get("x") for store in stores]
        outputs = _Recomputed.apply(self, view, len(inputs), *inputs, *self.weights)  # type: ignore[no-untyped-call]
        if (kinds := [store._key for store in stores]) == [None]:
            return outputs[0]
        return {kind: rows for kind, rows in zip(kinds, outputs, strict=True) if rows is not None}

    def rows(self, view: Any, ranges: Ranges, inputs: RowsOfTypes) -> tuple[RowsOfTypes, _Read, Sequence[Block]]:
        """Return the rows of a block, the rows that it reads, and its edges."""
        seen, ats, edges = _seen(view, ranges)
        read: _Read = [
            None if x is None else RowsInPlace.of(x, at, *own, sent)
            for x, at, own, sent in zip(inputs, ats, ranges, edges, strict=True)
        ]
        block = one_hop(view, seen, list(read))
        known = _names(block)
        rows = self.layer_rows(self.layer, block, self.index)
        if added := _names(block) - known:
            raise ValueError(
                f"Layer {self.index} of layers() has written {min(added)} into its batch, which with "
                "WholePartSampler(bytes=...) is that of a block, and no other layer's: compute it before, as an array "
                "of the graph, or leave bytes out."
            )
        return rows, read, seen.blocks

    def table(self, like: Tensor, num_rows: int) -> Tensor:
        """Zeros for all nodes, in a file if they take too much memory."""
        if self._fits(like.device, num_rows * bytes_of_row(like)):
            return like.new_zeros((num_rows, *like.shape[1:]))
        return RowsInFile.like(like, num_rows)

    def kept(self, rows: Tensor | None) -> Tensor | None:
        """Rows that another than a layer has made, in a file if they take too much memory."""
        if rows is None or not rows.requires_grad or self._fits(rows.device, rows.nbytes):
            return rows
        return rows if isinstance(rows, RowsInFile) else in_file(rows)

    def _fits(self, device: torch.device, num_bytes: int) -> bool:
        return device.type != "cpu" or num_bytes <= self.bytes_of_table

    def blocks(self, view: Any, needs: _Needs) -> Iterator[Ranges]:
        """Yield blocks that take no more than they may, but for those of one node of each type."""
        waiting = [_all_nodes(view)]
        while waiting:
            ranges = waiting.pop()
            most = max(stop - start for start, stop in ranges)
            if most <= 1 or _foreseen(view, ranges, needs) <= self.bytes_of_block:
                yield ranges
                continue
            middle = [(start + stop) // 2 for start, stop in ranges]
            waiting.append([(at, stop) for at, (_, stop) in zip(middle, ranges, strict=True)])
            waiting.append([(start, at) for at, (start, _) in zip(middle, ranges, strict=True)])


class _Needs(NamedTuple):
    """What a layer has been seen to make of one node.

    Attributes:
        likes: No rows, of the type and shape that it returns for each node type.
        copies: Whether it copies rows of senders, for each node type.
        messages: Whether it may make something for each edge.
    """

    likes: RowsOfTypes
    copies: list[bool]
    messages: bool


def _foreseen(view: Any, ranges: Ranges, needs: _Needs) -> int:
    """The bytes that a block takes."""
    sent = [0] * len(ranges)
    for sender, _, (first, last) in _edges(view, ranges):
        sent[sender] += last - first
    num_bytes = 0
    for store, like, is_copied, (start, stop), edges in zip(
        view.node_stores, needs.likes, needs.copies, ranges, sent, strict=True
    ):
        of_input, of_output = bytes_of_row(store._mapping.get("x")), bytes_of_row(like)
        num_bytes += (stop - start) * (_OF_INPUT * of_input + _OF_OUTPUT * of_output)
        num_bytes += is_copied * min(stop - start + edges, _num_src(store)) * _OF_A_SENDER * of_input
        num_bytes += edges * (_BYTES_OF_AN_EDGE + needs.messages * _OF_AN_EDGE * max(of_input, of_output))
    return num_bytes


class _Recomputed(torch.autograd.Function):
    """A layer as a node of autograd's graph that keeps its input rows alone."""

    @staticmethod
    def forward(ctx: Any, layer: _InBlocks, view: Any, num_types: int, *tensors: Tensor | None) -> Any:
        device = view.node_stores[0]["n_id"].device
        ctx.save_for_backward(*map(layer.kept, tensors[:num_types]), *tensors[num_types:])
        ctx.known = layer, view, num_types
        ctx.autocast = _autocast(device)
        inputs = _in_ram(tensors[:num_types])
        needs, ctx.random = _needs(layer, view, inputs), _Random(device)
        ctx.blocks, likes = list(layer.blocks(view, needs)), needs.likes
        counts = [stop for _, stop in _all_nodes(view)]
        outputs = [None if n is None else layer.table(n, count) for n, count in zip(likes, counts, strict=True)]
        writing = [None if table is None else WriteInOrder(table) for table in outputs]
        for ranges in ctx.blocks:
            rows, *_ = layer.rows(view, ranges, inputs)
            if [some is None for some in rows] != [like is None for like in likes]:
                raise TypeError(
                    f"Layer {layer.index} of layers() returned rows of a type for some blocks, and for others none."
                )
            for of_type, some, (start, _) in zip(writing, rows, ranges, strict=True):
                if of_type is not None and some is not None:
                    of_type.put(start, some)
        _end(writing)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        layer, view, num_types = ctx.known
        _, _, _, *needs = ctx.needs_input_grad
        of_inputs = [
            layer.table(x, len(x)) if x is not None and needed else None
            for x, needed in zip(ctx.saved_tensors[:num_types], needs[:num_types], strict=True)
        ]
        senders = [sender for sender, *_ in _edges(view, ctx.blocks[0])]
        blocks = [store._blocks[0] for store in view.edge_stores]
        debts, outer = Debts(blocks, senders, layer.table, layer.bytes_of_block), _Random(ctx.random.device)
        of_weights = _again(ctx, gradients, of_inputs, debts)
        outer.resume()
        debts.pay(of_inputs)
        return None, None, None, *of_inputs, *of_weights


def _again(ctx: Any, gradients: Sequence[Tensor | None], of_inputs: RowsOfTypes, debts: Debts) -> list[Tensor | None]:
    """Compute the blocks again, write the gradients of own rows, and return those of the weights.

    The rows that blocks read are in RAM until this is done: what is owed then takes their room.
    """
    layer, view, num_types = ctx.known
    inputs, weights = _in_ram(ctx.saved_tensors[:num_types]), ctx.saved_tensors[num_types:]
    of_weights: list[Tensor | None] = [None] * len(weights)
    random = ctx.random
    reading = [None if table is None else ReadInOrder(table) for table in gradients]
    writing = [None if table is None else WriteInOrder(table) for table in of_inputs]
    for ranges in ctx.blocks:
        random.resume()
        with torch.enable_grad(), torch.autocast(**ctx.autocast):
            rows, read, _ = layer.rows(view, ranges, inputs)
        random = _Random(random.device)  # a backward pass may draw, too
        leaves = [x.leaves if x is not None and x.own.requires_grad else [] for x in read]
        given = [None if each is None else each.rows(*at) for each, at in zip(reading, ranges, strict=True)]
        found = _gradients(rows, given, [*chain(*leaves), *weights])
        for number, (of_type, x, of_x) in enumerate(zip(writing, read, leaves, strict=True)):
            if of_type is not None and x is not None:
                of_own, *of_copies = [next(found) for _ in of_x]
                if of_own is not None:
                    of_type.put(ranges[number][0], of_own)
                debts.keep_of_copies(number, x, of_copies)
                debts.keep(x.owed, [(slice(*ranges[to]), slice(*at)) for _, to, at in _edges(view, ranges)])
        for number, some in enumerate(found):
            known = of_weights[number]
            of_weights[number] = some if known is None or some is None else known + some
    _end(writing)
    return of_weights


def _needs(layer: _InBlocks, view: Any, inputs: RowsOfTypes) -> _Needs:
    """Compute one node of each type. What that draws is drawn once more."""
    random = _Random(view.node_stores[0]["n_id"].device)
    rows, read, blocks = layer.rows(view, [(start, min(stop, 1)) for start, stop in _all_nodes(view)], inputs)
    random.resume()
    copies = [x is not None and x.copied is not None for x in read]
    likes = [None if each is None else each[:0].detach() for each in rows]
    return _Needs(likes, copies, any(copies) and any(map(_may_make_messages, blocks)))


def _may_make_messages(block: Block) -> bool:
    matrices = [block.__dict__[name] for name in ("adj", "weighted_adj") if name in block.__dict__]
    return "edge_index" in block.__dict__ or not matrices or any(matrix.is_read for matrix in matrices)


def _gradients(rows: RowsOfTypes, given: Sequence[Tensor | None], wanted: list[Tensor]) -> Iterator[Tensor | None]:
    """The gradients of what a block's rows were made of, given those of the rows."""
    of_rows = [
        (some, gradient.to(some.dtype))
        for some, gradient in zip(rows, given, strict=True)
        if some is not None and gradient is not None and some.requires_grad
    ]
    if not of_rows or not wanted:
        return iter([None] * len(wanted))
    made, of_made = zip(*of_rows, strict=True)
    return iter(torch.autograd.grad(made, wanted, of_made, allow_unused=True))


def _in_ram(inputs: Sequence[Tensor | None]) -> RowsOfTypes:
    return [None if rows is None else in_ram(rows) for rows in inputs]


def _end(writing: Sequence[WriteInOrder | None]) -> None:
    for each in writing:
        if each is not None:
            each.end()


class _Random:
    """Where the random numbers of the CPU, and of the device that computes, are."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._of_cpu = device, torch.get_rng_state()
        self._of_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def resume(self) -> None:
        """Draw from there on."""
        torch.set_rng_state(self._of_cpu)
        if self._of_device is not None:
            torch.cuda.set_rng_state(self._of_device, self.device)


def _autocast(device: torch.device) -> dict[str, Any]:
    kind = device.type
    return {"device_type": kind, "dtype": torch.get_autocast_dtype(kind), "enabled": torch.is_autocast_enabled(kind)}


def _all_nodes(view: Any) -> Ranges:
    return [(0, int(store["batch_size"])) for store in view.node_stores]


def _names(batch: Any) -> set[str]:
    return {name for store in batch.stores for name in store._mapping} - {"x0"}  # made when it is first read


def _num_src(store: Any) -> int:
    return int(sum(store["num_sampled_nodes"]))


def _edges(view: Any, ranges: Ranges) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """For each edge type the numbers of its two node types, and which of its edges are a block's."""
    numbers = {store._key: number for number, store in enumerate(view.node_stores)}
    for store in view.edge_stores:
        sender, receiver = (0, 0) if store._key is None else (numbers[store._key[0]], numbers[store._key[2]])
        first, last = store._blocks[0].indptr[torch.tensor(ranges[receiver])].tolist()
        yield sender, receiver, (first, last)


def _seen(view: Any, ranges: Ranges) -> tuple[LayerView, list[Tensor], list[list[Edges]]]:
    """What a layer sees of a batch of one hop to compute some of its nodes, where these and their senders are, and the
    edges that nodes of each type send."""
    device = view.node_stores[0]["n_id"].device
    sizes, edges = [_num_src(store) for store in view.node_stores], list(_edges(view, ranges))
    outermost = [store._blocks[0] for store in view.edge_stores]
    is_read = [torch.zeros(size, dtype=torch.bool, device=device) for size in sizes]
    for block, (sender, _, (first, last)) in zip(outermost, edges, strict=True):
        is_read[sender][block.indices[first:last].long()] = True
    nodes, ats, places = list[Nodes](), list[Tensor](), list[Tensor]()
    for read, (start, stop) in zip(is_read, ranges, strict=True):
        read[start:stop] = False
        at = torch.cat([torch.arange(start, stop, device=device), read.nonzero().view(-1)])
        place = torch.empty(len(read), dtype=torch.int64, device=device)
        place[at] = torch.arange(len(at), device=device)
        nodes.append(Nodes(stop - start, len(at), at))
        ats.append(at)
        places.append(place)
    blocks, sent = list[Block](), [list[Edges]() for _ in sizes]
    for block, (sender, receiver, (first, last)) in zip(outermost, edges, strict=True):
        (start, stop), senders = ranges[receiver], block.indices[first:last]
        indices = places[sender][senders.long()].to(senders.dtype)
        sent[sender].append(Edges(len(blocks), indices, senders))
        weight = None if block.weight is None else block.weight[first:last]
        indptr = block.indptr[start : stop + 1] - first
        csr = indptr, indices, weight
        blocks.append(Block(stop - start, nodes[sender].num_src, *csr, block.dtype, block.is_corrected))
    return LayerView(nodes, blocks, [first for _, _, (first, _) in edges]), ats, sent
