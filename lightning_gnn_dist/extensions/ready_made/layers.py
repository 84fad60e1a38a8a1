"""The layers of PyG's ready-made models: what ``BasicGNN.forward`` does in a loop, as one function for each layer.

    h_l = dropout(act(norm(conv_l(h_(l-1), edges))))        out = lin(jk(h_1, ..., h_L))

A layer needs the edges into its own nodes alone. With ``jk``, its rows are [h_1 | ... | h_l].

GCN on a batch of one hop (Kipf, Welling, ICLR 2017, arXiv:1609.02907):

    deg(v) = loop(v) + sum over u of w(u, v)       loop(v) = 1 where the graph has no edge (v, v), 0 where it has one
    out(v) = deg(v)^-1/2 (loop(v) h(v) deg(v)^-1/2 + sum over u of w(u, v) h(u) deg(u)^-1/2)

The degrees are those of the whole graph where the batch brings them as a node array. Otherwise they are those of the
first batch of one hop, and the layers behind take the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.data import Data
from torch_geometric.nn import MLP, EdgeConv, GATConv, GATv2Conv, GCNConv, GINConv, LayerNorm, PNAConv, SAGEConv
from torch_geometric.nn.models.basic_gnn import BasicGNN
from torch_geometric.utils import scatter

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, Promise
from lightning_gnn_dist.checks import check_instance, check_word, shown
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.layers.through_layers import Layer, ModelLayers, is_compiled, is_watched
from lightning_gnn_dist.sampling.block import Block

_DEGREE, _LOOPS = "gcn_degree", "_loops"


def gcn_degrees(weight: str | None, loop: float | None, graph: Graph, first_node: int = 0) -> Tensor:
    """The degree of every node as GCN counts it: the weights of its in-edges, and ``loop`` if it has no self-loop.

    Args:
        weight: Name of the edge array that holds the weights, or None for ones.
        loop: The weight of the self-loop that a node without one gets: 2 for ``GCNConv(improved=True)`` with weights,
            or None for ``GCNConv(add_self_loops=False)``.
        graph: The graph; a mapped one is read in pieces.
        first_node: The id of the node that the first row is of, where the graph has some rows only.

    Returns:
        In the type of the features, or float32; shape ``(N,)``.
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
    x = graph.node_arrays.get("x")
    return (degrees + loops).to(torch.float64 if x is not None and x.dtype == torch.float64 else torch.float32)


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


_CONVS = (SAGEConv, GCNConv, GINConv, GATConv, GATv2Conv, PNAConv, EdgeConv)
_NAMES = "GraphSAGE, GCN, GIN, GAT, PNA or EdgeCNN of torch_geometric.nn"


def layers_of(gnn: BasicGNN, *, edge_weight: str | None = None, edge_attr: str | None = None) -> list[Layer]:
    """The layers of one of PyG's ready-made models, for a module's ``layers``.

        class Net(pl.LightningModule):
            def layers(self):
                return layers_of(self.gnn)

            def forward(self, batch):
                return through_layers(self, batch)

    The rows are those of ``gnn(batch.x, batch.edge_index)[: batch.batch_size]``. Two things differ in training: a
    ``BatchNorm`` sees the rows that are needed, and not all of the batch; dropout draws other numbers. ``GCN``
    normalises by the degrees of the sampled batch, as PyG does, but in :func:`predict_by_layer` and wherever a layer is
    computed for all nodes by those of the whole graph.

    Args:
        gnn: ``GraphSAGE``, ``GCN``, ``GIN``, ``GAT``, ``PNA`` or ``EdgeCNN``.
        edge_weight: Name of the batch's array that ``gnn`` takes as ``edge_weight``. Default: none.
        edge_attr: Name of the batch's array that ``gnn`` takes as ``edge_attr``. Default: none.
    """
    check_instance("gnn", gnn, BasicGNN, f"a {_NAMES}")
    _check_model(gnn)
    for name, value, takes in (
        ("edge_weight", edge_weight, gnn.supports_edge_weight),
        ("edge_attr", edge_attr, gnn.supports_edge_attr),
    ):
        if value is not None:
            check_word(name, value, name)
        if value is not None and not takes:
            raise ValueError(f"{name}: {type(gnn).__name__} takes none, got {shown(value)}. Leave it out.")
    return [_Layer(gnn, index, edge_weight, edge_attr) for index in range(gnn.num_layers)]


