"""Every node's row is in the file, at its place, whatever the number of ranks; and nothing else is left behind."""

import errno
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph.storage import parquet_rows
from lightning_gnn_dist.graph.storage.parquet_rows import write_table
from lightning_gnn_dist.graph.user_ids import NodeColumns, class_names, columns_for, nodes_with_ids, user_ids
from tests.data_fitting import full_graph_logits, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE

NUM_NODES = 301  # two and three ranks have unequal shares


class Speaker(SAGE):
    """Predicts logits, or whatever it is told to."""

    said: Any = None

    def predict_step(self, batch: Any) -> Any:
        logits = self(batch)
        return logits if self.said is None else self.said(logits, batch)


def graph() -> lgd.Graph:
    return lgd.communities(NUM_NODES, 4, num_features=8)


def predict(path: Path, world_size: int, said: Any = None, **options: Any) -> None:
    pl.seed_everything(0, verbose=False)
    model = Speaker(8, 4)
    model.said = said
    data = lgd.PartitionedDataModule(
        graph(), sampler=lgd.NeighborSampler([3, 3]), batch_size=16, evaluation=lgd.Evaluation(batch_size=40)
    )
    writer = lgd.PredictionWriter(path, overwrite=options.pop("overwrite", False))
    strategy = lgd.LocalSGDStrategy() if world_size > 1 else "auto"
    predictor = trainer(world_size, strategy, callbacks=[writer], **options)
    assert predictor.predict(model, data, return_predictions=False) is None


def on_the_whole_graph() -> Tensor:
    """The same model, full batch."""
    pl.seed_everything(0, verbose=False)
    return full_graph_logits(Speaker(8, 4), graph())


def predict_on_rank(rank: int, world_size: int, path: Path) -> None:
    predict(path, world_size)
    assert path.exists()  # on every rank, as soon as it returns


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_file_holds_what_one_process_would_say(world_size: int, tmp_path: Path) -> None:
    path = tmp_path / "there" / "logits.npy"
    run_ranks(predict_on_rank, world_size, path)
    found = np.load(path)
    assert found.dtype == np.float32 and found.shape == (NUM_NODES, 4)
    assert torch.allclose(torch.from_numpy(found), on_the_whole_graph(), atol=1e-5)
    assert [file.name for file in path.parent.iterdir()] == ["logits.npy"]


@pytest.mark.parametrize(
    ("said", "dtype", "shape"),
    [
        (lambda logits, batch: logits.argmax(1), np.int64, ()),
        (lambda logits, batch: logits.bfloat16(), np.float32, (4,)),
        (lambda logits, batch: logits.view(-1, 2, 2).half(), np.float16, (2, 2)),
    ],
)
def test_rows_may_be_of_any_kind(said: Any, dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    predict(tmp_path / "rows.npy", 1, said)
    found = np.load(tmp_path / "rows.npy")
    assert found.dtype == dtype and found.shape == (NUM_NODES, *shape)


def test_rows_beyond_the_seeds_are_left_out(tmp_path: Path) -> None:
    predict(tmp_path / "rows.npy", 1, lambda logits, batch: batch.n_id)
    assert np.load(tmp_path / "rows.npy").tolist() == list(range(NUM_NODES))


def ragged(logits: Tensor, batch: Any) -> Tensor:
    return logits if batch.n_id[0] == 0 else logits[:, :2]


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        (lambda logits, batch: (batch.n_id, logits), TypeError, "it returned a tuple: return logits or embeddings"),
        (lambda logits, batch: logits[:2], TypeError, r"it returned a tensor of \(2, 4\)"),
        (ragged, ValueError, r"returned float32 \(\d+, 2\) for \d+ seeds, after rows of float32 \(4,\)"),
    ],
)
def test_other_results_are_refused_and_no_draft_is_left(said, error, message, tmp_path) -> None:
    with pytest.raises(error, match=message):
        predict(tmp_path / "rows.npy", 1, said)
    assert not list(tmp_path.iterdir())


