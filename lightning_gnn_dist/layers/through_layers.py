"""The layers of a model, functions of a batch of one hop, and how they run on whatever a batch is.

Also which layers an evaluation can compute one by one: those of a module, or of the one model of PyG in it.
"""

from __future__ import annotations

import copy
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast, runtime_checkable

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import FAConv, GCN2Conv, GCNConv, LGConv, norm
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.batch import Promising, SampledHeteroData
from lightning_gnn_dist.batches.one_hop import LayerView, OfPart, RowsOfTypes, one_hop, seen_by_layers
from lightning_gnn_dist.batches.seed_batch import SeedsOnly
from lightning_gnn_dist.checks import check_instance, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import RowsOfRanks
from lightning_gnn_dist.names import offered
from lightning_gnn_dist.wire.collectives import octets

Layer = Callable[[Any], Any]  # of a batch to a tensor, or to a dict of tensors by node types
COPIES = 3  # a layer's rows, and what it computes from them on the way, take so many times their bytes
BYTES_OF_AN_EDGE = 120  # in the sampler's working memory and in the batch
_NORMALISING = (GCNConv, GCN2Conv, FAConv, LGConv)  # PyG's layers that call gcn_norm on the edges they are given
_OF_ALL_ROWS = (norm.GraphNorm, norm.PairNorm, norm.MeanSubtractionNorm, norm.GraphSizeNorm)
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_MOST_COMPARED = 1 << 16  # numbers of a weight; whoever sets other weights does not leave so many as they were

log = logging.getLogger(__name__)


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


def norm_of_all_rows(module: nn.Module) -> str | None:
    """Return the name and type of a layer that must see the rows of all nodes at once; None if there is none."""
    for name, child in module.named_modules():
        is_one = isinstance(child, _OF_ALL_ROWS)
        is_one |= isinstance(child, norm.LayerNorm) and child.mode == "graph"
        is_one |= isinstance(child, norm.InstanceNorm) and not child.track_running_stats
        if is_one:
            return f"{name} ({type(child).__name__})"
    return None


@dataclass(frozen=True)
class ModelLayers:
    """A model as a list of layers.

    Attributes:
        owner: The module whose rows they compute.
        layers: The layers, each a function of a batch of one hop.
        norm: The name of a layer that must see the rows of all nodes at once, or None.
        is_found: Whether this is a model of PyG's in a module, and the module may give it other rows than the graph's.
    """

    owner: nn.Module
    layers: list[Layer]
    norm: str | None
    is_found: ClassVar[bool] = False

    @property
    def are_better(self) -> bool:
        """Whether the layers are computed one by one whatever it costs to count.

        A model of PyG's computes each layer on all nodes of a batch, with a message for each edge. And on full
        neighbourhoods layers that normalise by the whole graph would give other rows.
        """
        return self.is_found or self.norm is not None or needs_whole_graph(self.layers)

    def let_answer(self) -> Callable[[], None]:
        """Let the model answer with ready rows; return what undoes it. A module that runs its layers asks for them."""
        return lambda: None


def layers_as_they_are(module: LightningModule, data: object, num_hops: int, *, is_typed: bool) -> ModelLayers | None:
    """Return the layers of a module, one for each hop, if no hook of it or of its data module changes what they see.

    In a graph with types a model of PyG's is none of them: what it sees of the types is unknown.
    """
    model = layers_of_model(module)
    if model is None or len(model.layers) != num_hops or (is_typed and model.is_found):
        return None
    changed = [name for name in _HOOKS if is_overridden(name, module) or is_overridden(name, data)]
    if changed and model.owner is module:
        log.info("The layers are not computed one by one, as %s() may change what they see.", changed[0])
        return None
    return model


def layers_of_model(module: nn.Module) -> ModelLayers | None:
    """Return the layers of a module: its own, or those of the one PyG model in it. None if there are none."""
    try:
        if has_layers(module):
            return ModelLayers(module, layers_in(module), norm_of_all_rows(module))
        found = offered("layers of PyG") if any(isinstance(child, BasicGNN) for child in module.modules()) else None
        model: ModelLayers | None = None if found is None else found.of(module)
        return model
    except (TypeError, ValueError) as error:  # it may never run its layers: then it works on full neighbourhoods
        log.info("Evaluation samples full neighbourhoods, since layers cannot be computed one by one: %s", error)
        return None


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is compiled before it computes."""
    made = (getattr(module, name, None) for name in ("_orig_mod", "_compiler_ctx", "_compiled_call_impl"))
    return any(item is not None for item in made)


def is_watched(module: nn.Module) -> bool:
    """Whether somebody watches or changes what a module computes."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


class ModelState:
    """What a model's rows depend on: its weights, and whether its modules are in training.

    It holds a copy of the weights, of large ones of some numbers. Of rows that live with one rank each it knows how
    often they have changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._versions = _versions(model)
        self._tensors = _tensors(model, self._versions)
        self._values = [_compared(tensor).clone() for tensor in self._tensors]

    @property
    def digest(self) -> int:
        """A number that is equal for equal weights."""
        number = zlib.crc32(repr([*self._versions.values()]).encode())
        for values in self._values:
            number = zlib.crc32(octets(values.cpu()).numpy().tobytes(), number)
        return number

    def is_of(self, model: nn.Module) -> bool:
        """Return whether the model is in evaluation and still has these weights."""
        if is_in_training(model):
            return False
        if _versions(model) != self._versions:
            return False
        now = _tensors(model, self._versions)
        are_same = len(now) == len(self._tensors) and all(map(lambda a, b: a is b, now, self._tensors))
        return are_same and _are_equal([*map(_compared, now)], self._values)


def is_in_training(model: nn.Module) -> bool:
    """Whether any module of a model is in training: dropout and batch norms then compute other rows every time."""
    return any(child.training for child in model.modules())


def _versions(model: nn.Module) -> dict[nn.Module, int]:
    """Return the modules whose rows live with one rank each, and how often these have changed."""
    versions = {child: child.settled_version() for child in model.modules() if isinstance(child, RowsOfRanks)}
    return {child: version for child, version in versions.items() if version is not None}


def _tensors(model: nn.Module, divided: Iterable[nn.Module]) -> list[Tensor]:
    """Return the tensors of a model that hold numbers, but for those of modules whose rows live with one rank each."""
    lazy = nn.UninitializedParameter | nn.UninitializedBuffer
    elsewhere = {id(each) for child in divided for each in child.parameters()}
    tensors = (*model.parameters(), *model.buffers())
    return [tensor for tensor in tensors if not isinstance(tensor, lazy) and id(tensor) not in elsewhere]


def _are_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Whether tensors are equal in pairs. For those on a device the host waits once."""
    pairs, there = list(zip(ours, theirs, strict=True)), list[Tensor]()
    for our, their in pairs:
        if (our.shape, our.device, our.dtype) != (their.shape, their.device, their.dtype):
            return False
        if our.device.type != "cpu":
            there.append(our.ne(their).any())
        elif not torch.equal(our, their):
            return False
    return not there or not bool(torch.stack(there).any())


def _compared(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _MOST_COMPARED)]
