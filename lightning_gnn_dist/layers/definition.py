"""The layers of a model: functions of a batch of one hop, which can be called one after the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from torch import Tensor, nn
from torch_geometric.nn import FAConv, GCN2Conv, GCNConv, LGConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.checks import shown

Layer = Callable[[Any], Any]  # of a batch to a tensor, or to a dict of tensors by node types
COPIES = 3  # a layer's rows, and what it computes from them on the way, take so many times their bytes
BYTES_OF_AN_EDGE = 120  # in the sampler's working memory and in the batch
_NORMALISING = (GCNConv, GCN2Conv, FAConv, LGConv)  # PyG's layers that call gcn_norm on the edges they are given


class HasLayers(Protocol):
    """A module whose layers can be called one after the other."""

    def layers(self) -> Sequence[Layer]:
        """Return a function per layer. Each takes a batch of one hop, whose ``x`` has the rows of the layer before.

        It returns a row for each of the first ``batch.batch_size`` nodes; rows behind them are cut off. Beside ``x``,
        the batch has ``x0``, the input rows of its nodes, which are the first layer's ``x``; and as usual
        ``blocks[0]``, ``edge_index``, ``n_id``, and the graph's other arrays. The last layer's rows are the prediction.

        Of a graph with types the batch is a ``HeteroData``, all of this is said of each type, and a layer returns a
        dict: for each node type a row for each of its first ``batch[kind].batch_size`` nodes. A type that it leaves
        out has no rows, and no ``x`` for the layer behind.
        """
        ...


def has_layers(model: object) -> bool:
    """Whether a model has a method ``layers``. An attribute of that name, such as a list of modules, does not count."""
    return callable(getattr(type(model), "layers", None))


def layers_in(model: object) -> list[Layer]:
    """The layers of a model. Refused where one would normalise by the degrees of a batch of one hop."""
    if not has_layers(model):
        raise TypeError(
            f"module must have a method layers(), got {shown(model)}. Define it: it returns a list of functions of a "
            "batch, one for each layer."
        )
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    known = {conv for gnn in modules if isinstance(gnn, BasicGNN) for conv in gnn.modules()}
    for conv in modules:
        if isinstance(conv, _NORMALISING) and conv.normalize and conv not in known:
            raise ValueError(
                f"module: {type(conv).__name__} normalises by the degrees in its batch, and in a batch of one hop "
                "senders have none. Normalise once, Graph.from_pyg(torch_geometric.transforms.GCNNorm()(data)), and "
                f"call {type(conv).__name__}(..., normalize=False) with batch.edge_weight; or take "
                "torch_geometric.nn.GCN and layers_of."
            )
    return list(cast(HasLayers, model).layers())


def rows_of_types(outputs: object, view: Any, says: str) -> RowsOfTypes:
    """The rows that a layer has returned for its batch of one hop, by node types; fewer than it must are refused.

    Args:
        outputs: What it returned.
        view: Its batch.
        says: Who returned it, for error messages.
    """
    stores = view.node_stores
    if (kinds := [store._key for store in stores]) == [None]:
        return [_first_rows(outputs, stores[0]["batch_size"], says, "")]
    if not isinstance(outputs, Mapping) or (unknown := [kind for kind in outputs if kind not in kinds]):
        got = type(outputs).__name__ if not isinstance(outputs, Mapping) else f"one with {shown(unknown)}"
        raise TypeError(f"{says} must return a dict from node types, {shown(kinds)}, to rows, and returned {got}.")
    if not outputs:
        raise TypeError(f"{says} returned no rows of any type: it must return a dict from node types to rows.")
    return [
        _first_rows(outputs[kind], store["batch_size"], says, f" of type {kind!r}") if kind in outputs else None
        for kind, store in zip(kinds, stores, strict=True)
    ]


def _first_rows(rows: object, count: int, says: str, which: str) -> Tensor:
    if isinstance(rows, Tensor) and rows.dim() and len(rows) >= count:
        return rows if len(rows) == count else rows[:count]
    got = f"a tensor of {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
    raise TypeError(
        f"{says} returned {got} for a batch of {count} nodes{which}: it must return a tensor with a row for each of "
        "the first batch.batch_size nodes."
    )
