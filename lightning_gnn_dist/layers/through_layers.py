"""The layers of a model, functions of a batch of one hop, and how they run on whatever a batch is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import FAConv, GCN2Conv, GCNConv, LGConv
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.batch import Promising, SampledHeteroData
from lightning_gnn_dist.batches.one_hop import LayerView, OfPart, RowsOfTypes, one_hop, seen_by_layers
from lightning_gnn_dist.batches.seed_batch import SeedsOnly
from lightning_gnn_dist.checks import check_instance, shown
from lightning_gnn_dist.graph.graph import Graph

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


@runtime_checkable
class Prepares(Protocol):
    """A layer that reads what must be counted over all edges, of a batch or of the whole graph."""

    def prepare(self, batch: Any) -> None:
        """Write that into a batch."""
        ...

    def of_whole_graph(self) -> Mapping[str, Callable[[Graph, int], Tensor]]:
        """Return what counts each node array of the whole graph that it reads in batches of one hop, by name.

        It takes the graph, or some rows of it, and the id of the node that the first row is of.
        """
        ...


def needs_whole_graph(layers: Sequence[Layer]) -> bool:
    """Whether layers read node arrays of the whole graph, so that rows of sampled batches differ from theirs."""
    return any(layer.of_whole_graph() for layer in _preparing(layers))


def whole_graph_arrays(layers: Sequence[Layer], graph: Graph, first_node: int = 0) -> dict[str, Tensor]:
    """Node arrays of the whole graph that layers read in their batches, as :class:`Prepares` says it.

    Args:
        layers: The layers of a model.
        graph: The graph, or some rows of it.
        first_node: The id of the node that the first row is of.
    """
    counts = {name: count for layer in _preparing(layers) for name, count in layer.of_whole_graph().items()}
    return {name: counts[name](graph, first_node) for name in sorted(counts)}


def _preparing(layers: Sequence[Any]) -> list[Prepares]:
    return [layer for layer in layers if isinstance(layer, Prepares)]


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
    if isinstance(rows, Tensor) and rows.dim() and rows.shape[0] >= count:
        return rows if rows.shape[0] == count else rows[:count]
    got = f"a tensor of {tuple(rows.shape)}" if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
    raise TypeError(
        f"{says} returned {got} for a batch of {count} nodes{which}: it must return a tensor with a row for each of "
        "the first batch.batch_size nodes."
    )


def through_layers(module: HasLayers, batch: Data | HeteroData) -> Any:
    """Run ``module.layers()`` on a batch, and return a row for each of its seeds, the first ``batch.batch_size`` nodes.

        class SAGE(pl.LightningModule):
            def layers(self):
                return [lambda batch: self.conv1(batch.x, batch.edge_index).relu(),
                        lambda batch: self.conv2(batch.x, batch.edge_index)]

            def forward(self, batch):
                return through_layers(self, batch)

    Each layer is called with a batch of one hop, see :class:`HasLayers`: with the edges of its own block, so that inner
    layers compute no rows that nobody reads. On a batch without blocks, such as PyG's own loaders yield, each layer
    computes on all nodes and all edges.

    Of a graph with types, layers return dicts, and the result is the rows of the seeds' type; of a batch of links, or
    of a ``HeteroData`` that names no seeds, a dict of rows by node types.

    Args:
        module: A module with a method ``layers``.
        batch: A batch of any sampler or loader, or a whole graph as ``Data`` or ``HeteroData``.
    """
    check_instance("batch", batch, Data | HeteroData, "a batch of a loader, or a Data or HeteroData of PyG")
    if isinstance(batch, OfPart):
        layers, batch = _layers_for(module, batch)
        return batch.through(layers)
    ready = _ready_rows(module, batch)
    if ready is not None:
        return of_seeds(batch, ready)
    layers, batch = _layers_for(module, batch)
    seen = seen_by_layers(batch)
    return layers_on_blocks(layers, batch, seen) if seen else _on_all_nodes(layers, batch)


def _layers_for(module: HasLayers, batch: Any) -> tuple[list[Layer], Any]:
    """The layers of a module and the batch as they read it."""
    layers = layers_in(module)
    if _leaves_edges_out(batch):
        batch = copy.copy(batch)
        for layer in _preparing(layers):
            layer.prepare(batch)
    return layers, batch


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leaves_edges_out(batch: Any) -> bool:
    """Whether a batch has edges of which no layer has a block."""
    promising = [store for store in batch.stores if isinstance(store, Promising) and store._blocks]
    return any(store.blocks_of_layers[0].num_edges < store._blocks[0].num_edges for store in promising)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ready_rows(module: HasLayers, batch: object) -> RowsOfTypes | None:
    """The rows of the batch's seeds, if they were computed before it came; None where they are still to be."""
    if not isinstance(batch, SeedsOnly):
        return None
    rows: RowsOfTypes | None = batch.rows_of(module)
    if rows is None:
        batch.read()
    return rows


