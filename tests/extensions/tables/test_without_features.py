"""Graphs without features from end to end: training, exact evaluation, boundaries, shards, and types."""

from collections.abc import Callable
from functools import partial
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
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    WholePartSampler,
    through_layers,
)
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import Made, owned, state_of
from tests.layers.models import NUM_CLASSES, Judged, graph_of, uneven_data
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import differs

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


def whole_of(module: Rows) -> Tensor:
    """The rows of all nodes by a model that has the whole table."""
    alone = type(module)()
    alone.load_state_dict(module.state_dict())
    return alone.whole()


def evaluated(rank: int, world_size: int, kinds: list[Any], in_rounds: bool, options: dict[str, Any]) -> list[Any]:
    """For models of each kind, whose rows all ranks have or one rank each, the largest error of a row."""
    found = []
    for module in [module for kind in kinds for module in (kind(), owned(kind(), "table"))]:
        strategy = LocalSGDStrategy(EverySteps(2), **PATIENCE) if in_rounds else GrappaStrategy(**PATIENCE)
        data, fitted = data_module(**options), trainer(world_size, strategy)
        fitted.fit(module, data)
        errors = errors_of_rows(fitted, module, data, partial(whole_of, module))
        found.append((max(errors), len(errors), state_of(module)))
        assert module.kinds == {"SeedBatch"} or not isinstance(module, ByLayer)
    return found


@pytest.mark.parametrize(
    ("kinds", "in_rounds", "options"),
    [
        ([Rows, ByLayer, OfPyG], False, {}),
        pytest.param([Rows, ByLayer, OfPyG], True, {}, marks=pytest.mark.slow),
        pytest.param([ByLayer], True, {"boundary": History()}, marks=pytest.mark.slow),  # rows of the last meeting
    ],
)
def test_evaluation_and_prediction_are_exact(kinds: list[Any], in_rounds: bool, options: dict[str, Any]) -> None:
    for first, second in zip(*run_ranks(evaluated, 2, kinds, in_rounds, options), strict=True):
        assert max(first[0], second[0]) < 1e-12
        assert first[1] + second[1] > uneven_data().num_nodes
        assert differs(first[2], second[2]) == 0.0


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


def by_ddp(rank: int, world_size: int) -> None:
    trainer(world_size, "ddp").fit(Rows(), data_module())


@pytest.mark.slow
def test_plain_ddp_is_refused() -> None:
    with pytest.raises(RankError, match=r"table has sparse=True, .*use GrappaStrategy\(\)"):
        run_ranks(by_ddp, 2)


def dense(rank: int, world_size: int) -> None:
    module = Rows()
    module.table.sparse = False
    trainer(world_size, LocalSGDStrategy(**PATIENCE), max_epochs=1).fit(module, data_module())


@pytest.mark.slow
def test_a_dense_table_brings_a_warning() -> None:
    with pytest.raises(RankError, match=r"table has a row for each of \d+ nodes, .*1/2 .*sparse=True"):
        run_ranks(dense, 2)


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