def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "rows.npy"
    predict(path, 1)
    with pytest.raises(FileExistsError, match=r"rows\.npy exists already.*overwrite=True"):
        predict(path, 1)
    predict(path, 1, lambda logits, batch: logits.argmax(1), overwrite=True)
    assert np.load(path).dtype == np.int64


def test_what_would_leave_holes_is_refused(tmp_path: Path) -> None:
    for limit in (2, 1):
        with pytest.raises(ValueError, match=f"limit_predict_batches={limit} would leave rows without a prediction"):
            predict(tmp_path / "rows.npy", 1, limit_predict_batches=limit)
    with pytest.raises(ValueError, match=r"written as .npy, .parquet or .csv, and 'rows.pt' ends otherwise"):
        lgd.PredictionWriter("rows.pt")


def test_ids_of_a_larger_graph_are_refused(tmp_path: Path) -> None:
    part = lgd.communities(200, 4).induced(torch.arange(0, 200, 2))
    data = lgd.PartitionedDataModule(part, sampler=lgd.NeighborSampler([2]), batch_size=10)
    predictor = trainer(1, callbacks=[lgd.PredictionWriter(tmp_path / "a.npy")])
    model = pl.LightningModule()
    model.predict_step = lambda batch: batch.x[: batch.batch_size]  # type: ignore[method-assign, assignment]
    with pytest.raises(ValueError, match=r"a row for node \d+, and the graph has 100 nodes .*node_arrays\.pop"):
        predictor.predict(model, data, return_predictions=False)
    assert not list(tmp_path.iterdir())
    del part.node_arrays["n_id"]
    predictor.predict(model, data, return_predictions=False)
    assert np.load(tmp_path / "a.npy").shape == (100, 64)


def fail_on_one_rank(rank: int, world_size: int, path: Path) -> None:
    def said(logits: Tensor, batch: Any) -> Tensor:
        if rank == 1 and batch.n_id[0] > NUM_NODES // 2 + 50:
            raise OSError(errno.EIO, "the model broke")
        return logits

    predict(path, world_size, said)


def test_a_rank_that_fails_leaves_no_half_file(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="the model broke"):
        run_ranks(fail_on_one_rank, 2, tmp_path / "rows.npy", grace=1)
    assert not list(tmp_path.iterdir())


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, content, place: whole(file, content[:100], place))
    predict(tmp_path / "rows.npy", 1)
    assert torch.allclose(torch.from_numpy(np.load(tmp_path / "rows.npy")), on_the_whole_graph(), atol=1e-5)


# Predictions and links as tables, whose nodes have the ids of the tables that their graph was prepared from.


COUNT = 41
NAMES = [f"W{7 * place % COUNT:02d}" for place in range(COUNT)]


