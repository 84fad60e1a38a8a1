"""How far models see: rows are those of one forward of the whole graph, and deeper models are told of."""

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch_geometric import nn as pyg
from torch_geometric.data import Data
from torch_geometric.utils import degree

import lightning_gnn_dist as lgd
from lightning_gnn_dist.layers.exactness import check_depth, hops_of_evaluation
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import NUM_CLASSES, NUM_FEATURES, Judged, graph_of, whole_rows
from tests.ranks import run_ranks

SAMPLER = lgd.NeighborSampler([3, 3])


def test_a_model_of_pyg_with_more_layers_than_hops_is_refused() -> None:
    with pytest.raises(ValueError, match=r"net \(GraphSAGE\) has num_layers=3, and NeighborSampler.* draws 2 hops"):
        check_depth(nn.ModuleDict({"net": pyg.GraphSAGE(8, 8, 3, 4)}), SAMPLER)


NUM_NODES, WIDTH = 300, 5


def sparse_data() -> Data:
    """A ring with some chords and a hub, in both directions: few hops reach few nodes."""
    chance = torch.Generator().manual_seed(3)
    ring = torch.stack([torch.arange(NUM_NODES), torch.arange(1, NUM_NODES + 1) % NUM_NODES])
    chords = torch.randint(NUM_NODES, (2, 60), generator=chance)
    hub = torch.stack([torch.full((30,), 7), torch.randint(NUM_NODES, (30,), generator=chance)])
    edges = torch.cat([ring, chords, hub], 1)
    data = Data(edge_index=torch.cat([edges, edges.flip(0)], 1), num_nodes=NUM_NODES)
    data.x = torch.randn(NUM_NODES, NUM_FEATURES, generator=chance, dtype=torch.float64)
    data.y = torch.randint(NUM_CLASSES, (NUM_NODES,), generator=chance)
    order = torch.randperm(NUM_NODES, generator=chance)
    for name, some in zip(("train", "val", "test"), order.split([220, 40, 40]), strict=True):
        data[f"{name}_mask"] = torch.zeros(NUM_NODES, dtype=torch.bool).index_fill(0, some, True)
    return data


class ByHand(pyg.MessagePassing):
    """GCN as PyG's tutorial writes it."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__(aggr="add")
        self.lin = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        scale = (degree(edge_index[1], len(x), dtype=x.dtype) + 1) ** -0.5
        return scale[:, None] * (self.propagate(edge_index, x=self.lin(x) * scale[:, None]))


class Net(Judged):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleList(layers)

    def forward(self, batch: Any) -> Tensor:
        return self.whole(batch.x, batch.edge_index)[: batch.batch_size]

    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for layer in self.net:
            x = layer(x, edge_index) if isinstance(layer, pyg.MessagePassing) else layer(x)
        return x

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch)


class HalfOnBlocks(Net):
    """Reads the batch's blocks beside a layer that counts degrees."""

    def __init__(self) -> None:
        super().__init__(pyg.SAGEConv(NUM_FEATURES, WIDTH), pyg.SAGEConv(WIDTH, NUM_CLASSES))
        self.more = pyg.GCNConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for layer, block in zip(self.net, batch.blocks, strict=True):
            x = layer((x, x[: block.num_dst]), block.adj)
        return x + self.more(batch.x, batch.edge_index)[: batch.batch_size]

    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().whole(x, edge_index) + self.more(x, edge_index)


F, W, C = NUM_FEATURES, WIDTH, NUM_CLASSES
EXACT: dict[str, tuple[int, Any]] = {
    "GCN 2": (2, lambda: Net(pyg.GCNConv(F, W), nn.ReLU(), pyg.GCNConv(W, C))),
    "GCN 3": (3, lambda: Net(pyg.GCNConv(F, W), nn.ReLU(), pyg.GCNConv(W, W), pyg.GCNConv(W, C))),
    "GCN by hand": (2, lambda: Net(ByHand(F, W), nn.ReLU(), ByHand(W, C))),
    "blocks": (2, HalfOnBlocks),
    "SGC": (2, lambda: Net(pyg.SGConv(F, C, K=2))),
    "SGC twice": (2, lambda: Net(pyg.SGConv(F, W, K=2), pyg.SGConv(W, C, K=3))),
    "APPNP": (2, lambda: Net(nn.Linear(F, C), pyg.APPNP(10, 0.1))),
    "TAG": (2, lambda: Net(pyg.TAGConv(F, C, K=3))),
    "SSG": (1, lambda: Net(pyg.SSGConv(F, C, alpha=0.1, K=3))),
    "Cheb": (1, lambda: Net(pyg.ChebConv(F, C, K=3))),
    "ARMA": (1, lambda: Net(pyg.ARMAConv(F, C, num_layers=3))),
    "MixHop": (1, lambda: Net(pyg.MixHopConv(F, 1, powers=[0, 1, 2]))),
    "SAGE": (2, lambda: Net(pyg.SAGEConv(F, W), nn.ReLU(), pyg.SAGEConv(W, C))),
}


