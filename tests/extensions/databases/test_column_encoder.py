"""Columns become rows that a model learns from, by hand; a task hides its columns; what a head says is judged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.databases.column_encoder import ColumnEncoder, read_tables
from lightning_gnn_dist.extensions.databases.task_head import TaskHead, head_of
from lightning_gnn_dist.graph.typed.tables import TIME, UNSEEN, Tables, TableTask
from tests.extensions.databases.folders import FILES, TASK, write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The small database with a task beside the first, which hides prices and due dates."""
    hides = TASK.replace("stays", "comes") + "remove_columns: [[order, price], [order, due]]\n"
    labels = FILES["tasks/stays/labels.csv"].replace("stays", "comes")
    more = {"tasks/comes/manifest.yaml": hides, "tasks/comes/labels.csv": labels}
    lgd.prepare_graph(write(tmp_path / "source", FILES | more), tmp_path / "graph")
    return tmp_path / "graph"


def batch_of(path: Path, task: str) -> HeteroData:
    data = lgd.PartitionedDataModule(path, task=task, batch_size=8)
    (batch,) = data.train_dataloader()
    assert isinstance(batch, HeteroData)
    return batch


def test_rows_are_these(path: Path) -> None:
    tables, batch = read_tables(path), batch_of(path, "stays")
    encoder = ColumnEncoder(tables, "stays", 4)
    found, orders, of_order = encoder(batch), batch["order"], encoder.of_tables["of_order"]
    assert found["stays"].shape == (3, 4) and not found["stays"].any()
    seed_times = batch["stays"].seed_time[orders.batch]
    names = ("price_x", "x", "due_x")
    numbers = [orders[f.array][:, f.first : f.first + f.width] for f in tables.features["order"] if f.array in names]
    for moment in (orders.due_moments[:, 0], orders.time):
        age = torch.where(moment < 0, 0, (seed_times - moment).double() / tables.span).float()
        numbers += [torch.stack([(100 * age.abs()).log1p(), age, age.sign()], 1)]
    expected = torch.cat(numbers, 1) @ of_order.linear.weight.T + of_order.linear.bias
    expected += of_order.embedding.weight[orders.categories[:, 0].long()]
    assert orders.num_nodes > 0 and torch.allclose(found["order"], expected, atol=1e-5)


def test_the_row_of_unseen_categories_trains(path: Path) -> None:
    """Words that were seen once share it."""
    batch = batch_of(path, "stays")
    batch["customer"].categories = torch.full_like(batch["customer"].categories, UNSEEN)
    encoder = ColumnEncoder(read_tables(path), "stays", 4)
    encoder(batch)["customer"].sum().backward()
    gradient = encoder.of_tables["of_customer"].embedding.weight.grad
    assert gradient.any(1).tolist() == [False, True, False, False]


def test_a_task_does_not_see_what_it_hides(path: Path) -> None:
    tables = read_tables(path)
    widths = {task: ColumnEncoder(tables, task, 4).of_tables["of_order"].linear.in_features for task in tables.tasks}
    assert widths["stays"] - widths["comes"] == 1 + 4 + 1 + 3  # the price; day of week and year, or none, and age
    batch = batch_of(path, "comes")
    assert not {"price_x", "due_x", "due_moments"} & set(batch["order"].keys())
    assert ColumnEncoder(tables, "comes", 4)(batch)["order"].shape == (batch["order"].num_nodes, 4)


@pytest.mark.parametrize(
    ("task_type", "columns"), [("regression", ["cost"]), ("multilabel_classification", ["big", "red"])]
)
def test_a_column_that_is_predicted_is_no_feature(tmp_path: Path, task_type: str, columns: list[str]) -> None:
    """Whatever is in it, batches are the same but for labels; the other columns of its rows are there."""
    task = f"kind: autocomplete\ntask_type: {task_type}\nentity_table: order\ntarget_col: [{', '.join(columns)}]\n"
    heading, *rows = FILES["order.csv"].splitlines()
    batches = []
    for shift in range(2):
        cells = [{"cost": at % 4, "big": at % 2, "red": at // 2 % 2} for at in range(len(rows))]
        for row in cells:
            row |= {column: (row[column] + shift) % (4 if column == "cost" else 2) for column in columns}
        orders = [f"{row},{','.join(map(str, of.values()))}" for row, of in zip(rows, cells, strict=True)]
        keys = [(row.split(",")[0], row.split(",")[3]) for row in rows]
        labels = [",".join(map(str, [*key, *map(of.get, columns)])) for key, of in zip(keys, cells, strict=True)]
        more = {
            "order.csv": "\n".join([f"{heading},cost,big,red", *orders]),
            "tasks/guess/manifest.yaml": task,
            "tasks/guess/labels.csv": "\n".join([",".join(["number", "at", *columns]), *labels]),
        }
        path = tmp_path / f"graph{shift}"
        lgd.prepare_graph(write(tmp_path / f"source{shift}", FILES | more), path)
        batches.append(batch_of(path, "guess"))
        seen = {feature.column for feature in read_tables(path).seen_by("guess")["order"]}
        assert {"cost", "big", "red", "price"} - seen == set(columns)
    first, second = batches
    assert first["guess"].y.shape == ((4, 2) if len(columns) > 1 else (4,))
    assert not first["guess"].y.equal(second["guess"].y)
    assert first["order"].num_nodes >= 4 and set(first["order"].keys()) == set(second["order"].keys())
    for name, array in first["order"].items():
        assert not isinstance(array, torch.Tensor) or array.equal(second["order"][name]), name


def test_questions_see_what_was_before_them(path: Path) -> None:
    data = lgd.PartitionedDataModule(path, task="stays", batch_size=8)
    assert data.sampler == lgd.TemporalSampler([1, 16, 8], TIME, pick="latest")
    batch = batch_of(path, "stays")
    orders, seeds = batch["order"], batch["stays"]
    assert (orders.time < seeds.seed_time[orders.batch]).all()
    order = seeds.n_id.argsort()  # the customers a3, b7 and a3 had ordered once, once and twice, and one before these
    seen = [sorted(orders.n_id[orders.batch == tree].unique().tolist()) for tree in order.tolist()]
    assert seen == [[0], [1], [0, 2]]
    plain = lgd.PartitionedDataModule(path, task="stays", sampler=lgd.NeighborSampler([1, 4]), batch_size=8)
    ages = ColumnEncoder(read_tables(path), "stays", 4)
    assert all(rows.isfinite().all() for rows in ages(next(iter(plain.train_dataloader()))).values())


def test_shards_know_the_tables(path: Path, tmp_path: Path) -> None:
    graph = lgd.Graph.open(path)
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 1, seed=0), tmp_path / "shards")
    assert read_tables(tmp_path / "shards") == read_tables(path)
    data = lgd.PartitionedDataModule(tmp_path / "shards", task="comes")
    assert data.sampler == lgd.TemporalSampler([1, 16, 8], TIME, pick="latest")