class Rows(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = SAGEConv(2, 3)

    def layers(self) -> Any:
        return [lambda batch: self.conv(batch.x, batch.edge_index)]

    def forward(self, batch: Any) -> Tensor:
        rows: Tensor = lgd.through_layers(self, batch)
        return rows


def prepared(folder: Path, words: bool = True) -> Path:
    """A graph out of tables in which ids are words, or numbers in no order."""
    draw = np.random.default_rng(0)
    names = NAMES if words else [str(int(name[1:]) * 1000) for name in NAMES]
    rows = [f"{name},{value},{-value}" for name, value in zip(names, draw.integers(9, size=COUNT), strict=True)]
    (folder / "nodes.csv").write_text("\n".join(["id,a,b", *rows]))
    pairs = [f"{names[a]},{names[b]}" for a, b in draw.integers(COUNT, size=(90, 2)) if a != b]
    (folder / "edges.csv").write_text("\n".join(["source,target", *pairs]))
    return prepared_from(folder, "graph")


def prepared_from(folder: Path, name: str) -> Path:
    lgd.prepare_graph(folder / "edges.csv", folder / name, nodes=folder / "nodes.csv", undirected=True)
    return folder / name


def by_hand(graph: lgd.Graph) -> Tensor:
    rows: Tensor = Rows().conv(graph.node_arrays["x"], graph.to_pyg().edge_index).detach()
    return rows


def test_ids_of_tables_stay_with_the_graph(tmp_path: Path) -> None:
    graph = prepared(tmp_path)
    assert user_ids(graph).tolist() == NAMES
    assert nodes_with_ids(graph, [NAMES[7], NAMES[0], NAMES[7]]).tolist() == [7, 0, 7]
    with pytest.raises(ValueError, match=r"no node of .*graph has the id 'W99'"):
        nodes_with_ids(graph, [NAMES[7], "W99"])
    lgd.Graph.open(graph).save(tmp_path / "copy")
    assert user_ids(tmp_path / "copy").tolist() == NAMES
    lgd.Graph.from_pyg(lgd.Graph.open(graph).to_pyg()).save(tmp_path / "other")
    with pytest.raises(ValueError, match="other has no such ids of nodes: `prepare` keeps them"):
        user_ids(tmp_path / "other")


def test_ids_may_be_numbers(tmp_path: Path) -> None:
    graph = prepared(tmp_path, words=False)
    assert user_ids(graph).tolist() == [int(name[1:]) * 1000 for name in NAMES]
    assert nodes_with_ids(graph, ["7000", "0"]).tolist() == [1, 0] == nodes_with_ids(graph, [7000, 0]).tolist()
    with pytest.raises(ValueError, match=r"ids must be numbers, as those of .*graph are, got \['W7'\]"):
        nodes_with_ids(graph, ["W7"])
    for odd in (7000.5, 2**64 - 1):
        with pytest.raises(ValueError, match=rf"ids must be whole numbers, as those of .*graph are, got \[{odd}\]"):
            nodes_with_ids(graph, [odd])
    with pytest.raises(ValueError, match=r"ids must be numbers, as those of .*graph are, got \[None\]"):
        nodes_with_ids(graph, [None])


def test_ids_that_are_words_may_be_large_numbers(tmp_path: Path) -> None:
    ids = [2**63 + 1, 5, 2**63 + 2]
    (tmp_path / "edges.csv").write_text(f"a,b\n{ids[0]},{ids[1]}\n{ids[1]},w\n")
    (tmp_path / "nodes.csv").write_text("id,f\n" + "".join(f"{each},1\n" for each in [*ids, "w"]))
    graph = prepared_from(tmp_path, "graph")
    assert user_ids(graph).tolist() == [*map(str, ids), "w"]
    assert nodes_with_ids(graph, [2**63 + 1, 2**63 + 2, 5]).tolist() == [0, 2, 1]


def test_columns_of_a_question_stay_beside_what_is_predicted() -> None:
    asked = {"row": np.array([5, 6]), "class": np.array(["p", "q"])}
    found = NodeColumns(own=asked, classes=["no", "yes"])(1, np.array([[0.1, 0.9]]))
    assert {name: column.tolist() for name, column in found.items()} == {
        "row": [6],
        "class": ["q"],
        "predicted_row": [[0.1, 0.9]],
        "predicted_class": ["yes"],
    }


def start(*callbacks: Any) -> pl.Trainer:
    return trainer(2, lgd.GrappaStrategy(**PATIENCE), callbacks=list(callbacks))


def write(rank: int, world_size: int, folder: Path) -> None:
    graph, module = folder / "graph", Rows()
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([5]))
    some = data.only(nodes_with_ids(graph, ["W21"]))  # fewer than ranks
    for name, asked in (("all", data), ("some", some)):
        writer = lgd.PredictionWriter(folder / "out" / f"{name}.parquet")
        start(writer).predict(module, asked, return_predictions=False)
    writer = lgd.PredictionWriter(folder / "out" / "some.npy")
    start(writer).predict(module, some, return_predictions=False)


