"""With a precision that ends in "-true" batches come in the type that the model computes in, and its layers run."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from tests.sage import SAGE

GRAPH = communities(300, 3, num_features=8)
QUIET: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
QUIET["enable_model_summary"] = False


class Watched(SAGE):
    """Says what types its batches have."""

    def __init__(self, **options: Any) -> None:
        super().__init__(8, 3, **options)
        self.types: set[torch.dtype] = set()

    def forward(self, batch: Any) -> Tensor:
        adj = batch.blocks[0].adj
        self.types |= {batch.x.dtype, batch.edge_weight.dtype, adj.dtype, batch.blocks[-1].weighted_adj.dtype}
        assert batch.y.dtype == torch.int64
        return super().forward(batch)


def trained(precision: Any, sampler: Sampler, *, dtype: torch.dtype = torch.float32, blocks: bool = True) -> Watched:
    weights = {"edge_weight": torch.ones(GRAPH.num_edges)}
    x = GRAPH.node_arrays["x"].to(dtype)
    graph = Graph(GRAPH.indptr, GRAPH.indices, {**GRAPH.node_arrays, "x": x}, weights)
    data = PartitionedDataModule(graph, sampler=sampler, batch_size=50)
    pl.seed_everything(0, verbose=False)
    model = Watched(blocks=blocks)
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, precision=precision, **QUIET)
    trainer.fit(model, data)
    trainer.predict(model, data)
    for batch in data.correction_batches(0, stop=1):
        model(batch)
    return model


@pytest.mark.parametrize("sampler", [NeighborSampler([4, 3]), WholePartSampler(2)], ids=repr)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64), ("bf16-true", torch.bfloat16)]
)
def test_batches_have_the_type_of_the_precision(precision: str, dtype: torch.dtype, sampler: Sampler) -> None:
    assert trained(precision, sampler, blocks=dtype != torch.bfloat16).types == {dtype}


def test_features_of_either_type_train_the_same_in_float64() -> None:
    narrow, wide = (trained("64-true", NeighborSampler([4, 3]), dtype=t) for t in (torch.float32, torch.float64))
    for one, other in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert one.equal(other)


def test_sparse_layers_take_mixed_precision() -> None:
    on_blocks, on_edges = (trained("bf16-mixed", NeighborSampler([4, 3]), blocks=blocks) for blocks in (True, False))
    for one, other in zip(on_blocks.parameters(), on_edges.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)  # of sums that are rounded elsewhere