@dataclass(frozen=True)
class _Layer:
    gnn: BasicGNN
    index: int
    edge_weight: str | None
    edge_attr: str | None

    @property
    def conv(self) -> Any:
        """The layer itself, also where it is compiled."""
        conv = self.gnn.convs[self.index]
        return getattr(conv, "_orig_mod", conv)

    @property
    def degrees(self) -> tuple[str | None, float | None] | None:
        """How degrees are counted, or None for a layer that does not normalise."""
        conv = self.conv
        return (
            (self.edge_weight, loop_of(conv, self.edge_weight))
            if isinstance(conv, GCNConv) and conv.normalize
            else None
        )

    def prepare(self, batch: Any) -> None:
        """Write the degrees by which the layer normalises into a batch, counted over all of its edges."""
        if self.degrees is not None:
            count_degrees(batch, *self.degrees)

    def of_whole_graph(self) -> dict[str, Callable[[Graph, int], Tensor]]:
        kind = self.degrees
        return {} if kind is None else {degree_name(*kind): partial(gcn_degrees, *kind)}

    def __call__(self, batch: Data) -> Tensor:
        gnn, is_last = self.gnn, self.index == self.gnn.num_layers - 1
        collects, width = hasattr(gnn, "jk"), gnn.hidden_channels
        x: Tensor = batch.x if self.index == 0 or not collects else batch.x[:, -width:]
        x = self._convolve(batch, x)
        if not is_last or gnn.jk_mode is not None:
            x = self._activate(x)
        if collects and self.index:
            x = torch.cat([batch.x[: len(x)], x], dim=-1)
        if is_last and collects:
            x = gnn.jk(x.split(width, dim=-1))
        if is_last and hasattr(gnn, "lin"):
            x = gnn.lin(x)
        return x

    def _activate(self, x: Tensor) -> Tensor:
        gnn = self.gnn
        act = gnn.act or nn.Identity()
        norm = gnn.norms[self.index]
        rows: Tensor = gnn.dropout(norm(act(x)) if gnn.act_first else act(norm(x)))
        return rows

    def _convolve(self, batch: Data, x: Tensor) -> Any:
        conv, options = self.conv, self._options(batch)
        call = self.gnn.convs[self.index]
        if not isinstance(batch, SampledData) or not batch.has_blocks:
            return call(x, batch.edge_index, **options)
        block = batch.blocks[0]
        if isinstance(conv, GCNConv):
            return gcn_rows(conv, batch, x, self.edge_weight)
        if isinstance(conv, PNAConv):  # takes no pair
            return call(x, batch.edge_index, **options)[: block.num_dst]
        pair = x, x[: block.num_dst]
        adds_up = isinstance(conv, SAGEConv | GINConv) and conv.fuse and conv.aggr in ("add", "sum", "mean")
        if adds_up and not block.is_corrected and not x.is_cuda:  # there the backward of a sparse product waits
            return call(pair, block.adj)
        return call(pair, batch.edge_index, **options)

    def _options(self, batch: Data) -> dict[str, Tensor]:
        names = {"edge_weight": self.edge_weight, "edge_attr": self.edge_attr}
        return {argument: batch[name] for argument, name in names.items() if name is not None}