def layers_on_blocks(
    layers: list[Layer],
    batch: Any,
    seen: Sequence[LayerView],
    known: Callable[[RowsOfTypes, int], RowsOfTypes] = lambda rows, _: rows,
) -> Any:
    """Run layers on a batch, each on its own blocks.

    Args:
        layers: As many layers as there are in ``seen``.
        batch: The batch.
        seen: What each layer sees of it.
        known: Returns what the next layer reads in the place of a layer's rows. Default: these rows.
    """
    if len(layers) != len(seen):
        raise ValueError(
            f"layers() returns {len(layers)} layers, but the batch has blocks for {len(seen)}. Give the sampler one "
            f"hop for each layer: NeighborSampler([10] * {len(layers)}), or num_hops={len(layers)}."
        )
    view = one_hop(batch, seen[0])
    rows = layer_rows(layers[0], view, 0)
    for index in range(1, len(layers)):
        # Of the view before: what a layer adds to it reaches the next.
        view = one_hop(view, seen[index], known(rows, index - 1))
        rows = layer_rows(layers[index], view, index)
    return of_seeds(batch, rows)


def layer_rows(layer: Layer, view: Any, index: int) -> RowsOfTypes:
    """The rows that layer ``index`` makes of a batch of one hop."""
    return rows_of_types(layer(view), view, f"Layer {index} of layers()")


def of_seeds(batch: Any, rows: RowsOfTypes) -> Any:
    """Of the rows of the last layer those of the type of a batch's seeds, or of a batch of links those of each type."""
    kinds = [store._key for store in batch.node_stores]
    found = {kind: of_type for kind, of_type in zip(kinds, rows, strict=True) if of_type is not None}
    if kinds == [None]:
        return found[None]
    seed_type = batch.seed_type if isinstance(batch, SampledHeteroData) else _type_with_seeds(batch)
    if not isinstance(seed_type, str):
        return found
    if seed_type not in found:
        raise TypeError(f"The last layer of layers() returned no rows of the seeds' type, {seed_type!r}.")
    return found[seed_type]


def _type_with_seeds(batch: HeteroData) -> str | None:
    """The type of the seeds of a batch of PyG's own loaders; None if the batch does not say it, as a whole graph."""
    kinds: list[str] = [store._key for store in batch.node_stores if "batch_size" in store]
    return kinds[0] if len(kinds) == 1 else None


def _on_all_nodes(layers: list[Layer], batch: Data | HeteroData) -> Any:
    view = copy.copy(batch)
    sizes = [store.get("batch_size", store.num_nodes) for store in view.node_stores]
    for store in view.node_stores:
        store["batch_size"] = store.num_nodes
        if "x" in store:
            store["x0"] = store["x"]
    rows: RowsOfTypes = []
    for index, layer in enumerate(layers):
        view = copy.copy(view)
        for store, of_type in zip(view.node_stores, rows, strict=False):
            store["x"] = of_type
        rows = layer_rows(layer, view, index)
    return of_seeds(batch, [r if r is None else r[:size] for r, size in zip(rows, sizes, strict=True)])
