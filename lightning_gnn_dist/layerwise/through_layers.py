"""The layers of a module, run on whatever the batch is."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.batch import SampledData, one_hop
from lightning_gnn_dist.batches.part_batch import PartBatch
from lightning_gnn_dist.batches.seed_batch import SeedBatch
from lightning_gnn_dist.checks import check_instance
from lightning_gnn_dist.layerwise.layers import HasLayers, Layer, layers_in
from lightning_gnn_dist.sampling.block import Block


def through_layers(module: HasLayers, batch: Data) -> Tensor:
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

    Args:
        module: A module with a method ``layers``.
        batch: A batch of any sampler or loader, or a whole graph as ``Data``.
    """
    check_instance("batch", batch, Data, "a batch of a loader, or a torch_geometric.data.Data")
    if isinstance(batch, PartBatch):
        return batch.through(layers_in(module))
    rows: Tensor | None = _ready_rows(module, batch)
    if rows is None:
        layers = layers_in(module)
        has_blocks = isinstance(batch, SampledData) and batch.has_blocks
        rows = layers_on_blocks(layers, batch, batch.blocks) if has_blocks else _on_all_nodes(layers, batch)
    return rows


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _ready_rows(module: HasLayers, batch: Data) -> Tensor | None:
    """The rows of the batch's seeds, if they were computed before it came; None where they are still to be."""
    if not isinstance(batch, SeedBatch):
        return None
    rows = batch.rows_of(module)
    if rows is None:
        batch.read()
    return rows


def layers_on_blocks(
    layers: list[Layer],
    batch: SampledData,
    blocks: list[Block],
    known: Callable[[Tensor, int], Tensor] = lambda rows, _: rows,
) -> Tensor:
    """Run layers on a batch, each on its own block.

    Args:
        layers: As many layers as there are blocks.
        batch: The batch.
        blocks: Its blocks.
        known: Returns what the next layer reads in the place of a layer's rows. Default: these rows.
    """
    if len(layers) != len(blocks):
        raise ValueError(
            f"layers() returns {len(layers)} layers, but the batch has blocks for {len(blocks)}. Give the sampler one "
            f"hop for each layer: NeighborSampler([10] * {len(layers)}), or num_hops={len(layers)}."
        )
    view = one_hop(batch, blocks[0])
    rows = rows_of_layer(layers[0](view), blocks[0].num_dst, 0)
    for index in range(1, len(layers)):
        rows = known(rows, index - 1)
        view = one_hop(view, blocks[index], rows)  # of the view before: what a layer adds to it reaches the next
        rows = rows_of_layer(layers[index](view), blocks[index].num_dst, index)
    return rows


def _on_all_nodes(layers: list[Layer], batch: Data) -> Tensor:
    num_nodes, view = batch.num_nodes, copy.copy(batch)
    view.batch_size, view.x0 = num_nodes, batch.x
    for index, layer in enumerate(layers):
        view = copy.copy(view)
        view.x = rows_of_layer(layer(view), num_nodes, index)
    rows: Tensor = view.x[: batch.get("batch_size", num_nodes)]
    return rows


def rows_of_layer(rows: Tensor, num_rows: int, index: int) -> Tensor:
    """The first rows that layer ``index`` has returned; refuse fewer."""
    if len(rows) < num_rows:
        raise ValueError(
            f"Layer {index} of layers() returned {len(rows)} rows for a batch of {num_rows} nodes: it must return a "
            "row for each of the first batch.batch_size nodes."
        )
    return rows if len(rows) == num_rows else rows[:num_rows]