def test_tables_have_the_ids_of_users(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow.parquet")
    graph = lgd.Graph.open(prepared(tmp_path))
    run_ranks(write, 2, tmp_path)
    rows, out = by_hand(graph), tmp_path / "out"
    for name, nodes in (("all", range(COUNT)), ("some", [NAMES.index("W21")])):
        check(out / f"{name}.parquet", [NAMES[node] for node in nodes], NAMES, rows)
    np.testing.assert_allclose(np.load(out / "some.npy"), rows[[NAMES.index("W21")]], atol=1e-5)
    assert {path.suffix for path in out.iterdir()} == {".npy", ".parquet"}


def test_rows_of_many_pieces_are_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(parquet_rows, "_BYTES_AT_ONCE", 64)
    rows = np.arange(90, dtype=np.int64).reshape(15, 3, 2)
    np.save(tmp_path / "rows.npy", rows)
    parquet_rows.write_table(tmp_path / "rows.npy", tmp_path / "t.parquet", lambda first, some: {"row": some})
    table = parquet.read_table(tmp_path / "t.parquet")
    assert table.column("row").to_pylist() == rows.reshape(15, 6).tolist()


@pytest.mark.parametrize(
    ("path", "ids_of", "message"),
    [
        ("rows.tsv", None, "rows are written as .npy, .parquet or .csv, and 'rows.tsv' ends otherwise"),
        ("rows.npy", "graph", r"ids_of='graph' names nodes in a table: write one, .parquet"),
        ("rows.parquet", "nowhere", "nowhere has no such ids of nodes"),
    ],
)
def test_other_files_are_refused(path: str, ids_of: str | None, message: str) -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match=message):
        lgd.PredictionWriter(path, ids_of=ids_of)


def test_without_pyarrow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_rows, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r'pip install "lightning-gnn-dist\[tables\]", or .* a file that ends in .npy'):
        lgd.PredictionWriter("rows.parquet")


def test_words_of_labels_are_there_in_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In text a column for each number of a row."""
    (tmp_path / "nodes.csv").write_text("id,label,a\nx,cat,1\ny,,2\nz,ant,3\nw,bee,4\n")
    (tmp_path / "edges.csv").write_text("source,target\nx,y\ny,z\n")
    graph = prepared_from(tmp_path, "graph")
    assert class_names(graph) == ["ant", "bee", "cat"] and lgd.Graph.open(graph).node_arrays["y"].tolist() == [
        2,
        -1,
        0,
        1,
    ]
    main(["inspect", str(graph)])
    assert "labels of nodes: ['ant', 'bee', 'cat'], numbered from 0" in capsys.readouterr().out
    rows = np.array([[0, 1, 2], [5, 1, 1], [0, 3, 1], [1, 0, 0]], np.float32)
    for suffix, given in ((".csv", rows), (".parquet", rows.argmax(1))):
        np.save(tmp_path / "rows.npy", given)
        write_table(tmp_path / "rows.npy", tmp_path / f"out{suffix}", columns_for(None, graph, "", 4), suffix)
    said = (tmp_path / "out.csv").read_text().replace('"', "").splitlines()
    assert said[:2] == ["node,row_0,row_1,row_2,class", "x,0,1,2,cat"] and said[4] == "w,1,0,0,ant"
    found = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "out.parquet").to_pydict()
    assert found == {"node": ["x", "y", "z", "w"], "row": [2, 0, 1, 0], "class": ["cat", "ant", "bee", "ant"]}


def check(file: Path, names: list[Any], known: list[Any], rows: Tensor) -> None:
    table = pytest.importorskip("pyarrow.parquet").read_table(file).to_pydict()
    assert table["node"] == names
    np.testing.assert_allclose(table["row"], rows[[known.index(name) for name in names]], atol=1e-5)
