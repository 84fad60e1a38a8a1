"""Before an evaluation a few seeds are computed with one more hop, and a model that sees farther is told so."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.nn import GPSConv, PairNorm, SAGEConv

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import Judged, graph_of
from tests.layers.test_sight import C, F, Net, W, made, sparse_data
from tests.ranks import run_ranks

FARTHER = r"sees farther than num_hops=2: with one more hop, outputs of some seeds differ by up to .*%"


class Paired(Net):
    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net[2](self.net[1](self.net[0](x, edge_index)), edge_index)


def paired() -> Any:
    torch.manual_seed(1)
    return Paired(SAGEConv(F, W), PairNorm(), SAGEConv(W, C)).double()


class Attending(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = GPSConv(F, SAGEConv(F, F), heads=2), nn.Linear(F, C)

    def forward(self, batch: Any) -> Tensor:
        return self.lin(self.conv(batch.x, batch.edge_index))[: batch.batch_size]


class ByNames(Judged):
    """As PyG's examples call a model: with the batch's arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.net = paired().net

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return Paired.whole(self, x, edge_index)

    def test_step(self, batch: Any) -> None:
        self(batch.x, batch.edge_index)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = paired().net

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return Paired.whole(self, x, edge_index)


class WithoutForward(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def test_step(self, batch: Any) -> None:
        self.inner(batch.x, batch.edge_index)


def graph_data(**options: Any) -> lgd.PartitionedDataModule:
    evaluation = lgd.Evaluation(**({"batch_size": 5} | options))
    return lgd.PartitionedDataModule(
        graph_of(sparse_data()),
        partitioner=lgd.RandomPartitioner(),
        sampler=lgd.NeighborSampler([3, 3]),
        batch_size=50,
        evaluation=evaluation,
    )


def messages(run: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if "sees farther" in str(each.message)]


@pytest.mark.parametrize("model", [paired, lambda: Attending().double(), ByNames, WithoutForward])
def test_a_model_that_sees_farther_is_told_so(model: Any) -> None:
    data = graph_data()
    with pytest.warns(UserWarning, match=FARTHER):
        trainer(1).test(model().double(), data, verbose=False)
    assert data.exactness.difference is None  # the next run looks anew


def test_a_prediction_is_told_of_and_one_in_a_batch_of_the_whole_graph_is_not() -> None:
    with pytest.warns(UserWarning, match=FARTHER):
        trainer(1).predict(paired(), graph_data())
    data = graph_data(batch_size=sparse_data().num_nodes)
    assert not messages(lambda: trainer(1).predict(paired(), data))


def test_it_is_switched_off_by_one_word() -> None:
    assert not messages(lambda: trainer(1).test(paired(), graph_data(probe=False), verbose=False))
    with pytest.raises(ValueError, match="probe must be True or False, got 1"):
        lgd.Evaluation(probe=1)  # type: ignore[arg-type]


class Traced(Paired):
    """Leaves a trace of every call, and draws."""

    def __init__(self) -> None:
        super().__init__(*paired().net)
        self.register_buffer("calls", torch.zeros(1))
        self.lists: list[int] = []
        self.count = 0

    def forward(self, batch: Any) -> Tensor:
        self.calls += 1
        self.count += 1
        self.lists.append(self.count)
        self.accuracy.update(torch.zeros(1, C), torch.zeros(1, dtype=torch.int64))
        torch.rand(1), random.random(), np.random.rand()
        return super().forward(batch)

    def on_test_end(self) -> None:
        drawn = [float(torch.rand(1)), random.random(), float(np.random.rand())]
        self.seen = self.calls.item(), self.count, list(self.lists), drawn, self.training


def traced(**options: Any) -> tuple[Any, Any, Any]:
    module = Traced().double()
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    run = trainer(1)
    (figures,) = run.test(module, graph_data(**options), verbose=False)
    return module.seen, module.rows, figures


@pytest.mark.filterwarnings("ignore:Traced sees farther")
def test_it_leaves_no_trace() -> None:
    (seen, rows, figures), (expected, rows_without, without) = traced(), traced(probe=False)
    assert seen == expected and figures == without
    assert all(rows[node].equal(rows_without[node]) for node in rows_without)


class Fails(Paired):
    """Is called in a way that nobody could guess."""

    def forward(self, batch: Any, how: str) -> Tensor:  # type: ignore[override]
        assert how == "well"
        return super().forward(batch)

    def test_step(self, batch: Any) -> None:
        self(batch, "well")


class Draws(Net):
    def forward(self, batch: Any) -> Tensor:
        return super().forward(batch) + torch.rand(1)


def test_a_model_that_cannot_be_judged_is_evaluated_as_before() -> None:
    failing = Fails(*paired().net).double()
    drawing = Draws(SAGEConv(F, W), SAGEConv(W, C)).double()
    for module in (failing, drawing):
        assert not messages(lambda module=module: trainer(1).test(module, graph_data(), verbose=False))


@pytest.mark.filterwarnings("ignore:Paired sees farther")
def test_a_fit_looks_once() -> None:
    for module, said in ((paired(), True), (made("GCN 2"), False)):
        run = trainer(1, max_epochs=2)
        found = messages(lambda module=module, run=run: run.fit(module, graph_data()))
        assert len(found) == said


def on_two_ranks(rank: int, world_size: int, folder: str | None = None) -> list[tuple[int, bool]]:
    found = []
    for module in (paired(), made("SAGE")):
        sampler, evaluation = lgd.NeighborSampler([3, 3]), lgd.Evaluation(batch_size=5)
        data = (
            graph_data()
            if folder is None
            else lgd.PartitionedDataModule(folder, sampler=sampler, evaluation=evaluation)
        )
        differ: list[bool] = []
        module.on_test_end = lambda data=data, differ=differ: differ.append(data.exactness.difference is not None)
        run = trainer(world_size, lgd.GrappaStrategy(**PATIENCE))
        told = messages(lambda module=module, run=run, data=data: run.test(module, data, verbose=False))
        found.append((len(told), *differ))
    return found


def test_two_ranks_look_alike() -> None:
    first, second = run_ranks(on_two_ranks, 2)
    assert first == [(1, True), (0, False)]  # rank 0 tells
    assert second == [(0, True), (0, False)]
