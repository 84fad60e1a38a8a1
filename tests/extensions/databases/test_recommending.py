"""Tasks that recommend: trees, answers and MAP@k are those of a walk through the tables by hand, on 1 and 2 ranks."""

import csv
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.databases.column_encoder import read_tables
from lightning_gnn_dist.extensions.links.ranking import (
    MeanAveragePrecision,
    Recommended,
    RecommendingHead,
    Said,
    average_precision,
    highest,
)
from lightning_gnn_dist.extensions.serving.answering import Answerer
from lightning_gnn_dist.extensions.serving.question import Limits
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from tests.data_fitting import trainer
from tests.extensions.databases.folders import write_shop
from tests.ranks import run_ranks

K, HOPS, ANSWERS = 3, 3, ("buys", "answer", "product")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder / "shop", 30, 8)
    manifest = folder / "shop" / "tasks" / "buys" / "manifest.yaml"
    manifest.write_text(manifest.read_text().replace("eval_k: 10", f"eval_k: {K}"))
    lgd.prepare_graph(folder / "shop", folder / "graph")
    return folder


def seconds(date: str) -> int:
    return int(datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp())


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def numbers_of(kind: str, ids: Tensor) -> Tensor:
    """Two numbers of each node, which no other has."""
    return torch.stack([(ids * 7 + len(kind)).double().sin(), (ids * 3 + 1).double().cos()], 1)