def made(name: str) -> Any:
    torch.manual_seed(1)
    return EXACT[name][1]().double()


def data_module(name: str, where: str | None = None) -> Any:
    options: dict[str, Any] = {"sampler": lgd.NeighborSampler([3] * EXACT[name][0]), "batch_size": 5}
    options["evaluation"] = lgd.Evaluation(batch_size=5)
    if where is not None:
        return lgd.PartitionedDataModule(where, **options)
    return lgd.PartitionedDataModule(graph_of(sparse_data()), partitioner=lgd.RandomPartitioner(), **options)


def check(name: str, rows: dict[int, Tensor]) -> None:
    expected = whole_rows(made(name), sparse_data())
    assert rows
    for node, row in rows.items():
        assert torch.allclose(row, expected[node], rtol=0, atol=1e-12), (name, node)


@pytest.mark.parametrize("name", EXACT)
def test_rows_are_those_of_the_whole_graph_and_bring_no_message(name: str, recwarn: pytest.WarningsRecorder) -> None:
    module = made(name)
    trainer(1).test(module, data_module(name), verbose=False)
    check(name, module.rows)
    assert not [each for each in recwarn if "sees farther" in str(each.message)]


def evaluate(rank: int, world_size: int, cases: list[tuple[str, str | None]]) -> list[dict[int, Tensor]]:
    found = []
    for name, where in cases:
        module = made(name)
        trainer(world_size, lgd.GrappaStrategy(**PATIENCE)).test(module, data_module(name, where), verbose=False)
        found.append(module.rows)
    return found


def test_rows_of_two_ranks() -> None:
    check_ranks([(name, None) for name in ("GCN 2", "APPNP")])


def check_ranks(cases: list[tuple[str, str | None]]) -> None:
    for of_rank in run_ranks(evaluate, 2, cases):
        for (name, _), rows in zip(cases, of_rank, strict=True):
            check(name, rows)


class Odd(ByHand):
    """Has other things by the names by which PyG's layers say how far they see."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.K, self.normalize = nn.Linear(4, 4), torch.ones(2)


SIGHT: list[tuple[Callable[[], nn.Module], int]] = [
    (lambda: nn.ModuleList([pyg.SAGEConv(4, 4), pyg.GATConv(4, 4), pyg.GATv2Conv(4, 4)]), 2),
    (lambda: pyg.MFConv(4, 4), 2),
    (lambda: pyg.PNAConv(4, 4, ["mean"], ["identity"], deg=torch.ones(3, dtype=torch.int64)), 2),
    (lambda: pyg.SAGEConv(4, 4, normalize=True), 2),
    (lambda: pyg.GraphSAGE(4, 4, 2), 2),
    (lambda: pyg.GCNConv(4, 4, normalize=False), 2),
    (lambda: pyg.GCNConv(4, 4), 3),
    (Odd, 3),
    (lambda: pyg.APPNP(10, 0.1), 11),
    (lambda: nn.ModuleList([pyg.SGConv(4, 4, K=2), pyg.SGConv(4, 4, K=2)]), 5),
    (lambda: pyg.HeteroConv({("a", way, "a"): pyg.SGConv(4, 4, K=3) for way in "bc"}), 4),
]


@pytest.mark.parametrize(("make", "hops"), SIGHT)
def test_hops_of_an_evaluation(make: Callable[[], nn.Module], hops: int) -> None:
    assert hops_of_evaluation(make(), 2) == hops


# Before an evaluation a few seeds are computed with one more hop, and a model that sees farther is told so.


FARTHER = r"sees farther than num_hops=2: with one more hop, outputs of some seeds differ by up to .*%"


class Paired(Net):
    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.net[2](self.net[1](self.net[0](x, edge_index)), edge_index)


def paired() -> Any:
    torch.manual_seed(1)
    return Paired(pyg.SAGEConv(F, W), pyg.PairNorm(), pyg.SAGEConv(W, C)).double()


class Attending(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.lin = pyg.GPSConv(F, pyg.SAGEConv(F, F), heads=2), nn.Linear(F, C)

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


class WithoutForward(Judged):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ByNames()

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
    drawing = Draws(pyg.SAGEConv(F, W), pyg.SAGEConv(W, C)).double()
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
