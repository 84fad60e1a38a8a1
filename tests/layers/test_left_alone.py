"""What a layer-by-layer evaluation leaves to full neighbourhoods, and what stays of it: nothing."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ProgressBar, TQDMProgressBar
from torch import Tensor, nn
from torch_geometric.nn import GCN, GIN, GraphSAGE, SAGEConv

from lightning_gnn_dist import Evaluation, Graph, PartitionedDataModule, PredictionWriter
from lightning_gnn_dist.batches.seed_batch import SeedBatch
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.layers import layered_loader
from tests.data_fitting import trainer
from tests.layers.models import NUM_CLASSES, Layered, Ready, Sage, graph_of, whole_rows
from tests.layers.test_lightning import DATA, TESTED, Gnn, check, data_module, in_batches, rows_of_test


def test_a_module_in_training_is_evaluated_on_full_neighbourhoods():
    class Trained(Gnn):
        def on_test_start(self) -> None:
            self.gnn.dropout.train()

    module = Trained()
    rows_of_test(module)
    assert module.kinds == {"SampledData"}


def test_a_step_that_goes_into_training_draws_every_time():
    class Drawn(Gnn):
        def test_step(self, batch: Any) -> None:
            once = self(batch)
            self.train()
            drawn = [self(batch) for _ in range(5)]
            self.eval()
            assert len({float(rows.sum()) for rows in drawn}) > 1
            torch.testing.assert_close(self(batch), once, atol=1e-12, rtol=0)  # of the batch, and of the pass
            super().test_step(batch)

    module = Drawn()
    check(rows_of_test(module), whole_rows(module, DATA))


@pytest.mark.filterwarnings("ignore:You have overridden `on_after_batch_transfer`")
@pytest.mark.parametrize("where", ["module", "data module"])
def test_hooks_of_batches_hold_for_layers_too(where):
    def changed(self: Any, batch: Any, dataloader_idx: int) -> Any:
        batch.more = 2.0
        return batch

    class More(Sage):
        def layers(self) -> Any:
            first, last = super().layers()
            return [lambda batch: first(batch) * batch.more, last]

    hook = {"on_after_batch_transfer": changed}
    data, module = in_batches(), More(2).double()
    if where == "module":
        module.__class__ = type("Hooked", (More,), hook)
    else:
        data.__class__ = type("Hooked", (PartitionedDataModule,), hook)
    rows_of_test(module, data)
    assert module.kinds == {"SampledData"}


def test_a_watched_model_is_not_passed():
    seen = []
    module = Gnn()
    module.gnn.convs[0].register_forward_hook(lambda *_: seen.append(0))
    check(rows_of_test(module), whole_rows(module, DATA))
    assert seen and module.kinds == {"SampledData"}


class Encoded(Gnn):
    """A model of PyG's that takes what an encoder makes of the features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.encoder = nn.Linear(DATA.num_features, 9)
        self.gnn = GraphSAGE(num_features, 8, num_layers=2, out_channels=NUM_CLASSES)
        self.double()

    def forward(self, batch: Any) -> Tensor:
        return self.gnn(self.encoder(batch.x), batch.edge_index)[: batch.batch_size]

    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.gnn(self.encoder(x), edge_index)


@pytest.mark.parametrize("num_features", [9, -1], ids=["built", "lazy"])
def test_a_model_that_takes_other_rows_than_the_graphs_is_evaluated_on_batches(num_features):
    module = Encoded(num_features)
    rows = rows_of_test(module)
    check(rows, whole_rows(module, DATA))
    assert module.kinds == {"SampledData"}


def test_a_graph_without_features_is_evaluated_on_batches():
    class Embedded(Encoded):
        def __init__(self) -> None:
            super().__init__(9)
            self.ids = nn.Embedding(DATA.num_nodes, 9).double()

        def forward(self, batch: Any) -> Tensor:
            return self.gnn(self.ids(batch.n_id), batch.edge_index)[: batch.batch_size]

        def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
            return self.gnn(self.ids.weight, edge_index)

    module, data = Embedded(), DATA.clone()
    data.num_nodes = DATA.num_nodes
    del data.x
    batches = data_module(Graph.from_pyg(data), evaluation=Evaluation(batch_size=7))
    check(rows_of_test(module, batches), whole_rows(module, DATA))