class Sums(pl.LightningModule):
    """Adds up, in each of three hops, what a node and those before it have."""

    def __init__(self) -> None:
        super().__init__()
        self.map, self.step_size = MeanAveragePrecision(ANSWERS, K), nn.Parameter(torch.zeros(()))
        self.asked: list[tuple[int, int, int]] = []

    def said(self, batch: Any) -> Said:
        x = {kind: numbers_of(kind, batch[kind].n_id) for kind in batch.node_types}
        for blocks in batch.blocks:
            made = {kind: x[kind][: block.num_dst] for (_, _, kind), block in blocks.items()}
            for (source, _, target), block in blocks.items():
                made[target] = made[target] + block.adj @ x[source]
            x = made | {kind: rows for kind, rows in x.items() if kind not in made}
        return Said(x["buys"][: batch["buys"].batch_size], x["product"][: batch["product"].batch_size])

    def training_step(self, batch: Any) -> Tensor:
        for kind in batch.edge_types:
            if kind == ANSWERS:
                assert not batch[kind].num_sampled_edges[0] and not batch[kind].edge_index.numel()
        for kind in ("order", "review"):
            assert (batch[kind].time < batch[ANSWERS].seed_time[batch[kind].batch]).all()
        targets = batch[ANSWERS]
        sender, receiver = targets.edge_label_index
        ids = batch["buys"].n_id[sender].tolist(), batch["product"].n_id[receiver].tolist()
        self.asked += zip(*ids, targets.edge_label.int().tolist(), strict=True)
        for kind, ends in (("buys", sender), ("product", receiver)):
            assert targets.seed_time[batch[kind].batch[ends]].equal(targets.edge_label_time)
        return self.step_size * 0

    def test_step(self, batch: Any) -> None:
        self.map.update(self.said(batch), batch)
        self.log("map", self.map, batch_size=1)

    def validation_step(self, batch: Any) -> None:
        self.test_step(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def judged(rank: int, world_size: int, path: str) -> tuple[dict[str, float], Any, Any, list[tuple[int, int, int]]]:
    strategy: Any = "auto" if world_size == 1 else lgd.GrappaStrategy()
    running = trainer(world_size, strategy, max_epochs=1)
    sampler = lgd.TemporalSampler([-1] * HOPS, "time")
    data = lgd.LinkDataModule(path, task="buys", sampler=sampler, batch_size=16, num_negatives=2)
    module = Sums()
    running.fit(module, data)
    (figures,) = running.test(module, data, verbose=False)
    figures |= {"val": float(running.validate(module, data, verbose=False)[0]["map"])}
    running.test(module, data, verbose=False)
    assert module.map.best is not None
    return figures, module.map.best.questions, module.map.best, module.asked


class Tables:
    """The shop by hand: who sends to whom, since when, and the right answers of each question."""

    def __init__(self, folder: Path) -> None:
        tables = {name: rows_of(folder / f"{name}.csv") for name in ("customer", "product", "order", "review")}
        self.questions = rows_of(folder / "tasks" / "buys" / "labels.csv")
        self.products = {row["id"]: at for at, row in enumerate(tables["product"])}
        self.into: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
        for at, row in enumerate(tables["order"]):
            ends = ("customer", int(row["customer_id"])), ("product", self.products[row["product_id"]])
            joined = [seconds(tables["customer"][int(row["customer_id"])]["joined"]), -1]
            for end, since in zip(ends, joined, strict=True):
                self.into.setdefault(end, []).append(("order", at, seconds(row["at"])))
                self.into.setdefault(("order", at), []).append((*end, since))
        for at, row in enumerate(tables["review"]):
            order = int(row["order_id"])
            self.into.setdefault(("order", order), []).append(("review", at, seconds(row["at"])))
            self.into.setdefault(("review", at), []).append(("order", order, seconds(tables["order"][order]["at"])))
        for at, row in enumerate(self.questions):
            self.into["buys", at] = [("customer", int(row["customer_id"]), -1)]

    @cache  # noqa: B019
    def row(self, kind: str, node: int, time: int, hops: int) -> Tensor:
        if hops == 0:
            return numbers_of(kind, torch.tensor([node]))[0]
        senders = [end for end in self.into.get((kind, node), []) if end[2] < time]
        return sum((self.row(*end[:2], time, hops - 1) for end in senders), self.row(kind, node, time, hops - 1))

    def judge(self, first: str, last: str) -> tuple[float, dict[int, list[int]]]:
        """MAP@K of the questions of some days, and what is recommended to each."""
        found, precisions = dict[int, list[int]](), list[float]()
        for at, question in enumerate(self.questions):
            if not first <= question["at"] < last:
                continue
            time, right = seconds(question["at"]), {self.products[key] for key in question["product_ids"].split()}
            asked = self.row("buys", at, time, HOPS)
            scores = [float(asked @ self.row("product", r, time, HOPS)) for r in range(len(self.products))]
            best = sorted(range(len(scores)), key=lambda r: (-scores[r], r))[:K]
            found[at] = best
            hits = [sum(r in right for r in best[: i + 1]) / (i + 1) for i in range(K) if best[i] in right]
            precisions.append(sum(hits) / min(len(right), K))
        return sum(precisions) / len(precisions), found


def test_it_is_the_walk_by_hand(shop: Path) -> None:
    tables = Tables(shop / "shop")
    expected, best = tables.judge("2024-06-24", "9")
    of_val, _ = tables.judge("2024-03-16", "2024-06-24")
    train = {
        (at, tables.products[key])
        for at, row in enumerate(tables.questions)
        if row["at"] < "2024-03-16"
        for key in row["product_ids"].split()
    }
    for world_size in (1, 2):
        ranks = run_ranks(judged, world_size, str(shop / "graph"))
        for figures, questions, found, _ in ranks:
            assert figures["map"] == pytest.approx(expected, abs=1e-6) and 0 < expected < 1
            assert figures["val"] == pytest.approx(of_val, abs=1e-6)
            assert dict(zip(questions.tolist(), found.receivers.tolist(), strict=True)) == best
        asked = [each for *_, of_rank in ranks for each in of_rank]
        right = [(question, receiver) for question, receiver, label in asked if label]
        assert set(right) == train and len(right) == sum(
            len(row["product_ids"].split()) for row in tables.questions if row["at"] < "2024-03-16"
        )
        false = {(question, receiver) for question, receiver, label in asked if not label}
        assert false and not false & train


class Recommends(Sums):
    """Says what it recommends, of sums of its own."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.head = RecommendingHead(read_tables(path), "buys", 2)

    def predict_step(self, batch: Any) -> Recommended:
        return self.head.answer(self.said(batch), batch)


def predicted(
    rank: int, world_size: int, path: str, out: str
) -> tuple[list[tuple[int, list[int], list[float]]], list[int]]:
    def writing(*names: str) -> pl.Trainer:
        strategy: Any = "auto" if world_size == 1 else lgd.GrappaStrategy()
        writers: Any = [lgd.PredictionWriter(Path(out, name)) for name in names]
        return trainer(world_size, strategy, callbacks=writers)

    sampler = lgd.TemporalSampler([-1] * HOPS, "time")
    data, module = lgd.LinkDataModule(path, task="buys", sampler=sampler, batch_size=16), Recommends(path)
    found: Any = writing("all.npy", "all.parquet").predict(module, data)
    assert all(len(each.questions) == 0 for each in found[:-1])
    few: Any = writing("some.npy").predict(module, data.only([40, 3, 17]))
    rows = [(q, r, s) for q, r, s in zip(*(part.tolist() for part in found[-1]), strict=True)]
    return rows, few[-1].questions.tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_predictions_are_the_walk_by_hand(world_size: int, shop: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    tables = Tables(shop / "shop")
    _, best = tables.judge("0", "9")
    ranks = run_ranks(predicted, world_size, str(shop / "graph"), str(tmp_path))
    found = {question: (ids, scores) for rows, _ in ranks for question, ids, scores in rows}
    assert len(found) == sum(len(rows) for rows, _ in ranks) == len(best) > 50
    assert {question: ids for question, (ids, _) in found.items()} == best
    for question in (0, 40, len(best) - 1):
        time = seconds(tables.questions[question]["at"])
        asked = tables.row("buys", question, time, HOPS)
        expected = [float(asked @ tables.row("product", r, time, HOPS)) for r in best[question]]
        assert found[question][1] == pytest.approx(expected, rel=1e-5)
    written = np.load(tmp_path / "all.npy")
    assert written["receiver"].tolist() == [best[question] for question in range(len(best))]
    assert written["score"].tolist() == [found[question][1] for question in range(len(best))]
    keys = list(tables.products)
    expected_rows = [
        (at, int(row["customer_id"]), datetime.fromisoformat(row["at"]), keys[r], score)
        for at, row in enumerate(tables.questions)
        for r, score in zip(best[at], found[at][1], strict=True)
    ]
    table = parquet.read_table(tmp_path / "all.parquet").to_pydict()
    assert list(table) == ["question", "sender", "time", "receiver", "score"]
    assert list(zip(*table.values(), strict=True)) == expected_rows
    assert np.load(tmp_path / "some.npy")["receiver"].tolist() == [best[question] for question in (40, 3, 17)]
    assert sorted(question for _, few in ranks for question in few) == [3, 17, 40]


def test_a_prediction_that_was_broken_off_leaves_nothing(shop: Path) -> None:
    path = str(shop / "graph")
    data, module = lgd.LinkDataModule(path, task="buys", batch_size=16), Recommends(path)
    batches = list(data.predict_dataloader())
    with torch.no_grad():
        fresh = [module.predict_step(batch) for batch in batches][-1]
        for batch in batches[:2]:
            module.predict_step(batch)
        again = [module.predict_step(batch) for batch in batches][-1]
    assert len(fresh.questions) > 50
    assert all(one.equal(other) for one, other in zip(fresh, again, strict=True))


def test_its_figure_by_hand() -> None:
    """More right answers than places, an answer given twice, and a question without any."""
    found = torch.tensor([[4, 1, 9], [2, 3, 4], [0, 1, 2], [7, -1, -1]])
    right = torch.tensor([[10, 1], [10, 9], [20, 2], [20, 2], [20, 5], [20, 6], [20, 7], [40, 8]])
    expected = ((1 / 2 + 2 / 3) / 2 + (1 / 1) / 3 + 0) / 3
    assert float(average_precision(torch.tensor([10, 20, 30, 40]), found, right)) == pytest.approx(expected)


@pytest.mark.parametrize(("count", "k"), [(40, 5), (40, 40), (3, 5), (0, 2)])
def test_of_equal_scores_the_first_is_the_best(count: int, k: int) -> None:
    scores = torch.randint(-3, 3, (30, count), generator=torch.Generator().manual_seed(0)).double()
    expected = [sorted(range(count), key=lambda at, row=row: (-row[at], at))[:k] for row in scores.tolist()]
    assert highest(scores, k).tolist() == expected


def test_the_loss_is_that_of_each_answer_among_its_false_ones(shop: Path) -> None:
    tables = read_tables(shop / "graph")
    head, data = RecommendingHead(tables, "buys", 4), lgd.LinkDataModule(shop / "graph", task="buys", num_negatives=2)
    assert data.sampler == lgd.TemporalSampler([16, 8, 4], "time", pick="latest")
    batch: Any = next(iter(data.train_dataloader()))
    rows = {kind: torch.randn(batch[kind].num_nodes, 4) for kind in ("buys", "product")}
    sender, receiver = batch[ANSWERS].edge_label_index
    scores = (rows["buys"][sender] @ head.linear.weight.T * rows["product"][receiver]).sum(1)
    count = int(batch[ANSWERS].edge_label.sum())
    odds = torch.cat([scores[:count, None], scores[count:].view(count, 2)], 1).softmax(1)
    assert torch.allclose(head.loss(head(rows, batch), batch), -odds[:, 0].log().mean())


def test_what_does_not_go_together_is_refused(shop: Path) -> None:
    path = shop / "graph"
    with pytest.raises(ValueError, match=r"task must be a task that recommends, one of \['buys'\], got 'stays'. Part"):
        lgd.LinkDataModule(path, task="stays")
    with pytest.raises(ValueError, match=r"'buys' recommends, and has no labels: .*LinkDataModule"):
        lgd.PartitionedDataModule(path, task="buys")
    with pytest.raises(ValueError, match=r"task must be one of \['buys', 'stays'\], got 'by'"):
        lgd.PartitionedDataModule(path, task="by")
    with pytest.raises(ValueError, match=r"does not draw by these: take TemporalSampler"):
        lgd.LinkDataModule(path, task="buys", sampler=lgd.TemporalSampler([4], "edge_time"))
    for index in range(2):
        lgd.prepare_graph(shop / "shop", shop / "shards", shard=OneShard(index, 2))
    with pytest.raises(ValueError, match=r"task='buys' from the whole graph, and .*shards holds shards: .*--shard"):
        lgd.LinkDataModule(shop / "shards", task="buys")
    with pytest.raises(ValueError, match=r"'buys' recommends, and has no labels: .*LinkDataModule"):
        lgd.PartitionedDataModule(shop / "shards", task="buys")
    data = lgd.LinkDataModule(path, task="buys")
    with pytest.raises(ValueError, match=r"nodes must lie in \[0, "):
        data.only([10**6])
    limited = trainer(1, limit_predict_batches=1)
    with pytest.raises(ValueError, match="limit_predict_batches would leave out receivers"):
        limited.predict(Recommends(str(path)), data)
    with pytest.raises(TypeError, match="data must be a PartitionedDataModule, whose nodes are predicted"):
        Answerer(limited, Recommends(str(path)), data, Limits(), 10)
