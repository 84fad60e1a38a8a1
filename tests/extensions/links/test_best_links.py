"""The best links are those of all pairs scored and sorted by hand, on however many ranks and in which chunks."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.links import best_links as searching
from lightning_gnn_dist.extensions.links.ranking import BestLinks
from tests.callbacks.test_predictions import COUNT, NAMES, Rows, prepared, start
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.slow import slow

SAW = ("user", "saw", "film")
Pairs = set[tuple[int, int]]


class Plain(pl.LightningModule):
    """Rows of whole numbers, so that many pairs have the same score, and a decoder that is not symmetric."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = SAGEConv(6, 8).double(), SAGEConv(8, 3).double()

    def layers(self) -> Any:
        return [
            lambda batch: self.first(batch.x, batch.edge_index).relu(),
            lambda batch: self.last(batch.x, batch.edge_index).mul(2).round(),
        ]

    def decoded(self, senders: Tensor, receivers: Tensor) -> Tensor:
        return (senders * receivers).sum(-1) + 2 * receivers[..., 0]

    def forward(self, batch: Any) -> Tensor:
        rows, (sender, receiver) = lgd.through_layers(self, batch), batch.edge_label_index
        return self.decoded(rows[sender], rows[receiver])

    def whole(self, graph: lgd.Graph) -> tuple[Tensor, Tensor]:
        edges: Any = graph.to_pyg().edge_index
        hidden = self.first(graph.node_arrays["x"], edges).relu()
        rows = self.last(hidden, edges).mul(2).round().detach()
        return rows, rows


class Films(Plain):
    """The same of users and films."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [SAW, ("film", "rev_saw", "user"), ("user", "knows", "user")]
        self.first, self.last = (
            HeteroConv({kind: SAGEConv(width, out) for kind in kinds}).double() for width, out in ((6, 8), (8, 3))
        )

    def layers(self) -> Any:
        def inner(batch: Any) -> Any:
            return {kind: rows.relu() for kind, rows in self.first(batch.x_dict, batch.edge_index_dict).items()}

        def last(batch: Any) -> Any:
            found = self.last(batch.x_dict, batch.edge_index_dict)
            return {kind: rows.mul(2).round() for kind, rows in found.items()}

        return [inner, last]

    def forward(self, batch: Any) -> Tensor:
        rows, (sender, receiver) = lgd.through_layers(self, batch), batch[SAW].edge_label_index
        return self.decoded(rows["user"][sender], rows["film"][receiver])

    def whole(self, graph: lgd.Graph) -> tuple[Tensor, Tensor]:
        data: Any = graph.to_pyg()
        hidden = {kind: x.relu() for kind, x in self.first(data.x_dict, data.edge_index_dict).items()}
        rows = {k: x.mul(2).round().detach() for k, x in self.last(hidden, data.edge_index_dict).items()}
        return rows["user"], rows["film"]


@cache
def plain_split() -> lgd.LinkSplit:
    graph = lgd.communities(101, 3, num_features=6, seed=3)
    return lgd.split_edges(lgd.Graph(graph.indptr, graph.indices, {"x": graph.node_arrays["x"].double()}), negatives=5)


@cache
def film_split(num_films: int = 9) -> lgd.LinkSplit:
    draw, data = torch.Generator().manual_seed(1), HeteroData()
    data["user"].x = torch.randn(40, 6, generator=draw).double()
    data["film"].x = torch.randn(num_films, 6, generator=draw).double()
    pairs = [(user, film) for user in range(40) for film in range(num_films) if (3 * user + film) % 4 == 1]
    data[SAW].edge_index = torch.tensor(pairs).T
    data["film", "rev_saw", "user"].edge_index = torch.tensor(pairs).T.flip(0)
    data["user", "knows", "user"].edge_index = torch.randint(40, (2, 90), generator=draw)
    return lgd.split_edges(lgd.Graph.from_pyg(data).with_seeds("film"), negatives=1, edge_type=SAW)


def by_hand(module: Plain, split: lgd.LinkSplit, senders: list[int], k: int, left_out: Pairs, dot: bool) -> Any:
    """Score all pairs, and sort them by score and id."""
    of_senders, of_receivers = module.whole(split.graph)
    found = []
    for sender in senders:
        row = of_senders[sender]
        scores = (of_receivers * row).sum(1) if dot else module.decoded(row, of_receivers)
        order = sorted((-float(score), r) for r, score in enumerate(scores) if (sender, r) not in left_out)
        best = [(receiver, -score) for score, receiver in order[:k]]
        found.append(best + [(-1, -float("inf"))] * (min(k, len(scores)) - len(best)))
    return found


def known(split: lgd.LinkSplit, *names: str) -> Pairs:
    """Links that are left out."""
    data: Any = split.graph.to_pyg()
    edges: Any = data.edge_index if split.edge_type is None else data[split.edge_type].edge_index
    found = {(s, r) for s, r in edges.T.tolist()} if "edges" in names else set()
    for name, held in split.edges.items():
        pairs = {(s, r) for s, r in held.T.tolist()} if name in names else set()
        found |= pairs | ({(r, s) for s, r in pairs} if split.undirected else set())
    return found | ({(node, node) for node in range(split.graph.num_nodes)} if "self" in names else set())


def as_pairs(found: BestLinks) -> Any:
    rows = zip(found.receivers.tolist(), found.scores.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in rows]


ASKED = [7, 30, 0, 22, 39, 5, 11]


def on_rank(rank: int, world_size: int, where: Any, typed: bool, folder: Path) -> dict[str, Any]:
    """Find links in small chunks; return this rank's share of them."""
    searching._AT_ONCE, searching._OF_THE_BUDGET = 3, 2e-4
    module = Films() if typed else Plain()
    strategy = lgd.GrappaStrategy(**PATIENCE) if world_size > 1 else "auto"
    running: dict[str, Any] = {"trainer": trainer(world_size, strategy), "model": module, "split": where}
    given: dict[str, Any] = {"model": {}, "dot": {"score": "dot", "leave_out": ["edges"]}, "all": {"leave_out": []}}
    for options in given.values():
        options |= {"senders": ASKED, "k": 5, "budget_bytes": 16 << 20}
    found = {name: lgd.best_links(**running, **options) for name, options in given.items()}
    lgd.best_links(**running, path=folder / "all.npy", k=1000, budget_bytes=16 << 20)
    return {name: (links.senders.tolist(), as_pairs(links)) for name, links in found.items() if links is not None}


