"""One layer at a time gives what the whole graph at once gives, in a budget, on any number of ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import GCN, GATv2Conv, GCNConv, GINEConv, GraphNorm, SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist import Graph, GrappaStrategy, LocalSGDStrategy, layers_of, predict_by_layer
from lightning_gnn_dist.extensions.passes import layer_pass
from lightning_gnn_dist.layers.through_layers import has_layers
from tests.callbacks.test_predictions import NAMES, Rows, by_hand, check, prepared, start
from tests.cli.test_train import SMALL, command
from tests.data_fitting import trainer
from tests.graph.parted import in_order_of_shards
from tests.layers.test_typed_layers import CLOSE, DATA, EXACT, check_evaluation, graph_of, model
from tests.layers.typed_model import ByLayers, OfLinks
from tests.memory import Peak, give_back_at_once, reads_memory
from tests.ranks import RankError, run_ranks
from tests.slow import slow

NUM_NODES, NUM_FEATURES = 1_501, 12


class Deep(pl.LightningModule):
    """Three layers of any kind, the whole graph at once or one after the other."""

    def __init__(
        self,
        make: Callable[[int, int], torch.nn.Module],
        *,
        edges: str | None = None,
        sizes: Sequence[int] = (NUM_FEATURES, 16, 16, 5),
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = torch.nn.ModuleList([make(*pair) for pair in pairwise(sizes)])
        self.dropout = torch.nn.Dropout(0.5)
        self.edges = edges
        self.num_seeds: list[int] = []

    def layer(self, conv: torch.nn.Module, data: Any) -> Tensor:
        self.num_seeds.append(data.get("batch_size", data.num_nodes))
        edges = [] if self.edges is None else [data[self.edges]]
        x = conv(data.x, data.edge_index, *edges)
        return x if conv is self.convs[-1] else self.dropout(x.relu())

    def layers(self) -> Sequence[Callable[[Any], Tensor]]:
        return [partial(self.layer, conv) for conv in self.convs]


def graph(num_nodes: int = NUM_NODES) -> Graph:
    """With a hub, nodes that nobody sends to, an edge that is there twice, and edge features."""
    generator = torch.Generator().manual_seed(1)
    edge_index = torch.randint(num_nodes, (2, 6 * num_nodes), generator=generator)
    edge_index[1, : 2 * num_nodes] = 7
    edge_index[1][edge_index[1] % 10 == 3] = 8
    edge_index[:, -1] = edge_index[:, -2]
    x = torch.randn(num_nodes, NUM_FEATURES, generator=generator)
    weights = {"edge_attr": torch.randn(edge_index.shape[1], 16, generator=generator)}
    return Graph.from_edge_index(edge_index, num_nodes, {"x": x}, weights)


def whole(graph: Graph) -> Data:
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    edge_index = torch.stack([graph.indices.long(), receiver])
    return Data(graph.node_arrays["x"], edge_index, edge_attr=graph.edge_arrays["edge_attr"])


def model_of(kind: str) -> Deep:
    torch.manual_seed(0)
    return {
        "sage": lambda: Deep(SAGEConv),
        "sage-max": lambda: Deep(partial(SAGEConv, aggr="max")),
        "attention": lambda: Deep(partial(GATv2Conv, heads=2, concat=False, add_self_loops=False)),
        "edges": lambda: Deep(lambda a, b: GINEConv(torch.nn.Linear(a, b), edge_dim=16), edges="edge_attr"),
    }[kind]()


def at_most(size: int) -> Callable[..., float]:
    """Foresees that batches of more nodes would take too much."""
    return lambda of, edges, bytes_in, bytes_out, start, stop: float("inf") if stop - start > size else 0.0


@pytest.mark.parametrize("kind", ["sage", "sage-max", "attention", "edges"])
def test_every_kind_of_layer_is_exact(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pass, "bytes_foreseen", at_most(100))
    model = model_of(kind)
    predict_by_layer(trainer(1), model, graph(), tmp_path / "logits.npy")
    assert len(model.num_seeds) == 3 * 16  # each layer once for each node, a hundred at a time
    found = torch.from_numpy(np.load(tmp_path / "logits.npy"))
    model.eval()
    expected = whole(graph())
    for layer in model.layers():
        expected.x = layer(expected).detach()
    torch.testing.assert_close(found, expected.x, atol=1e-5, rtol=1e-5)
    assert [file.name for file in tmp_path.iterdir()] == ["logits.npy"]
    assert "predict_step" not in vars(model)


class Residual(pl.LightningModule):
    """PyG's GCN, which normalises by the degrees of all nodes, and the input rows once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gnn = GCN(NUM_FEATURES, 8, 3, NUM_FEATURES, jk="lstm")
        self.reads: list[bool] = []

    def layers(self) -> Sequence[Callable[[Any], Tensor]]:
        *inner, last = layers_of(self.gnn)
        return [*inner, lambda batch: self.note(batch) + last(batch) + batch.x0[: batch.batch_size]]

    def note(self, batch: Any) -> int:
        self.reads.append("x0" in batch)
        return 0


