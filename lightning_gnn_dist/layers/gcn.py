"""GCN on a batch of one hop (Kipf, Welling, ICLR 2017, arXiv:1609.02907).

    deg(v) = loop(v) + sum over u of w(u, v)       loop(v) = 1 where the graph has no edge (v, v), 0 where it has one
    out(v) = deg(v)^-1/2 (loop(v) h(v) deg(v)^-1/2 + sum over u of w(u, v) h(u) deg(u)^-1/2)

The degrees are those of the whole graph where the batch brings them as a node array. Otherwise they are those of the
first batch of one hop, and the layers behind take the same.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv
from torch_geometric.utils import scatter

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.sampling.block import Block

_DEGREE, _LOOPS = "gcn_degree", "_loops"


def gcn_degrees(graph: Graph, weight: str | None = None, loop: float | None = 1.0, first_node: int = 0) -> Tensor:
    """The degree of every node as GCN counts it: the weights of its in-edges, and ``loop`` if it has no self-loop.

    Args:
        graph: The graph; a mapped one is read in pieces.
        weight: Name of the edge array that holds the weights. Default: ones.
        loop: The weight of the self-loop that a node without one gets: 2 for ``GCNConv(improved=True)`` with weights,
            or None for ``GCNConv(add_self_loops=False)``.
        first_node: The id of the node that the first row is of, where the graph has some rows only.

    Returns:
        float64, shape ``(N,)``.
    """
    degrees = torch.zeros(graph.num_nodes, dtype=torch.float64)
    loops = torch.full_like(degrees, loop or 0.0)
    for start in range(0, graph.num_edges, EDGES_AT_ONCE):
        senders = graph.indices[start : start + EDGES_AT_ONCE].long()
        rows = torch.searchsorted(graph.indptr, torch.arange(start, start + len(senders)), right=True) - 1
        values = torch.ones(len(rows), dtype=torch.float64)
        if weight is not None:
            values = graph.edge_arrays[weight][start : start + len(rows)].reshape(-1).to(torch.float64)
        own = senders == rows + first_node
        if loop is not None:
            loops[rows[own]] = values[own]
            values = values.masked_fill(own, 0.0)
        degrees.index_add_(0, rows, values)
    return degrees + loops


def degree_name(weight: str | None, loop: float | None) -> str:
    """The name of the node array that brings such degrees."""
    kind = {1.0: "", None: "_without_loops"}.get(loop, "_improved")
    return _DEGREE + kind + ("" if weight is None else f"_of_{weight}")


def loop_of(conv: GCNConv, weight: str | None) -> float | None:
    """The weight of the self-loops that a layer adds, or None if it adds none; as PyG does, 2 only beside weights."""
    return (2.0 if conv.improved and weight is not None else 1.0) if conv.add_self_loops else None


def gcn_rows(conv: GCNConv, batch: Data, x: Tensor, weight: str | None) -> Tensor:
    """The layer's rows of the first ``batch.batch_size`` nodes.

    Args:
        conv: The layer.
        batch: A batch of one hop with a block. Degrees that are computed here are added to it.
        x: The rows of its nodes.
        weight: Name of the edge array that holds the weights. Default: ones.
    """
    block, sums_first = batch.blocks[0], _sums_first(conv, batch.blocks[0])
    h = x if sums_first else conv.lin(x)
    values = None if weight is None else batch[weight].reshape(-1)
    if not conv.normalize:
        out = _sum(block, h, values)
    else:
        loop, dtype = loop_of(conv, weight), torch.promote_types(x.dtype, torch.float32)  # degrees are whole numbers
        degrees, loops = _degrees(batch, block, values, degree_name(weight, loop), loop, dtype)
        scale = degrees.pow(-0.5)
        scale = scale.masked_fill(scale == torch.inf, 0.0).to(x.dtype)[:, None]
        if sums_first:  # senders' rows are left as they are, so that they need no copy
            of_senders = scale[block.indices.long(), 0]
            out, own = _sum(block, h, of_senders if values is None else values * of_senders), h[: block.num_dst]
            own = own if loops is None else own * scale[: block.num_dst]
        else:
            h = h * scale
            out, own = _sum(block, h, values), h[: block.num_dst]
        if loops is not None:
            out = out + loops[: block.num_dst, None].to(h.dtype) * own
        out = out * scale[: block.num_dst]
    out = conv.lin(out) if sums_first else out
    return out if conv.bias is None else out + conv.bias


def count_degrees(batch: SampledData, weight: str | None, loop: float | None) -> None:
    """Give a batch the degrees of its nodes, counted in all of its edges, also those that no layer has a block of."""
    values = None if weight is None else batch[weight].reshape(-1)
    dtype = torch.promote_types(batch.x.dtype, torch.float32)
    _degrees(batch, batch._store._blocks[0], values, degree_name(weight, loop), loop, dtype)


def _sums_first(conv: GCNConv, block: Block) -> bool:
    """Whether it takes fewer products to multiply sums by the layer's matrix than to sum what it was multiplied by."""
    width, out_width = conv.lin.in_channels, conv.lin.out_channels
    size = width * out_width
    return bool(block.num_dst * size + block.num_edges * width < block.num_src * size + block.num_edges * out_width)


def _degrees(
    batch: Data, block: Block, values: Tensor | None, name: str, loop: float | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """The degrees of the batch's nodes, and what their self-loops weigh beyond those that the block has."""
    if loop is not None and name + _LOOPS not in batch:
        batch[name + _LOOPS] = _loops(block, values, loop, dtype)
    loops = batch.get(name + _LOOPS)
    if name not in batch:
        if values is None:
            of_rows = block.indptr.diff().to(dtype)
        else:
            of_rows = scatter(values.to(dtype), block.edge_index[1], dim_size=block.num_dst)
        degrees = torch.cat([of_rows, of_rows.new_zeros(block.num_src - block.num_dst)])
        batch[name] = degrees if loops is None else degrees + loops
    return batch[name], loops


def _loops(block: Block, values: Tensor | None, loop: float, dtype: torch.dtype) -> Tensor:
    """What is missing of a self-loop: all where there is none; less than 0 where there are several, for one counts."""
    senders, rows = block.edge_index
    values = torch.ones_like(rows, dtype=dtype) if values is None else values.to(dtype)
    at = torch.where(senders == rows, rows, block.num_src)  # the place behind the last is for all other edges
    empty = values.new_zeros(block.num_src + 1)
    loops: Tensor = (empty + loop).scatter(0, at, values) - empty.index_add(0, at, values)
    return loops[: block.num_src]


def _sum(block: Block, h: Tensor, values: Tensor | None) -> Tensor:
    """The weighted sum over the senders of each row."""
    is_learned = values is not None and values.requires_grad
    if not is_learned and not (values is None and block.is_corrected) and not h.is_cuda:  # where its backward waits
        matrix = block.adj if values is None else replace(block, weight=values.to(h.dtype)).weighted_adj
        product: Tensor = matrix @ h
        return product
    senders, rows = block.edge_index
    messages = h[senders] if values is None else h[senders] * values[:, None].to(h.dtype)
    total: Tensor = scatter(messages, rows, dim_size=block.num_dst)
    return total
