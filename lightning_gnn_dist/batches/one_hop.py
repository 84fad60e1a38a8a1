"""What the layers of a model see of a batch: for each layer the nodes and edges of one hop, the outermost first.

A graph without types is one of one type, so what is said of types here is a list of one. Rows of nodes are a list with
an entry for each node type; None stands for a type that has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from lightning_gnn_dist.batches.batch import BatchStore, SampledData, SampledHeteroData, dtype_of, weight_of
from lightning_gnn_dist.sampling.block import Block, rebase

RowsOfTypes = list[Tensor | None]
_WIDE = ("x", "x0")  # few layers read these again, so they are copied when one does


class Nodes(NamedTuple):
    """The nodes of one type that a layer sees.

    Attributes:
        num_dst: The first ones, whose rows it computes.
        num_src: All of them.
        at: Where they stand in the batch, if they are not its first.
    """

    num_dst: int
    num_src: int
    at: Tensor | None = None


class LayerView(NamedTuple):
    """What a layer sees of a batch.

    Attributes:
        nodes: Its nodes of each type.
        blocks: The edges of each edge type.
    """

    nodes: Sequence[Nodes]
    blocks: Sequence[Block]


def seen_by_layers(batch: Any) -> list[LayerView]:
    """What each layer sees of a batch, the outermost first; nothing if the batch has no blocks."""
    if isinstance(batch, SampledData):
        return [LayerView([Nodes(block.num_dst, block.num_src)], [block]) for block in batch._store.blocks_of_layers]
    if not isinstance(batch, SampledHeteroData):
        return []
    of_types = [store.blocks_of_layers for store in batch.edge_stores]
    counts = [store["num_sampled_nodes"] for store in batch.node_stores]
    num_layers = min(map(len, of_types))
    seen = []
    for layer in range(num_layers):
        upto = num_layers - layer  # the hops whose nodes it computes
        nodes = [Nodes(sum(per_hop[:upto]), sum(per_hop[: upto + 1])) for per_hop in counts]
        seen.append(LayerView(nodes, [blocks[layer] for blocks in of_types]))
    return seen


def one_hop(batch: Any, seen: LayerView, x: RowsOfTypes | None = None) -> Any:
    """The batch of one hop that a layer reads. No array is copied, but for nodes that are not the batch's first.

    Args:
        batch: A batch with blocks, or what this function made of it for the layer before.
        seen: What the layer sees of it.
        x: What the layer before returned. Default: the batch's own ``x``, which then is ``x0`` as well.
    """
    if isinstance(batch, SampledData):
        view = SampledData.__new__(SampledData)
        store = view.__dict__["_store"] = BatchStore(_parent=view)  # Data.__init__ takes longer than what follows
        (nodes,), (block,) = seen
        _show(store, batch._store, nodes, block)
        _show_rows(store, batch._store, nodes, None if x is None else x[0], is_first=x is None)
        return view
    typed = SampledHeteroData.like(batch)
    typed._global_store._mapping |= batch._global_store._mapping
    typed._global_store._mapping["batch_size"] = sum(nodes.num_dst for nodes in seen.nodes)
    rows = x or [None] * len(seen.nodes)
    for store, old, nodes, of_type in zip(typed.node_stores, batch.node_stores, seen.nodes, rows, strict=True):
        _show(store, old, nodes, None)
        _show_rows(store, old, nodes, of_type, is_first=x is None)
    for store, old, block in zip(typed.edge_stores, batch.edge_stores, seen.blocks, strict=True):
        _show(store, old, None, block)
    return typed


def _show(store: Any, old: Any, nodes: Nodes | None, block: Block | None) -> None:
    """Give a store what another one has of the nodes and of the edges that a layer sees."""
    num_edges = -1 if block is None else old._blocks[0].num_edges
    num_nodes = -1 if nodes is None else old._mapping["num_nodes"] if block is None else old._blocks[0].num_src
    entries, at = store._mapping, nodes and nodes.at
    for name, value in old._mapping.items():
        size = len(value) if isinstance(value, Tensor) and value.dim() else -2
        is_of_edges = size == num_edges and (size != num_nodes or name in old._edge_arrays or name[:4] == "edge")
        if is_of_edges and block is not None:
            entries[name] = value if block.num_edges == size else value[: block.num_edges]
        elif size != num_nodes or nodes is None:
            entries[name] = value
        elif at is None:
            entries[name] = value if nodes.num_src == size else value[: nodes.num_src]
        elif name not in _WIDE:
            entries[name] = value[at]
    if block is not None:
        entries["num_sampled_edges"] = [block.num_edges]
        store._edge_arrays = old._edge_arrays
        store.promise((block,))


def _show_rows(store: Any, old: Any, nodes: Nodes, x: Tensor | None, *, is_first: bool) -> None:
    """Give a store what the layer before has made of its nodes."""
    entries, at = store._mapping, nodes.at
    if x is not None:
        entries["x"] = x
    elif not is_first:
        entries.pop("x", None)  # the layer before has made no rows of this type
    elif "x" in entries:
        entries["x0"] = entries["x"]
    if "num_nodes" in entries:
        entries["num_nodes"] = nodes.num_src
    entries["batch_size"] = nodes.num_dst
    entries["num_sampled_nodes"] = [nodes.num_dst, nodes.num_src - nodes.num_dst]
    if old._read_inputs is not None or (at is not None and "x0" in old._mapping):
        store.promise_x0(lambda: old["x0"][slice(nodes.num_src) if at is None else at])


def with_rows(batch: Any, rows: RowsOfTypes) -> Any:
    """The batch with other features, and the values of its matrices in their type; a type of None has none."""
    for store, of_type in zip(batch.node_stores, rows, strict=True):
        store._mapping.pop("x", None)
        if of_type is not None:
            store["x"] = of_type
    of_kinds = dict(zip([store._key for store in batch.node_stores], rows, strict=True))
    for store in batch.edge_stores:
        first, dtype = store._blocks[0], dtype_of(of_kinds[store._key and store._key[0]])
        weight = weight_of(store.get("edge_weight"), first.num_edges, dtype)
        store._blocks = rebase(store._blocks, replace(first, weight=weight, dtype=dtype))
    return batch


class OfPart:
    """A batch of nodes that a rank computes rows for, whose layers read rows of other ranks' nodes as well."""

    def through(self, layers: Sequence[Callable[[Any], Any]]) -> Any:
        """Run layers, with rows of other ranks between each two, and return the rows of the seeds.

        Collective, if ranks exchange them in every step.
        """
        raise NotImplementedError
