"""How far models see: rows are those of one forward of the whole graph, and deeper models are told of."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import (
    APPNP,
    ARMAConv,
    ChebConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    GraphSAGE,
    HeteroConv,
    MessagePassing,
    MFConv,
    MixHopConv,
    PNAConv,
    SAGEConv,
    SGConv,
    SSGConv,
    TAGConv,
)
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
        check_depth(nn.ModuleDict({"net": GraphSAGE(8, 8, 3, 4)}), 2, SAMPLER)


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


class ByHand(MessagePassing):
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
            x = layer(x, edge_index) if isinstance(layer, MessagePassing) else layer(x)
        return x

    def predict_step(self, batch: Any) -> Tensor:
        return self(batch)


class HalfOnBlocks(Net):
    """Reads the batch's blocks beside a layer that counts degrees."""

    def __init__(self) -> None:
        super().__init__(SAGEConv(NUM_FEATURES, WIDTH), SAGEConv(WIDTH, NUM_CLASSES))
        self.more = GCNConv(NUM_FEATURES, NUM_CLASSES)

    def forward(self, batch: Any) -> Tensor:
        x = batch.x
        for layer, block in zip(self.net, batch.blocks, strict=True):
            x = layer((x, x[: block.num_dst]), block.adj)
        return x + self.more(batch.x, batch.edge_index)[: batch.batch_size]

    def whole(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return super().whole(x, edge_index) + self.more(x, edge_index)


F, W, C = NUM_FEATURES, WIDTH, NUM_CLASSES
EXACT: dict[str, tuple[int, Any]] = {
    "GCN 2": (2, lambda: Net(GCNConv(F, W), nn.ReLU(), GCNConv(W, C))),
    "GCN 3": (3, lambda: Net(GCNConv(F, W), nn.ReLU(), GCNConv(W, W), GCNConv(W, C))),
    "GCN by hand": (2, lambda: Net(ByHand(F, W), nn.ReLU(), ByHand(W, C))),
    "blocks": (2, HalfOnBlocks),
    "SGC": (2, lambda: Net(SGConv(F, C, K=2))),
    "SGC twice": (2, lambda: Net(SGConv(F, W, K=2), SGConv(W, C, K=3))),
    "APPNP": (2, lambda: Net(nn.Linear(F, C), APPNP(10, 0.1))),
    "TAG": (2, lambda: Net(TAGConv(F, C, K=3))),
    "SSG": (1, lambda: Net(SSGConv(F, C, alpha=0.1, K=3))),
    "Cheb": (1, lambda: Net(ChebConv(F, C, K=3))),
    "ARMA": (1, lambda: Net(ARMAConv(F, C, num_layers=3))),
    "MixHop": (1, lambda: Net(MixHopConv(F, 1, powers=[0, 1, 2]))),
    "SAGE": (2, lambda: Net(SAGEConv(F, W), nn.ReLU(), SAGEConv(W, C))),
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


def test_predictions_are_those_of_the_whole_graph() -> None:
    rows = torch.cat(trainer(1).predict(made("GCN 2"), data_module("GCN 2")))
    check("GCN 2", dict(enumerate(rows)))


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
    (lambda: nn.ModuleList([SAGEConv(4, 4), GATConv(4, 4), GATv2Conv(4, 4)]), 2),
    (lambda: MFConv(4, 4), 2),
    (lambda: PNAConv(4, 4, ["mean"], ["identity"], deg=torch.ones(3, dtype=torch.int64)), 2),
    (lambda: SAGEConv(4, 4, normalize=True), 2),
    (lambda: GraphSAGE(4, 4, 2), 2),
    (lambda: GCNConv(4, 4, normalize=False), 2),
    (lambda: GCNConv(4, 4), 3),
    (Odd, 3),
    (lambda: APPNP(10, 0.1), 11),
    (lambda: nn.ModuleList([SGConv(4, 4, K=2), SGConv(4, 4, K=2)]), 5),
    (lambda: HeteroConv({("a", way, "a"): SGConv(4, 4, K=3) for way in "bc"}), 4),
]


@pytest.mark.parametrize(("make", "hops"), SIGHT)
def test_hops_of_an_evaluation(make: Callable[[], nn.Module], hops: int) -> None:
    assert hops_of_evaluation(make(), 2) == hops