@pytest.mark.parametrize("made", [lambda: Sage(2).double(), Gnn], ids=["layers", "PyG"])
def test_after_an_exception_everything_works_again(made):
    class Broken(RuntimeError):
        pass

    module, data, run, kept = made(), in_batches(), trainer(1), []
    step = type(module).test_step

    def broken(batch: Any) -> None:
        raise Broken

    module.test_step = broken
    try:
        run.test(module, data, verbose=False)
    except Broken as error:
        kept.append(error)  # with all its frames
    del module.test_step
    assert type(module).test_step is step
    check(rows_of_test(module, data), whole_rows(module, DATA))
    run.test(module, data, verbose=False)
    kept.clear()
    gc.collect()
    assert not any("forward" in child.__dict__ for child in module.modules())
    check(rows_of_test(module, data), whole_rows(module, DATA))


def test_one_data_module_serves_two_models_and_two_trainers():
    data, first, second = in_batches(), trainer(1), trainer(1)
    sage, gnn = Sage(2).double(), Gnn()
    for run in (first, second, first):
        for module in (sage, gnn, sage):
            module.rows.clear()
            run.test(module, data, verbose=False)
            check(module.rows, whole_rows(module, DATA))


def test_two_loaders_of_one_evaluation():
    class Both(Gnn):
        def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int) -> None:  # type: ignore[override]
            assert isinstance(batch, SeedBatch)
            self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), self(batch), strict=True))

    class Loaders(PartitionedDataModule):
        def test_dataloader(self) -> Any:
            return [super().test_dataloader(), self.val_dataloader()]

    module, data = Both(), in_batches()
    data.__class__ = Loaders
    nodes = (DATA.test_mask | DATA.val_mask).nonzero().view(-1).tolist()
    check(rows_of_test(module, data), whole_rows(module, DATA), nodes)
    assert "forward" not in module.gnn.__dict__


def test_a_kept_batch_can_be_read_after_the_evaluation():
    class Keeps(Gnn):
        def test_step(self, batch: Any) -> None:
            self.last = batch, self.gnn(batch.x, batch.edge_index)

    module = Keeps()
    trainer(1).test(module, in_batches(), verbose=False)
    batch, rows = module.last
    nodes = batch.n_id[: batch.batch_size]
    assert batch.y[: batch.batch_size].equal(DATA.y[nodes])
    assert torch.allclose(rows[: batch.batch_size], whole_rows(module, DATA)[nodes], atol=1e-12)
    assert batch.x.equal(DATA.x[batch.n_id])
    assert torch.allclose(rows.detach()[: batch.batch_size], whole_rows(module, DATA)[nodes], atol=1e-12)


@pytest.mark.parametrize("made", [lambda: Sage(2).double(), Gnn], ids=["layers", "PyG"])
def test_predictions_are_those_of_the_whole_graph(made, tmp_path):
    class Predicts(type(made())):  # type: ignore[misc]
        def predict_step(self, batch: Any) -> Tensor:
            self.kinds.add(type(batch).__name__)
            return self(batch)

    module = made()
    module.__class__ = Predicts
    expected = whole_rows(module, DATA)
    writer = PredictionWriter(tmp_path / "rows.npy")
    found = trainer(1).predict(module, in_batches())
    assert torch.allclose(torch.cat(found), expected, rtol=0, atol=1e-12)
    trainer(1, callbacks=[writer]).predict(module, in_batches(), return_predictions=False)
    assert np.allclose(np.load(tmp_path / "rows.npy"), expected.numpy(), rtol=0, atol=1e-6)
    assert module.kinds == {"SeedBatch"}


def test_nodes_without_features():
    class Embedded(Layered):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(DATA.num_nodes, 4)
            self.convs = nn.ModuleList([SAGEConv(4, 4), SAGEConv(4, NUM_CLASSES)])

        def layers(self) -> Any:
            return [
                lambda batch: self.convs[0](self.table(batch.n_id), batch.edge_index).relu(),
                lambda batch: self.convs[1](batch.x, batch.edge_index),
            ]

    torch.manual_seed(0)
    module, data = Embedded().double(), DATA.clone()
    del data.x
    whole = in_batches(graph_of(data))
    rows = rows_of_test(module, whole)
    assert module.kinds == {"SeedBatch"}
    with torch.no_grad():
        h = module.convs[0](module.table.weight, DATA.edge_index).relu()
        check(rows, module.convs[1](h, DATA.edge_index))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("kind", [GCN, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (GraphSAGE, GIN))])