def check(of_ranks: list[dict[str, Any]], split: lgd.LinkSplit, module: Plain, folder: Path) -> None:
    loops = "self" if split.edge_type is None else ""
    for name, left_out, dot in (
        ("model", known(split, "edges", loops), False),
        ("dot", known(split, "edges"), True),
        ("all", set[tuple[int, int]](), False),
    ):
        pairs = [zip(*rank[name], strict=True) for rank in of_ranks]
        shared = dict(pair for of_rank in pairs for pair in of_rank)
        assert len(shared) == len(ASKED)
        assert [shared[sender] for sender in ASKED] == by_hand(module, split, ASKED, 5, left_out, dot)
    senders = list(range(len(module.whole(split.graph)[0])))
    expected = by_hand(module, split, senders, 1000, known(split, "edges", loops), False)
    rows = np.load(folder / "all.npy", mmap_mode="r")
    assert rows["sender"].reshape(len(senders), -1)[:, 0].tolist() == senders
    found = zip(rows["receiver"].tolist(), rows["score"].tolist(), strict=True)
    assert list(found) == [pair for of_sender in expected for pair in of_sender]
    assert [file.name for file in folder.iterdir()] == ["all.npy"]


@pytest.mark.parametrize("num_ranks", [1, slow(2), 3])
def test_links_are_the_best_of_all_pairs(num_ranks: int, tmp_path: Path) -> None:
    check(run_ranks(on_rank, num_ranks, plain_split(), False, tmp_path), plain_split(), Plain(), tmp_path)


@pytest.mark.parametrize(("num_ranks", "num_films"), [slow(1, 9), (3, 2)])  # of three ranks one has no film
def test_links_of_an_edge_type(num_ranks: int, num_films: int, tmp_path: Path) -> None:
    split = film_split(num_films)
    check(run_ranks(on_rank, num_ranks, split, True, tmp_path), split, Films(), tmp_path)


