"""Rows of all nodes of a graph with types, and its evaluation in shards, by layers that are computed one by one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.graph.parted import in_order_of_shards
from tests.layers.test_typed_layers import CLOSE, DATA, EXACT, WRONG, Filters, check_evaluation, graph_of, model
from tests.layers.typed_model import ByLayers, OfLinks
from tests.ranks import RankError, run_ranks
from tests.slow import slow


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


def filtered(rank: int, world_size: int, kind: type[ByLayers], path: Path) -> None:
    graph = graph_of()
    lgd.predict_by_layer(trainer(world_size, **EXACT), model(2, kind), graph, path, seed_type="paper")


def test_no_rows_and_none_to_return_are_alike(tmp_path: Path) -> None:
    run_ranks(filtered, 2, Filters, tmp_path / "rows.npy")
    rows = torch.from_numpy(np.load(tmp_path / "rows.npy"))
    torch.testing.assert_close(rows, model().whole(DATA)["paper"].detach(), **CLOSE)


@pytest.mark.parametrize(("kind", "message"), WRONG)
def test_ranks_that_return_other_rows_are_told_of_it(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=rf"Layer 0 of layers\(\) returned {message}"):
        run_ranks(filtered, 2, kind, tmp_path / "rows.npy")


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