def test_narrow_features_are_widened(dtype, kind, tmp_path):
    data = DATA.clone()
    if dtype == "int8":
        data.x, data.x_scale = quantize_rows(data.x.float())
        graph_of(data).save(tmp_path / "graph")
        graph = Graph.open(tmp_path / "graph")
    else:
        data.x = data.x.to(getattr(torch, dtype))
        graph = graph_of(data)
    torch.manual_seed(0)
    module = Ready(kind, 2)
    whole = in_batches(graph)
    rows = rows_of_test(module, whole)
    assert module.kinds == {"SeedBatch"}
    x = data.x.float()
    if dtype == "int8":
        x = data.x.float() * data.x_scale.view(-1, 1)
    expected = module.eval().whole(x, DATA.edge_index).detach()
    assert torch.allclose(torch.stack([rows[node] for node in TESTED]), expected[TESTED], atol=1e-5)


@pytest.mark.parametrize("made", [lambda: Sage(2), lambda: Ready(GraphSAGE, 2)], ids=["layers", "PyG"])
def test_mixed_precision(made):
    data = DATA.clone()
    data.x = data.x.float()
    torch.manual_seed(0)
    module = made()
    whole = in_batches(graph_of(data))
    rows = rows_of_test(module, whole, precision="bf16-mixed")
    assert module.kinds == {"SeedBatch"}
    assert {row.dtype for row in rows.values()} == {torch.bfloat16}
    expected = module.eval().whole(data.x, DATA.edge_index).detach()
    assert torch.allclose(torch.stack([rows[node] for node in TESTED]).float(), expected[TESTED], atol=0.05)


class OwnBar(ProgressBar):
    """Another bar than Lightning's own one, such as the one of rich."""


@pytest.mark.parametrize(("bar", "seconds"), [(TQDMProgressBar, 0.0), (TQDMProgressBar, 600.0), (OwnBar, 0.0)])
def test_a_bar_shows_a_long_pass_beside_no_bar_of_another_kind(bar, seconds, capfd, monkeypatch):
    monkeypatch.setattr(layered_loader, "_SECONDS_UNSEEN", seconds)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", callbacks=[bar()], **quiet).test(Gnn(), in_batches(), verbose=False)
    shown = capfd.readouterr()
    lines = [line for line in (shown.out + shown.err).replace("\r", "\n").split("\n") if "Layers" in line]
    assert all("rows" in line for line in lines)
    assert bool(lines) == (bar is TQDMProgressBar and not seconds)


def test_nothing_stays_of_many_evaluations(tmp_path):
    graph_of(DATA).save(tmp_path / "graph")
    module, run = Gnn(), trainer(1)
    evaluation = Evaluation(batch_size=2, bytes=16 << 20)
    data = data_module(evaluation=evaluation)
    run.test(module, data, verbose=False)
    gc.collect()
    handles, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    files = sorted(Path(tmp_path).rglob("*"))
    for _ in range(8):
        run.test(module, data, verbose=False)
    assert len(os.listdir("/proc/self/fd")) <= handles and threading.active_count() <= threads
    assert sorted(Path(tmp_path).rglob("*")) == files


def test_rows_are_gone_with_the_last_batch():
    tables: list[Any] = []

    class Notes(Gnn):
        def test_step(self, batch: Any) -> None:
            super().test_step(batch)
            tables.append(weakref.ref(batch.neighbourhood))

        def on_test_epoch_end(self) -> None:
            self.alive = [table() is not None for table in tables[:-1]]

        def on_test_end(self) -> None:
            self.patched = "forward" in self.gnn.__dict__

    module = Notes()
    trainer(1, limit_test_batches=3).test(module, in_batches(), verbose=False)
    assert module.alive == [False, False]
    assert "forward" not in module.gnn.__dict__


def test_a_loader_that_is_read_outside_of_an_evaluation_makes_no_pass():
    module, data, run = Gnn(), in_batches(), trainer(1)
    run.test(module, data, verbose=False)
    data.setup("test")
    batches = list(data.test_dataloader())
    assert not any(isinstance(batch, SeedBatch) for batch in batches)
    data.teardown("test")