def test_layers_see_input_rows_and_degrees_of_the_whole_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pass, "bytes_foreseen", at_most(100))
    model, edges = Residual(), graph()
    edges.node_arrays["x"] = edges.node_arrays["x"].half()
    predict_by_layer(trainer(1), model, edges, tmp_path / "logits.npy")
    assert model.reads == [False] * 16  # they are read when a layer asks for them
    data, x = whole(edges), edges.node_arrays["x"].float()
    expected = model.eval().gnn(x, data.edge_index) + x
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "logits.npy")), expected, atol=1e-5, rtol=1e-5)


STRATEGIES = {"ddp": lambda: "ddp", "local_sgd": LocalSGDStrategy, "grappa": GrappaStrategy}


def on_ranks(rank: int, world_size: int, name: str, path: Path, folder: Path) -> bool:
    predict_by_layer(trainer(world_size, STRATEGIES[name]()), model_of("sage"), Graph.open(folder), path)
    return path.exists()  # on every rank, as soon as it returns


@pytest.mark.parametrize(("name", "world_size"), [slow("ddp", 2), ("local_sgd", 3), slow("grappa", 2)])
def test_ranks_share_the_nodes_of_every_layer(name: str, world_size: int, tmp_path: Path) -> None:
    graph().save(tmp_path / "graph")
    predict_by_layer(trainer(1), model_of("sage"), graph(), tmp_path / "alone.npy")
    assert run_ranks(on_ranks, world_size, name, tmp_path / "logits.npy", tmp_path / "graph") == [True] * world_size
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), np.load(tmp_path / "alone.npy"), atol=1e-5)
    assert {file.name for file in tmp_path.iterdir()} == {"graph", "alone.npy", "logits.npy"}


def test_a_checkpoint_and_the_precision_hold(tmp_path: Path) -> None:
    trained, fresh = model_of("sage"), Deep(SAGEConv)
    running = trainer(1)
    running.strategy.connect(trained)
    running.save_checkpoint(tmp_path / "trained.ckpt", weights_only=True)
    predict_by_layer(running, trained, graph(), tmp_path / "trained.npy")
    predict_by_layer(trainer(1), fresh, graph(), tmp_path / "fresh.npy", ckpt_path=tmp_path / "trained.ckpt")
    expected = np.load(tmp_path / "trained.npy")
    assert np.array_equal(np.load(tmp_path / "fresh.npy"), expected)
    predict_by_layer(trainer(1, precision="bf16-mixed"), model_of("sage"), graph(), tmp_path / "half.npy")
    half = np.load(tmp_path / "half.npy")
    assert half.dtype == np.float32 and 0 < np.abs(half - expected).max() < 0.05 * np.abs(expected).max()


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    class Listed(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([GCNConv(2, 2)])

    path = tmp_path / "rows.npy"
    assert not has_layers(Listed()) and has_layers(model_of("sage"))
    with pytest.raises(TypeError, match=r"Listed has no method layers\(\)"):
        predict_by_layer(trainer(1), Listed(), graph(), path)
    with pytest.raises(ValueError, match=r"and '.*rows\.pt' ends otherwise"):
        predict_by_layer(trainer(1), model_of("sage"), graph(), tmp_path / "rows.pt")
    with pytest.raises(ValueError, match="at least 16 megabytes"):
        predict_by_layer(trainer(1), model_of("sage"), graph(), path, budget_bytes=1000)
    with pytest.raises(ValueError, match="limit_predict_batches=1 would leave rows without a prediction"):
        predict_by_layer(trainer(1, limit_predict_batches=1), model_of("sage"), graph(), path)
    with pytest.raises(TypeError, match=r"predict_by_layer\(\) knows no argument 'ckpt_pth'"):
        predict_by_layer(trainer(1), model_of("sage"), graph(), path, ckpt_pth="x")
    path.touch()
    with pytest.raises(FileExistsError, match=r"rows\.npy exists already.*overwrite=True"):
        predict_by_layer(trainer(1), model_of("sage"), graph(), path)
    predict_by_layer(trainer(1), model_of("sage"), graph(), path, overwrite=True)
    assert np.load(path).shape == (NUM_NODES, 5)


class Normalised(Deep):
    """With a layer that takes the rows of all nodes at once."""

    def __init__(self) -> None:
        super().__init__(SAGEConv)
        self.norm = GraphNorm(16)

    def layers(self) -> Sequence[Callable[[Any], Tensor]]:
        first, *others = super().layers()
        return [lambda batch: self.norm(first(batch)[: batch.batch_size]), *others]


def test_a_layer_of_all_rows_gets_them_in_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pass, "bytes_foreseen", lambda of, edges, bytes_in, bytes_out, start, stop: stop - start)
    torch.manual_seed(0)
    model = Normalised()
    predict_by_layer(trainer(1), model, graph(), tmp_path / "rows.npy")
    assert model.num_seeds == [NUM_NODES] * 3


