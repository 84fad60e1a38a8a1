"""The layers of a module, run on whatever the batch is."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.hetero import SampledHeteroData
from lightning_gnn_dist.batches.one_hop import LayerView, RowsOfTypes, one_hop, seen_by_layers
from lightning_gnn_dist.batches.part_batch import OfPart
from lightning_gnn_dist.batches.seed_batch import SeedsOnly
from lightning_gnn_dist.checks import check_instance
from lightning_gnn_dist.layers.definition import HasLayers, Layer, layers_in, rows_of_types


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
        return batch.through(layers_in(module))
    ready = _ready_rows(module, batch)
    if ready is not None:
        return of_seeds(batch, ready)
    layers, seen = layers_in(module), seen_by_layers(batch)
    return layers_on_blocks(layers, batch, seen) if seen else _on_all_nodes(layers, batch)


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
