"""Graphs without features from end to end: training, exact evaluation, boundaries, shards, and types."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GraphSAGE, SAGEConv

from lightning_gnn_dist import (
    EverySteps,
    Exchange,
    Graph,
    GrappaStrategy,
    History,
    LazyAdam,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    WholePartSampler,
    citations,
    save_shards,
    through_layers,
)
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import NUM_CLASSES, Judged, graph_of, uneven_data
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import differs
from tests.tables.fitting import Made, state_of

WIDTH = 4


class Rows(Judged):
    """Two SAGE layers on learned rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(uneven_data().num_nodes, WIDTH, sparse=True)
        self.convs = nn.ModuleList([SAGEConv(WIDTH, 5), SAGEConv(5, NUM_CLASSES)])
        self.double()

    def layer(self, number: int, x: Tensor, block: Any) -> Tensor:
        x = self.convs[number]((x, x[: block.num_dst]), block.edge_index)
        return x.relu() if number == 0 else x

    def forward(self, batch: Any) -> Tensor:
        x = self.table(batch.n_id)
        for number, block in enumerate(batch.blocks):
            x = self.layer(number, x, block)
        return x

    def predict_step(self, batch: Any) -> Tensor:
        out = self(batch)
        self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), out.detach().clone(), strict=True))
        return out

    def whole(self) -> Tensor:
        x, edge_index = self.table.weight, uneven_data().edge_index
        return self.convs[1](self.convs[0](x, edge_index).relu(), edge_index)

    def configure_optimizers(self) -> Any:
        return LazyAdam(self.parameters(), lr=0.05)


class ByLayer(Rows):
    """The same, layer by layer."""

    def layers(self) -> Any:
        return [
            lambda batch: self.layer(0, self.table(batch.n_id), batch.blocks[0]),
            lambda batch: self.layer(1, batch.x, batch.blocks[0]),
        ]

    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)