class Breaks(Deep):
    def layers(self) -> Sequence[Callable[[Any], Tensor]]:
        return [*super().layers()[:2], lambda batch: batch.x[:3]]


def break_on_ranks(rank: int, world_size: int, path: Path) -> None:
    with pytest.raises(ValueError, match=r"norm \(GraphNorm\) takes the rows of all nodes at once: predict with"):
        predict_by_layer(trainer(world_size, "ddp"), Normalised(), graph(), path)
    predict_by_layer(trainer(world_size, "ddp"), Breaks(SAGEConv), graph(), path)


def test_a_layer_that_says_too_little_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"Layer \d of layers\(\) returned a tensor of \(3, 16\) for a batch of"):
        run_ranks(break_on_ranks, 2, tmp_path / "rows.npy")
    assert not list(tmp_path.iterdir())


class Bipartite(Deep):
    """Reads the blocks, so that nothing is held for an edge."""

    def layer(self, conv: torch.nn.Module, data: Any) -> Tensor:
        block = data.blocks[0]
        return conv((data.x, data.x[: block.num_dst]), block.adj)


def most_memory(rank: int, world_size: int, folder: Path, budget: int) -> int:
    """Bytes of this process, mapped pages among them, beyond what it has after a first and small prediction."""
    give_back_at_once()
    model = Bipartite(SAGEConv)
    graph().save(folder / "small")
    predict_by_layer(trainer(1), model, Graph.open(folder / "small"), folder / "small.npy")
    with Peak("VmRSS") as peak:
        predict_by_layer(trainer(1), model, Graph.open(folder / "graph"), folder / "rows.npy", budget_bytes=budget)
    return peak.added_bytes


@pytest.mark.slow
@reads_memory
def test_a_prediction_stays_within_its_budget(tmp_path: Path) -> None:
    nodes = 2_000_000
    edge_index = torch.randint(nodes, (2, 5 * nodes))
    Graph.from_edge_index(edge_index, nodes, {"x": torch.rand(nodes, NUM_FEATURES)}).save(tmp_path / "graph")
    budget = 48 << 20
    (most,) = run_ranks(most_memory, 1, tmp_path, budget)
    assert 4 * nodes * NUM_FEATURES > 1.5 * budget  # neither the features nor the edges would have fitted
    assert budget / 8 < most < budget


# By a command, and as a table whose rows have the ids of the tables that their graph was prepared from.


@pytest.mark.slow
def test_predict_by_layer_says_what_batches_say(tmp_path: Path) -> None:
    config = ["predict", "--config=configs/local_sgd.yaml", *SMALL]
    writer = f"{{class_path: lightning_gnn_dist.PredictionWriter, init_args: {{path: {tmp_path}/batches.npy}}}}"
    run_ranks(command, 2, *config, f"--output={tmp_path}/layers.npy", "--budget_megabytes=16")
    run_ranks(command, 2, *config, f"--trainer.callbacks={writer}")
    np.testing.assert_allclose(np.load(tmp_path / "layers.npy"), np.load(tmp_path / "batches.npy"), atol=1e-5)


def write_table(rank: int, world_size: int, folder: Path) -> None:
    predict_by_layer(start(), Rows(), folder / "graph", folder / "layers.parquet")