def _check_model(gnn: BasicGNN) -> None:
    kind = type(gnn).__name__
    if type(gnn).forward is not BasicGNN.forward:
        raise TypeError(f"{kind} has a forward of its own, so its layers are unknown: write layers() by hand.")
    for conv in gnn.convs:
        conv = getattr(conv, "_orig_mod", conv)
        if not isinstance(conv, _CONVS):
            raise TypeError(f"{kind} has layers {type(conv).__name__}: gnn must be {_NAMES}. Write layers() by hand.")
        if getattr(conv, "cached", False):
            raise ValueError(f"{kind}(cached=True) keeps the degrees of its first batch. Leave cached out.")
        if isinstance(conv, GCNConv) and conv.aggr not in ("add", "sum"):
            raise ValueError(f"{kind}(aggr={conv.aggr!r}): layers_of knows GCN with sums. Leave aggr out.")
        if conv.flow != "source_to_target":
            raise ValueError(f"{kind}(flow={conv.flow!r}): batches have edges into their nodes. Leave flow out.")
    for norm in gnn.modules() if gnn.supports_norm_batch else ():
        if _mixes_rows(norm) and norm is not gnn:
            raise ValueError(
                f"norm: {type(norm).__name__} normalises by all rows of the graph at once, so no layer can be computed "
                'for some nodes. Take norm="batch_norm", or norm="layer_norm" with norm_kwargs={"mode": "node"}.'
            )


def _mixes_rows(norm: nn.Module) -> bool:
    """Whether a row depends on the others: such norms take the graph of each row, as ``batch``."""
    is_by_row = isinstance(norm, MLP) or (isinstance(norm, LayerNorm) and norm.mode == "node")
    kind: Any = type(norm)
    return not is_by_row and _takes_batch(kind)


@cache
def _takes_batch(kind: Any) -> bool:
    return "batch" in inspect.signature(kind.forward).parameters


class FoundLayers(ModelLayers):
    """The layers of such a model. The module may give it other rows than the graph's."""

    is_found: ClassVar[bool] = True

    @classmethod
    def of(cls, module: nn.Module) -> FoundLayers | None:
        """Return those in a module; None if it has several models, or one that is compiled, watched or lazy."""
        found = [child for child in module.modules() if isinstance(child, BasicGNN)]
        if len(found) != 1 or any(map(is_compiled, module.modules())):
            return None
        if any(is_watched(child) for child in found[0].modules() if child is not found[0]):
            return None
        if any(map(is_lazy, found[0].parameters())):  # the first rows that it sees decide on its shape
            return None
        return cls(found[0], layers_of(found[0]), None)

    def let_answer(self) -> Callable[[], None]:
        """Let the model answer with ready rows where it is called with a promised batch. Return what undoes it.

        The answer is a method, so that a copy of the model, or a pickled one, computes for itself.
        """
        owner = self.owner
        own = owner.__dict__.get("forward")
        before = None if getattr(own, "is_answer", False) else own  # of an evaluation that was left, or runs beside

        def forward(self: BasicGNN, *args: Any, **kwargs: Any) -> Tensor:
            run = partial(type(self).forward, self) if before is None else before
            neighbourhood = _neighbourhood_of(*args, **kwargs)
            rows = None if neighbourhood is None else neighbourhood.rows_of(self)
            if neighbourhood is None or rows is None:
                result: Tensor = run(*args, **kwargs)
                return result
            return Promise(lambda: run(*args, **kwargs), lambda: rows()[0], neighbourhood.num_seeds[None])

        forward.is_answer = True  # type: ignore[attr-defined]
        answer = MethodType(forward, owner)
        owner.forward = answer

        def undo() -> None:
            if owner.__dict__.get("forward") is answer:
                del owner.forward
                if before is not None:
                    owner.forward = before

        return undo


def _neighbourhood_of(*args: Any, **kwargs: Any) -> Neighbourhood | None:
    """Return the neighbourhood that a model is called with, if it is called with its promises and nothing else."""
    given = [*args, *kwargs.values()]
    if len(given) != 2 or not all(isinstance(item, Promise) and isinstance(item.origin, tuple) for item in given):
        return None
    (first, x), (second, edges) = (item.origin for item in given)
    is_asked = (x, edges) == ("x", "edge_index") and first is second and {*kwargs} <= {"x", "edge_index"}
    return first if is_asked else None
