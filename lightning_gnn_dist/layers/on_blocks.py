"""One of PyG's ready-made models on the blocks of a batch, in one line."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.part_batch import OfPart
from lightning_gnn_dist.checks import check_instance, shown
from lightning_gnn_dist.layers.definition import Layer
from lightning_gnn_dist.layers.ready_made import layers_of, with_degrees
from lightning_gnn_dist.layers.through_layers import through_layers


def on_blocks(gnn: BasicGNN, batch: Data, *, edge_weight: str | None = None, edge_attr: str | None = None) -> Tensor:
    """Run one of PyG's ready-made models on a batch, and return a row for each seed.

        class Net(pl.LightningModule):
            def forward(self, batch):
                return on_blocks(self.gnn, batch)  # in the place of self.gnn(batch.x, batch.edge_index)

    The rows are those of ``gnn(batch.x, batch.edge_index)[: batch.batch_size]``, computed on ``batch.blocks``, which
    leave out what no seed needs. In training two things differ, as with :func:`layers_of`: a ``BatchNorm`` sees the
    rows that are needed, and dropout draws other numbers. A module that defines ``layers`` has the same speed, and is
    also evaluated and predicted layer by layer.

    Args:
        gnn: ``GraphSAGE``, ``GCN``, ``GIN``, ``GAT``, ``PNA`` or ``EdgeCNN``.
        batch: A batch of any sampler or loader, or a whole graph as ``Data``.
        edge_weight: Name of the batch's array that ``gnn`` takes as ``edge_weight``. Default: none.
        edge_attr: Name of the batch's array that ``gnn`` takes as ``edge_attr``. Default: none.
    """
    layers = layers_of(gnn, edge_weight=edge_weight, edge_attr=edge_attr)
    check_instance("batch", batch, Data, "a batch of a loader, or a torch_geometric.data.Data")
    if not isinstance(batch, OfPart):  # its layers check the edges of the part
        _check_edges(batch, edge_weight=edge_weight, edge_attr=edge_attr)
    if isinstance(batch, SampledData):
        batch = with_degrees(layers, batch)
    rows: Tensor = through_layers(_Layered(layers), batch)
    return rows


def _check_edges(batch: Data, **names: str | None) -> None:
    for argument, name in names.items():
        rows = None if name is None else batch.get(name)
        if name is not None and (not isinstance(rows, Tensor) or not rows.dim() or len(rows) != batch.num_edges):
            raise ValueError(
                f"{argument} must name an array of the batch with a row for each of its {batch.num_edges} edges, got "
                f"{shown(name)}."
            )


@dataclass(frozen=True)
class _Layered:
    """Layers as the method that :func:`through_layers` asks for."""

    known: list[Layer]

    def layers(self) -> list[Layer]:
        return self.known