def test_tables_have_the_ids_of_users(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    saved = Graph.open(prepared(tmp_path))
    run_ranks(write_table, 2, tmp_path)
    check(tmp_path / "layers.parquet", NAMES, NAMES, by_hand(saved))


# Rows of all nodes of a graph with types, and its evaluation in shards, by layers that are computed one by one.


def predicted(rank: int, world_size: int, where: Any, folder: Path, budget_bytes: int, kind: str) -> None:
    graph = lgd.Graph.open(where) if isinstance(where, Path) and (where / "meta.json").exists() else where
    run, budget = trainer(world_size, **EXACT), {"budget_bytes": budget_bytes}
    lgd.predict_by_layer(run, model(3), graph, folder / f"{kind}.npy", seed_type=kind, **budget)  # type: ignore[arg-type]


@pytest.mark.parametrize(("num_ranks", "place"), [slow(1, "RAM"), slow(2, "files"), (2, "shards")])
def test_all_nodes_of_a_type_are_predicted(num_ranks: int, place: str, tmp_path: Path) -> None:
    where: Any = graph_of()
    if place != "RAM":
        where.save(tmp_path / "graph")
        lgd.save_shards(where, lgd.RandomPartitioner()(where, 2, seed=0), tmp_path / "shards")
        where = tmp_path / {"files": "graph", "shards": "shards"}[place]
    for kind in ("paper", "word"):
        run_ranks(predicted, num_ranks, where, tmp_path, 16 << 20, kind)
        rows = torch.from_numpy(np.load(tmp_path / f"{kind}.npy"))
        torch.testing.assert_close(rows, model(3).whole(DATA)[kind], **CLOSE)


def test_an_evaluation_of_shards_computes_each_layer_once(tmp_path: Path) -> None:
    graph, is_tested = graph_of(), DATA["paper"].test_mask
    owner = lgd.Partition((torch.arange(graph.num_nodes) % 5 < 2).int(), 2)
    lgd.save_shards(graph, owner, tmp_path / "shards")
    order = in_order_of_shards(graph, owner).types.node_arrays["paper"]["n_id"]
    check_evaluation(2, tmp_path / "shards", tmp_path, order[is_tested[order]])


def of_links(rank: int, world_size: int, split: Any) -> tuple[float, int]:
    data = lgd.LinkDataModule(split, sampler=lgd.NeighborSampler([4, 4]), batch_size=15, seed=0)
    module = model(2, OfLinks)
    (metrics,) = trainer(world_size, **EXACT).test(module, data, verbose=False)
    return metrics["test_loss"], len(module.called)


@pytest.mark.parametrize("place", ["RAM", "shards"])
def test_an_evaluation_of_links_asks_for_rows_of_both_types(place: str, tmp_path: Path) -> None:
    split: Any = lgd.split_edges(graph_of(), edge_type=OfLinks.asked, seed=0)
    rows = model(2, OfLinks).whole(split.graph.to_pyg())
    (sender, receiver), negatives = split.edges["test"], split.negatives["test"]
    ones = (rows["author"][sender] * rows["paper"][receiver]).sum(1)
    zeros = (rows["author"][sender][:, None] * rows["paper"][negatives]).sum(2)
    loss = F.binary_cross_entropy_with_logits(ones, torch.ones_like(ones), reduction="sum")
    loss += F.binary_cross_entropy_with_logits(zeros, torch.zeros_like(zeros), reduction="sum")
    if place == "shards":
        lgd.save_shards(split, lgd.RandomPartitioner()(split.graph, 2, seed=0), tmp_path / "shards")
    where = split if place == "RAM" else tmp_path / "shards"
    for found, calls in run_ranks(of_links, 2, where):
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)
        assert calls <= 3


def test_a_type_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"seed_type must be one of .*paper.*, got 'pager'"):
        lgd.predict_by_layer(trainer(1), model(), graph_of(), tmp_path / "rows.npy", seed_type="pager")
    plain = lgd.Graph.from_edge_index(torch.tensor([[0], [1]]), 2, {"x": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"seed_type .* is for a graph with types"):
        lgd.predict_by_layer(trainer(1), model(), plain, tmp_path / "rows.npy", seed_type="paper")
    assert not list(tmp_path.iterdir())


def test_shards_of_one_node_type_may_have_several_edge_types(tmp_path: Path) -> None:
    data, papers = HeteroData(), DATA["paper"]
    data["paper"].x, data["paper"].train_mask = papers.x, papers.train_mask
    for kind in (("paper", "cites", "paper"), ("paper", "disputes", "paper")):
        data[kind].edge_index = DATA[kind].edge_index
        data[kind].strength = torch.ones(DATA[kind].num_edges)
    module = ByLayers(data.edge_types).eval()
    lgd.save_shards(graph_of(data), lgd.Partition(torch.zeros(data.num_nodes).int(), 1), tmp_path / "shards")
    lgd.predict_by_layer(trainer(1, **EXACT), module, tmp_path / "shards", tmp_path / "rows.npy")
    rows = torch.from_numpy(np.load(tmp_path / "rows.npy"))
    torch.testing.assert_close(rows, module.whole(data)["paper"].detach(), **CLOSE)
