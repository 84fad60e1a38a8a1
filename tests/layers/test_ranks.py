"""Evaluations by layers are those of one process on the whole graph, whatever the model, the ranks and their faults."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.seed_batch import SeedBatch
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import MODELS, Ready, Sage, graph_of, model, uneven_data, whole_rows
from tests.layers.test_lightning import DATA, VALIDATED, Average, Watch
from tests.ranks import run_ranks

OWN = [name for name in MODELS if not name.startswith("PyG")]  # which say what their layers are
SLOW = {"GAT", "PyG GAT", "PyG GIN", "PyG JK"}  # tried with several ranks in the slow tests alone
Found = list[tuple[float, dict[int, Tensor], set[str]]]


def data_module(where: str | None, kind: str, num_layers: int) -> Any:
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
        (metrics,) = trainer(world_size, strategy).test(module, data_module(where, kind, num_layers), verbose=False)
        found.append((metrics["accuracy"], module.rows, module.kinds))
    return found


def check(cases: list[tuple[str, int]], of_ranks: list[Found]) -> None:
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
    check(cases, found)
    for (name, _), (_, _, kinds) in zip(cases, found[0], strict=True):
        assert kinds == {"SeedBatch"} or (world_size == 1 and not name.startswith("PyG")), name


@pytest.mark.parametrize("world_size", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_rows_of_a_graph_in_files(world_size: int, tmp_path: Path) -> None:
    graph_of(uneven_data()).save(tmp_path / "graph")
    cases = [("SAGE", 3), ("APPNP", 3)]
    check(cases, run_ranks(evaluate, world_size, str(tmp_path / "graph"), "files", cases))


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