@pytest.mark.parametrize("typed", [slow(False), True])
def test_links_of_shards(typed: bool, tmp_path: Path) -> None:
    split = film_split() if typed else plain_split()
    chunks = (torch.arange(split.graph.num_nodes) % 3 // 2).int()  # unequal, and across the order of ids
    lgd.save_shards(split, lgd.Partition(chunks, 2), tmp_path / "shards")
    (tmp_path / "out").mkdir()
    found = run_ranks(on_rank, 2, tmp_path / "shards", typed, tmp_path / "out")
    check(found, split, Films() if typed else Plain(), tmp_path / "out")


def test_a_graph_may_have_no_held_edges() -> None:
    split = lgd.LinkSplit(plain_split().graph, {})
    found = lgd.best_links(trainer(1), Plain(), split, senders=[2, 9], k=4, score="dot")
    assert found is not None
    assert as_pairs(found) == by_hand(Plain(), split, [2, 9], 4, known(split, "edges", "self"), True)


@pytest.mark.gpu
def test_a_gpu_finds_the_same() -> None:
    split, module = plain_split(), Plain()
    found = {}
    for where in ("cpu", "cuda"):
        running = trainer(1, accelerator=where)
        ways: list[Any] = ["model", "dot"]
        found[where] = [lgd.best_links(running, module, split, score=way, budget_bytes=16 << 20) for way in ways]
    for ours, theirs in zip(found["cpu"], found["cuda"], strict=True):
        assert ours is not None and theirs is not None
        assert theirs.receivers.equal(ours.receivers) and theirs.scores.equal(ours.scores)


class Silent(pl.LightningModule):
    """Has no layers."""


class Broken(Plain):
    """Returns what ``said`` makes of its scores."""

    said: Any = None

    def forward(self, batch: Any) -> Tensor:
        scores: Tensor = type(self).said(super().forward(batch), batch)
        return scores


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (lambda scores, batch: scores[:-1], r"forward\(\) of Broken returned a tensor of \(302,\) for the 303 pairs"),
        (lambda scores, batch: scores + batch.x.sum(), r"forward\(\) of Broken reads more of a batch than the rows"),
        (lambda scores, batch: scores * torch.nan, r"The score of sender 3 with a receiver is NaN"),
    ],
)
def test_scores_that_are_none_are_refused(said: Any, message: str) -> None:
    Broken.said = staticmethod(said)
    with pytest.raises((TypeError, ValueError), match=message):
        lgd.best_links(trainer(1), Broken(), plain_split(), senders=[3, 5, 9])


def timed() -> lgd.LinkSplit:
    data = Data(torch.randn(30, 6), torch.randint(30, (2, 200)))
    data.edge_time = torch.arange(200)
    return lgd.split_edges(lgd.Graph.from_pyg(data), negatives=2, time="edge_time")


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Silent, {}, "Silent has no method layers"),
        (Plain, {"split": timed}, r"of a split by time \(edge_time\) a node has rows at the times of its events"),
        (Plain, {"senders": [101]}, r"senders must lie in \[0, 101\), got 101\."),
        (Plain, {"senders": [3, 3]}, "senders must be distinct, got 3 more than once"),
        (Plain, {"score": "cosine"}, "score must be one of"),
        (Plain, {"leave_out": ["train"]}, "leave_out must be one of"),
        (Plain, {"path": "links.tsv"}, "rows are written as .npy, .parquet or .csv"),
    ],
)
def test_what_cannot_be_is_refused(model: Any, options: dict[str, Any], message: str) -> None:
    split = options.pop("split", plain_split)()
    with pytest.raises((TypeError, ValueError), match=message):
        lgd.best_links(trainer(1), model(), split, **options)


# Tables of links, whose nodes have the ids of the tables that their graph was prepared from.


def write(rank: int, world_size: int, folder: Path) -> None:
    split = lgd.split_edges(lgd.Graph.open(folder / "graph"), negatives=1)
    how: dict[str, Any] = {"score": "dot", "senders": [5, 3], "k": 99, "leave_out": ["edges", "val", "test"]}
    lgd.best_links(start(), Rows(), split, folder / "links.parquet", ids_of=folder / "graph", **how)


def test_tables_have_the_ids_of_users(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    graph = lgd.Graph.open(prepared(tmp_path))
    run_ranks(write, 2, tmp_path)
    table = parquet.read_table(tmp_path / "links.parquet").to_pydict()
    edges: Any = graph.to_pyg().edge_index
    linked = {(s, r) for s, r in edges.T.tolist()}
    found = list(zip(table["sender"], table["receiver"], strict=True))
    assert found[0][0] == NAMES[5] and {sender for sender, _ in found} == {NAMES[5], NAMES[3]}
    assert set(found) == {(NAMES[s], NAMES[r]) for s in (5, 3) for r in range(COUNT) if (s, r) not in linked}
    shown: Any = lgd.split_edges(graph, negatives=1).graph.to_pyg().edge_index
    split_rows = Rows().conv(graph.node_arrays["x"], shown).detach()
    scores = [float(split_rows[NAMES.index(s)] @ split_rows[NAMES.index(r)]) for s, r in found]
    np.testing.assert_allclose(table["score"], scores, atol=1e-4)
