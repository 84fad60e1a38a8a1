"""Evaluation layer by layer as Lightning runs it: always today's rows, and nothing stays of it."""

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, WeightAveraging
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Evaluation, Graph, NeighborSampler, PartitionedDataModule, PredictionWriter
from lightning_gnn_dist.batches.seed_batch import SeedBatch
from tests.data_fitting import trainer
from tests.layers.models import NUM_CLASSES, Layered, Sage, graph_of, uneven_data, whole_rows

DATA = uneven_data()
TESTED = DATA.test_mask.nonzero().view(-1).tolist()
VALIDATED = DATA.val_mask.nonzero().view(-1).tolist()


def data_module(graph: Graph | None = None, **options: Any) -> PartitionedDataModule:
    return PartitionedDataModule(
        graph_of(DATA) if graph is None else graph, sampler=NeighborSampler([3, 3]), batch_size=7, **options
    )


def in_batches(graph: Graph | None = None) -> PartitionedDataModule:
    """In so many batches of full neighbourhoods that layers cost less."""
    return data_module(graph, evaluation=Evaluation(batch_size=2))


def sage() -> Any:
    torch.manual_seed(7)
    return Sage(2).double()


def rows_of_test(module: Any, data: Any = None, **options: Any) -> dict[int, Tensor]:
    trainer(1, **options).test(module, data or in_batches(), verbose=False)
    return module.rows


def check(rows: dict[int, Tensor], expected: Tensor, nodes: list[int] = TESTED) -> None:
    assert sorted(rows) == nodes
    found = torch.stack([rows[node] for node in nodes]).to(expected.dtype)
    assert torch.allclose(found, expected[nodes], rtol=0, atol=1e-12), (found - expected[nodes]).abs().max()


class Watch(Callback):
    """Notes the whole graph's rows of the weights that a validation sees, and what a fit finds in the model."""

    def __init__(self) -> None:
        self.checked, self.patched = 0, []

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, *_: Any) -> None:
        module.rows.clear()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, *_: Any) -> None:
        expected = whole_rows(module, DATA)
        found = module.rows
        assert len(found) == batch.batch_size
        for node, row in found.items():
            assert torch.allclose(row, expected[node], rtol=0, atol=1e-12)
        self.checked += len(found)

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        children = [
            (name, child) for name, child in module.named_modules() if name
        ]  # Lightning leaves one in the module
        self.patched.append([name for name, child in children if "forward" in child.__dict__])


def watched(made: Any, **options: Any) -> int:
    """Fit a module in three epochs; return how many rows of validations were seen to be those of the whole graph."""
    watch, module = Watch(), made().double()
    callbacks = [*options.pop("callbacks", ()), watch]
    trainer(1, max_epochs=3, callbacks=callbacks, **options).fit(module, in_batches())
    assert module.kinds == {"SeedBatch"}
    assert watch.patched and not any(watch.patched)
    return watch.checked


TIMES: list[tuple[dict[str, Any], int]] = [
    ({}, 3 * 11),
    ({"num_sanity_val_steps": 1, "limit_val_batches": 1}, 4 * 1),
    ({"num_sanity_val_steps": 2, "val_check_interval": 2}, 3 + 3 * 3 * 11),
    ({"limit_val_batches": 0.5, "check_val_every_n_epoch": 3}, 5),
]


@pytest.mark.parametrize(("options", "times"), TIMES, ids=str)
def test_every_validation_of_a_fit_sees_the_weights_of_its_time(options: dict[str, Any], times: int) -> None:
    assert watched(sage, **options) == times


class Average(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(multi_avg_fn=None)

    def should_update(self, step_idx: Any = None, epoch_idx: Any = None) -> bool:
        return step_idx is not None


def test_averaged_weights_are_evaluated() -> None:
    assert watched(sage, num_sanity_val_steps=1, callbacks=[Average()]) == 3 * 11 + 1


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


def works_after_an_exception(made: Any) -> None:
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


def test_predictions_are_those_of_the_whole_graph(tmp_path: Path) -> None:
    class Predicts(Sage):
        def predict_step(self, batch: Any) -> Tensor:
            self.kinds.add(type(batch).__name__)
            return self(batch)

    torch.manual_seed(7)
    module = Predicts(2).double()
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


def test_mixed_precision() -> None:
    data = DATA.clone()
    data.x = data.x.float()
    torch.manual_seed(0)
    module, whole = Sage(2), in_batches(graph_of(data))
    rows = rows_of_test(module, whole, precision="bf16-mixed")
    assert module.kinds == {"SeedBatch"}
    assert {row.dtype for row in rows.values()} == {torch.bfloat16}
    expected = module.eval().whole(data.x, DATA.edge_index).detach()
    assert torch.allclose(torch.stack([rows[node] for node in TESTED]).float(), expected[TESTED], atol=0.05)


def test_after_an_exception_everything_works_again() -> None:
    works_after_an_exception(sage)


def test_rows_are_gone_with_the_last_batch():
    tables: list[Any] = []

    class Notes(Sage):
        def test_step(self, batch: Any) -> None:
            super().test_step(batch)
            tables.append(weakref.ref(batch.neighbourhood))

        def on_test_epoch_end(self) -> None:
            self.alive = [table() is not None for table in tables[:-1]]

    module = Notes(2).double()
    trainer(1, limit_test_batches=3).test(module, in_batches(), verbose=False)
    assert module.alive == [False, False]


def test_a_loader_that_is_read_outside_of_an_evaluation_makes_no_pass():
    module, data, run = sage(), in_batches(), trainer(1)
    run.test(module, data, verbose=False)
    data.setup("test")
    batches = list(data.test_dataloader())
    assert not any(isinstance(batch, SeedBatch) for batch in batches)
    data.teardown("test")
