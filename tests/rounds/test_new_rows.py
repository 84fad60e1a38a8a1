"""A fit goes on from a checkpoint on a larger graph, whose new nodes have the mean of the learned rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    EverySteps,
    Graph,
    GrappaStrategy,
    LazyAdam,
    LLCGStrategy,
    NeighborSampler,
    OwnedEmbedding,
    PartitionedDataModule,
    RandomPartitioner,
)
from lightning_gnn_dist.partition.joining import join_partition
from lightning_gnn_dist.rounds.new_rows import extend_checkpoint
from tests.data_fitting import trainer as trainer_of
from tests.every_strategy import PATIENCE
from tests.graph.changing.whole import WRITES, parted, typed, untyped
from tests.ranks import run_ranks

WIDTH, CLASSES = 3, 4


class Rows(pl.LightningModule):
    """Rows of nodes, or of authors, and what papers see of them."""

    def __init__(self, num_rows: int, num_features: int, *, owned: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = OwnedEmbedding(num_rows, WIDTH) if owned else nn.Embedding(num_rows, WIDTH, sparse=True)
        self.conv = SAGEConv((WIDTH, num_features), CLASSES)
        self.seen: dict[str, Tensor] = {}

    def training_step(self, batch: Any) -> Tensor:
        if isinstance(batch, HeteroData):
            rows = self.table(batch["author"].n_id), batch["paper"].x
            out, y = self.conv(rows, batch.edge_index_dict[WRITES]), batch["paper"].y
        else:
            out, y = self.conv((self.table(batch.n_id), batch.x.float()), batch.edge_index), batch.y
        return nn.functional.cross_entropy(out[: batch.batch_size], y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        """There is nothing to validate on."""

    def configure_optimizers(self) -> Any:
        return LazyAdam(self.parameters(), lr=0.05)


class Starts(pl.Callback):
    """Keeps the rows that a fit begins with, and their moments, of one process."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        ids = torch.arange(pl_module.table.num_embeddings)
        with torch.no_grad():
            pl_module.seen["rows"] = pl_module.table(ids).clone()
        for each in trainer.optimizers[0].state.values():
            if "exp_avg" in each and each["exp_avg"].shape == (len(ids), WIDTH):
                pl_module.seen["moments"] = each["exp_avg"].clone()


def graphs(*, has_types: bool) -> tuple[Graph, Graph, int, int, int]:
    """A graph and a later one; how many rows each needs, and how many features papers have."""
    if has_types:
        old, nodes, edges = parted(typed())
        graph = Graph.from_pyg(old)
        return graph, graph.extended(nodes, edges, ["editor"]), 12, 17, old["paper"].x.shape[1]
    graph = Graph.from_pyg(untyped())
    new = {"x": torch.ones(2, 3).double(), "y": torch.tensor([1, 2]), "train_mask": torch.tensor([True, True])}
    pairs = {"edge_index": torch.tensor([[40, 41, 3], [3, 40, 41]]), "edge_weight": torch.ones(3)}
    return graph, graph.extended(new, pairs), 40, 42, 3


def trainer(devices: int, strategy: Any, **options: Any) -> pl.Trainer:
    return trainer_of(devices, strategy, limit_val_batches=0, **options)


def strategy(name: str) -> Any:
    return GrappaStrategy(**PATIENCE) if name == "grappa" else LLCGStrategy(EverySteps(3), **PATIENCE)


def goes_on(rank: int, world_size: int, name: str, has_types: bool, owned: bool, folder: str) -> dict[str, Tensor]:
    graph, later, few, many, width = graphs(has_types=has_types)
    how: dict[str, Any] = {"partitioner": RandomPartitioner(), "sampler": NeighborSampler([4]), "batch_size": 5}
    module, first = Rows(few, width, owned=owned), trainer(world_size, strategy(name))
    first.fit(module, PartitionedDataModule(graph, **how))
    first.save_checkpoint(f"{folder}/last.ckpt")
    module, fit = (
        Rows(many, width, owned=owned),
        trainer(world_size, strategy(name), max_epochs=4, callbacks=[Starts()]),
    )
    if rank == 0:
        assert extend_checkpoint(f"{folder}/last.ckpt", f"{folder}/larger.ckpt", module) == {"table.weight": many - few}
    first.strategy.barrier()
    how["partitioner"] = join_partition(RandomPartitioner()(graph, world_size, 0), later)
    fit.fit(module, PartitionedDataModule(later, **how), ckpt_path=f"{folder}/larger.ckpt")
    assert fit.current_epoch == 4
    return module.seen | {"after": module.state_dict()["table.weight"].detach().clone()}


@pytest.mark.parametrize(
    ("name", "has_types", "owned"),
    [
        ("grappa", True, False),
        ("llcg", False, False),
        pytest.param("grappa", False, False, marks=pytest.mark.slow),
        pytest.param("llcg", True, False, marks=pytest.mark.slow),
        *(
            pytest.param(name, has_types, True, marks=pytest.mark.slow)
            for name in ("grappa", "llcg")
            for has_types in (False, True)
        ),
    ],
)
def test_training_goes_on_on_a_larger_graph(name: str, has_types: bool, owned: bool, tmp_path: Path) -> None:
    one, other = run_ranks(goes_on, 2, name, has_types, owned, str(tmp_path), timeout=60)
    saved = torch.load(tmp_path / "last.ckpt")
    rows = saved["state_dict"]["table.weight"]
    many = {False: 42, True: 17}[has_types]
    expected = torch.cat([rows, rows.mean(0, keepdim=True).repeat(many - len(rows), 1)])
    assert torch.allclose(one["rows"], expected, rtol=0, atol=1e-7) and one["rows"].equal(other["rows"])
    if not owned:
        (moments,) = [
            e["exp_avg"] for e in saved["optimizer_states"][0]["state"].values() if e["exp_avg"].shape == rows.shape
        ]
        assert one["moments"][: len(rows)].equal(moments) and not one["moments"][len(rows) :].any()
        assert moments.any()
    assert one["after"].equal(other["after"])
    moved = (one["after"] != one["rows"]).any(1)
    assert moved[: len(rows)].any() and moved[len(rows) :].any()


def test_rows_that_are_missing_are_refused(tmp_path: Path) -> None:
    graph, later, few, many, width = graphs(has_types=False)
    how: dict[str, Any] = {"sampler": NeighborSampler([4]), "batch_size": 5}
    fit = trainer(1, GrappaStrategy(**PATIENCE))
    fit.fit(Rows(few, width, owned=False), PartitionedDataModule(graph, **how))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    again = trainer(1, GrappaStrategy(**PATIENCE), max_epochs=4)
    with pytest.raises(
        ValueError, match=r"table.weight has 40 rows in the checkpoint and 42 in the model: .*extend_ch"
    ):
        again.fit(Rows(many, width, owned=False), PartitionedDataModule(later, **how), ckpt_path=tmp_path / "last.ckpt")
    for rows, says in ((few, "no table with more rows"), (few - 1, "module has 39 rows")):
        with pytest.raises(ValueError, match=says):
            extend_checkpoint(tmp_path / "last.ckpt", tmp_path / "out.ckpt", Rows(rows, width, owned=False))
    assert not (tmp_path / "out.ckpt").exists()