def test_a_graph_of_other_files_has_no_tables(tmp_path: Path) -> None:
    data = HeteroData()
    data["a"].num_nodes = 2
    data["a", "to", "a"].edge_index = torch.tensor([[0], [1]])
    lgd.Graph.from_pyg(data).save(tmp_path / "graph")
    with pytest.raises(ValueError, match="was not made of tables with keys"):
        read_tables(tmp_path / "graph")


def test_a_task_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=r"task must be one of \['comes', 'stays'\], got 'goes'"):
        ColumnEncoder(read_tables(path), "goes", 4)
    with pytest.raises(ValueError, match=r"got 'user-stays'\. Did you mean 'stays'\?"):
        lgd.PartitionedDataModule(path, task="user-stays")
    with pytest.raises(ValueError, match=r"The node type 'order' has no train_mask: name a task, one of \['comes"):
        lgd.PartitionedDataModule(path, task="order").train_dataloader()
    with pytest.raises(ValueError, match=r"must be one of .*'stays'.*, got 'goes'"):
        lgd.PartitionedDataModule(path, task="goes")


HEADS: list[tuple[str, int, Any]] = [
    ("binary_classification", 1, torch.tensor([1, 0, 1, 0])),
    ("multiclass_classification", 3, torch.tensor([2, 0, 1, 2])),
    ("multilabel_classification", 2, torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]])),
    ("regression", 1, torch.tensor([5.0, 7.0, 9.0, 11.0])),
]


def average_precision(scores: list[float], y: list[int]) -> float:
    """The mean, over right ones, of the share of right ones among those that score as high."""
    ranked = [right for _, right in sorted(zip(scores, y, strict=True), reverse=True)]
    return sum(sum(ranked[: at + 1]) / (at + 1) for at, right in enumerate(ranked) if right) / sum(ranked)


@pytest.mark.parametrize(("task_type", "outputs", "y"), HEADS)
def test_what_a_head_says_is_judged(task_type: str, outputs: int, y: torch.Tensor) -> None:
    tables = Tables({}, {"t": TableTask("t", task_type, "a", outputs, mean=8.0, std=2.0)}, ())
    head, rows = head_of(tables, "t", 3), torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    batch = HeteroData({"t": {"batch_size": 4, "y": y}})
    said, metrics = head({"t": rows}, batch), head.metrics("val_")
    assert isinstance(head, TaskHead) and said.equal(head.linear(rows[:4]))
    head.judge(metrics, said, batch)
    figures = {name: float(value) for name, value in metrics.compute().items()}
    if task_type == "binary_classification":
        assert torch.allclose(head.loss(said, batch), functional.binary_cross_entropy(said.sigmoid()[:, 0], y.float()))
        pairs = said[y == 1] > said[y == 0].T
        assert figures["val_auroc"] == pytest.approx(float(pairs.float().mean()))
    elif task_type == "multiclass_classification":
        assert torch.allclose(head.loss(said, batch), -said.log_softmax(1)[range(4), y].mean())
        assert figures["val_accuracy"] == pytest.approx(float((said.argmax(1) == y).float().mean()))
    elif task_type == "multilabel_classification":
        assert torch.allclose(head.loss(said, batch), functional.binary_cross_entropy(said.sigmoid(), y.float()))
        expected = [average_precision(said[:, at].tolist(), y[:, at].tolist()) for at in range(2)]
        assert figures["val_ap"] == pytest.approx(sum(expected) / 2)
    else:
        assert torch.allclose(head.loss(said, batch), (said[:, 0] - (y - 8) / 2).abs().mean())
        said = said.detach()
        error = float((said[:, 0] * 2 + 8 - y).abs().mean())
        assert figures["val_mae"] == pytest.approx(error) and figures["val_nmae"] == pytest.approx(error / 2)