class OfPyG(Rows):
    """A model of PyG's on learned rows."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = GraphSAGE(WIDTH, 5, 2, NUM_CLASSES).double()

    def forward(self, batch: Any) -> Tensor:
        return self.convs(self.table(batch.n_id), batch.edge_index)[: batch.batch_size]

    def whole(self) -> Tensor:
        return self.convs(self.table.weight, uneven_data().edge_index)


def bare_graph() -> Graph:
    graph = graph_of(uneven_data())
    arrays = {name: array for name, array in graph.node_arrays.items() if name != "x"}
    return Graph(graph.indptr, graph.indices, arrays)


def data_module(**options: Any) -> PartitionedDataModule:
    options = {"sampler": NeighborSampler([3, 3]), "batch_size": 7} | options
    return PartitionedDataModule(bare_graph(), partitioner=RandomPartitioner(), **options)


def errors_of_rows(fitted: Any, module: Any, data: Any, whole: Callable[[], Tensor]) -> list[float]:
    """The error of each row in validation, test and prediction, given what the rows of all nodes are after each."""
    errors = []
    for run in (fitted.validate, fitted.test, fitted.predict):
        module.rows = {}
        more = {"return_predictions": False} if run == fitted.predict else {"verbose": False}
        run(module, data, **more)
        with torch.no_grad():
            expected = whole()
        errors += [float((expected[node] - row).abs().max()) for node, row in module.rows.items()]
    return errors


def evaluated(rank: int, world_size: int, kinds: list[Any], options: dict[str, Any]) -> list[Any]:
    """For each kind of model the largest error of a row, in validation, test and prediction."""
    found = []
    for kind in kinds:
        module, data = kind(), data_module(**options)
        fitted = trainer(world_size, LocalSGDStrategy(EverySteps(2), **PATIENCE))
        fitted.fit(module, data)
        errors = errors_of_rows(fitted, module, data, module.whole)
        found.append((max(errors), len(errors), state_of(module)))
    return found


def test_evaluation_and_prediction_are_exact() -> None:
    for first, second in zip(*run_ranks(evaluated, 2, [Rows, ByLayer, OfPyG], {}), strict=True):
        assert max(first[0], second[0]) < 1e-12
        assert first[1] + second[1] > uneven_data().num_nodes
        assert differs(first[2], second[2]) == 0.0


@pytest.mark.slow
def test_rows_of_the_last_meeting_come_from_learned_rows() -> None:
    ((error, _, first),), ((_, _, second),) = run_ranks(evaluated, 2, [ByLayer], {"boundary": History()})
    assert error < 1e-12
    assert differs(first, second) == 0.0


def in_exchange(rank: int, world_size: int) -> Made:
    """Steps on the whole graph, alone or with layers exchanged at the boundary."""
    options: dict[str, Any] = {"boundary": Exchange()} if world_size > 1 else {}
    module, strategy = ByLayer(), GrappaStrategy(**PATIENCE)
    data = PartitionedDataModule(
        bare_graph(), partitioner=RandomPartitioner(), sampler=WholePartSampler(2), batch_size=1000, **options
    )
    trainer(world_size, strategy, max_epochs=4, limit_val_batches=0).fit(module, data)
    return state_of(module)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_exchange_trains_rows_as_one_process_on_the_whole_graph() -> None:
    (alone,) = run_ranks(in_exchange, 1)
    first, second = run_ranks(in_exchange, 2)
    assert differs(first, second) == 0.0
    assert differs(alone, first) < 1e-12


def on_shards(rank: int, world_size: int, where: str) -> list[Made]:
    found = []
    for strategy in (GrappaStrategy(**PATIENCE), LLCGStrategy(EverySteps(3), **PATIENCE)):
        module = Rows()
        data = PartitionedDataModule(where, sampler=NeighborSampler([3, 3]), batch_size=7)
        trainer(world_size, strategy).fit(module, data)
        found.append(state_of(module))
    return found


@pytest.mark.slow
def test_shards_train_rows(tmp_path: Path) -> None:
    save_shards(bare_graph(), RandomPartitioner()(bare_graph(), 2, 0), tmp_path / "shards")
    for first, second in zip(*run_ranks(on_shards, 2, str(tmp_path / "shards")), strict=True):
        assert differs(first, second) == 0.0
        assert bool((first["table.weight"] != Rows().table.weight).any(1).sum() > 20)


def by_ddp(rank: int, world_size: int) -> None:
    trainer(world_size, "ddp").fit(Rows(), data_module())


@pytest.mark.slow
def test_plain_ddp_is_refused() -> None:
    with pytest.raises(RankError, match=r"table has sparse=True, .*use GrappaStrategy\(\)"):
        run_ranks(by_ddp, 2, timeout=60)


def dense(rank: int, world_size: int) -> None:
    module = Rows()
    module.table.sparse = False
    trainer(world_size, LocalSGDStrategy(**PATIENCE), max_epochs=1).fit(module, data_module())


@pytest.mark.slow
def test_a_dense_table_brings_a_warning() -> None:
    with pytest.raises(RankError, match=r"table has a row for each of \d+ nodes, .*1/2 .*sparse=True"):
        run_ranks(dense, 2, timeout=60)


class Typed(Judged):
    """A layer on rows of venues and features of papers."""

    def __init__(self, num_venues: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleDict({"venue": nn.Embedding(num_venues, width, sparse=True)})
        self.conv = SAGEConv((width, width), 6)

    def training_step(self, batch: Any) -> Tensor:
        kind = next(each for each in batch.edge_types if each[0] == "venue" and each[2] == "paper")
        rows = self.tables["venue"](batch["venue"].n_id)
        out = self.conv((rows, batch["paper"].x), batch[kind].edge_index)[: batch.batch_size]
        return nn.functional.cross_entropy(out, batch["paper"].y[: batch.batch_size])

    def configure_optimizers(self) -> Any:
        return LazyAdam(self.parameters(), lr=0.05)


def typed(rank: int, world_size: int) -> list[Made]:
    graph = citations(600)
    found = []
    for strategy in (GrappaStrategy(**PATIENCE), LLCGStrategy(EverySteps(3), **PATIENCE)):
        arrays = graph.types.node_arrays
        module = Typed(graph.types.num_nodes["venue"], arrays["paper"]["x"].shape[1])
        data = PartitionedDataModule(graph, sampler=NeighborSampler([5, 5]), batch_size=32)
        trainer(world_size, strategy, limit_val_batches=0).fit(module, data)
        found.append(state_of(module))
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_type_may_have_learned_rows() -> None:
    for first, second in zip(*run_ranks(typed, 2), strict=True):
        assert differs(first, second) == 0.0
