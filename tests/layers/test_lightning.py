"""Evaluation layer by layer as Lightning runs it: always today's rows, and nothing stays of it."""

import copy
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

import lightning_gnn_dist as lgd
from lightning_gnn_dist import Evaluation, Graph, NeighborSampler, PartitionedDataModule, PredictionWriter
from lightning_gnn_dist.batches.seed_batch import SeedBatch
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import MODELS, NUM_CLASSES, Layered, Ready, Sage, graph_of, model, uneven_data, whole_rows
from tests.ranks import run_ranks

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


# Evaluations by layers are those of one process on the whole graph, whatever the model, the ranks and their faults.


OWN = [name for name in MODELS if not name.startswith("PyG")]  # which say what their layers are
SLOW = {"GAT", "PyG GAT", "PyG GIN", "PyG JK"}  # tried with several ranks in the slow tests alone
Found = list[tuple[float, dict[int, Tensor], set[str]]]


def module_in(where: str | None, kind: str, num_layers: int) -> Any:
    options: dict[str, Any] = {"sampler": lgd.NeighborSampler([3] * num_layers), "batch_size": 7}
    if kind == "shards":
        return lgd.PartitionedDataModule(where, **options)
    graph = graph_of(uneven_data()) if kind == "RAM" else lgd.Graph.open(where)
    return lgd.PartitionedDataModule(graph, partitioner=lgd.RandomPartitioner(), **options)


def evaluate(rank: int, world_size: int, where: str, kind: str, cases: list[tuple[str, int]]) -> Found:
    found = []
    for name, num_layers in cases:
        module = model(name, num_layers)
        strategy = lgd.GrappaStrategy(**PATIENCE) if world_size > 1 else "auto"
        (metrics,) = trainer(world_size, strategy).test(module, module_in(where, kind, num_layers), verbose=False)
        found.append((metrics["accuracy"], module.rows, module.kinds))
    return found


def check_cases(cases: list[tuple[str, int]], of_ranks: list[Found]) -> None:
    data = uneven_data()
    for case, (name, num_layers) in enumerate(cases):
        expected = whole_rows(model(name, num_layers), data)
        accuracy = float((expected.argmax(1) == data.y)[data.test_mask].double().mean())
        rows = {node: row for found in of_ranks for node, row in found[case][1].items()}
        assert sorted(rows) == data.test_mask.nonzero().view(-1).tolist()
        for node, row in rows.items():
            assert torch.allclose(row, expected[node], rtol=0, atol=1e-12), (name, num_layers, node)
        for found in of_ranks:
            assert found[case][0] == pytest.approx(accuracy, abs=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_are_those_of_the_whole_graph(world_size: int) -> None:
    check_models(world_size, [(name, 3) for name in OWN if world_size == 1 or name not in SLOW])


def check_models(world_size: int, cases: list[tuple[str, int]]) -> None:
    found = run_ranks(evaluate, world_size, "", "RAM", cases)
    check_cases(cases, found)
    for (name, _), (_, _, kinds) in zip(cases, found[0], strict=True):
        assert kinds == {"SeedBatch"} or (world_size == 1 and not name.startswith("PyG")), name


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_a_graph_in_files(world_size: int, tmp_path: Path) -> None:
    graph_of(uneven_data()).save(tmp_path / "graph")
    cases = [("SAGE", 3), ("APPNP", 3)]
    check_cases(cases, run_ranks(evaluate, world_size, str(tmp_path / "graph"), "files", cases))


def data_of(data: Any = DATA, **options: Any) -> lgd.PartitionedDataModule:
    options = {"partitioner": lgd.RandomPartitioner(), "evaluation": lgd.Evaluation(batch_size=2)} | options
    return lgd.PartitionedDataModule(graph_of(data), sampler=lgd.NeighborSampler([3, 3]), batch_size=7, **options)


class WatchMetrics(Watch):
    """Compares the metrics too, which are of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = 0

    def on_validation_batch_end(self, trainer: Any, module: Any, *batch: Any) -> None:
        super().on_validation_batch_end(trainer, module, *batch)
        right = whole_rows(module, DATA).argmax(1) == DATA.y
        self.accuracy = float(right[VALIDATED].double().mean())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            assert float(trainer.callback_metrics["accuracy"]) == pytest.approx(self.accuracy)
            self.metrics += 1


def fits(rank: int, world_size: int, made: Any) -> list[Any]:
    found = []
    for strategy in (lgd.LLCGStrategy(lgd.EverySteps(3), **PATIENCE), lgd.GrappaStrategy(**PATIENCE)):
        torch.manual_seed(0)  # weights that are averaged are copied before ranks have made theirs equal
        watch, module = WatchMetrics(), made()
        average = [Average()] if isinstance(strategy, lgd.GrappaStrategy) and isinstance(module, Ready) else []
        run = trainer(world_size, copy.deepcopy(strategy), callbacks=[*average, watch], num_sanity_val_steps=1)
        run.fit(module, data_of())
        patched = sorted({name for names in watch.patched for name in names})
        found.append((watch.checked, watch.metrics, module.kinds, patched))
    return found


def two_layers() -> Any:
    return Sage(2).double()


def test_fits_validate_the_weights_of_their_time() -> None:
    check_fits(run_ranks(fits, 2, two_layers))


def check_fits(found: list[Any]) -> None:
    for of_ranks in zip(*found, strict=True):
        assert sum(checked for checked, *_ in of_ranks) == 2 * 11 + 3
        assert [metrics for _, metrics, *_ in of_ranks] == [2, 2]
        assert [patched for *_, patched in of_ranks] == [[], []]
        assert [kinds for *_, kinds, _ in of_ranks] == [{"SeedBatch"}] * 2


def unequal(rank: int, world_size: int) -> list[str]:
    torch.manual_seed(0)
    module, kinds = Sage(2).double(), []
    run, data = trainer(world_size, lgd.GrappaStrategy(**PATIENCE)), data_of()
    for mean in (0.0, float(rank), 0.0):  # of a buffer that ranks keep for themselves

        def set_mean(mean: float = mean) -> None:
            module.norm.running_mean.fill_(mean)

        module.on_test_start = set_mean  # after the strategy has made replicas equal
        module.rows.clear(), module.kinds.clear()
        run.test(module, data, verbose=False)
        kinds += module.kinds
        expected = whole_rows(module, DATA)
        assert all(torch.allclose(row, expected[node], atol=1e-12) for node, row in module.rows.items())
    return kinds


def test_ranks_with_unequal_models_evaluate_each_its_own() -> None:
    assert run_ranks(unequal, 2) == [["SeedBatch", "SampledData", "SeedBatch"]] * 2


def never_asked(rank: int, world_size: int) -> list[str]:
    """A module that uses its model in another way, and one of whose ranks looks at the edges of a batch."""

    class Other(Sage):
        def forward(self, batch: Any) -> Tensor:
            if rank == 0 and isinstance(batch, SeedBatch):
                assert batch.edge_index.shape[1]
            return self.whole(batch.x, batch.edge_index)[: batch.batch_size]

    module = Other(2).double()
    run, data = trainer(world_size, lgd.GrappaStrategy(**PATIENCE)), data_of()
    run.fit(module, data)
    kinds = sorted(module.kinds)
    expected = whole_rows(module, DATA)
    assert all(torch.allclose(row, expected[node], atol=1e-12) for node, row in module.rows.items())
    return kinds


def test_ranks_agree_that_nobody_asks() -> None:
    assert run_ranks(never_asked, 2) == [["SampledData", "SeedBatch"]] * 2
