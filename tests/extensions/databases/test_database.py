"""Tables with keys become a graph: by hand, from both layouts, after kills, in shards, and without a look ahead."""

import errno
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from zlib import crc32

import numpy as np
import pytest
import torch

from lightning_gnn_dist import Graph, Partition, PartitionedDataModule, prepare_graph, save_shards
from lightning_gnn_dist.extensions.databases.column_encoder import ColumnEncoder
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from lightning_gnn_dist.graph.typed.tables import NEVER, NO_MOMENT, Feature, Tables
from lightning_gnn_dist.graph.user_ids import columns_for, user_ids
from lightning_gnn_dist.prepare import text as text_module
from lightning_gnn_dist.prepare.engine import Table, Work
from lightning_gnn_dist.prepare.text import hash_words
from tests.extensions.databases.folders import FILES, MANIFEST, TASK, as_relbench, seconds, write
from tests.extensions.shards.test_prepare_shard import check_equal
from tests.prepare.kills import before_the_last_record, until_it_is_there

_OF_ORDERS = [("before", "order"), ("customer", "customer"), ("rev_before", "order")]


def prepared(folder: Path, files: dict[str, str | None] | None = None, **options: Any) -> Graph:
    source = write(folder / "source", FILES if files is None else files)
    prepare_graph(source, folder / "graph", **options)
    return Graph.open(folder / "graph")


def tables_of(graph: Graph) -> Tables:
    assert graph.types.tables is not None
    return graph.types.tables


def column(graph: Graph, table: str, name: str, kind: str = "x") -> np.ndarray[Any, Any]:
    """The numbers that a column became."""
    features = tables_of(graph).features[table]
    (found,) = [feature for feature in features if feature.column == name and feature.kind == kind]
    return graph.types.node_arrays[table][found.array][:, found.first : found.first + found.width].numpy()


def edges(graph: Graph, *kind: str) -> list[tuple[int, int]]:
    index = graph.to_pyg()[kind].edge_index
    return sorted(zip(*index.tolist(), strict=True))


def test_it_is_the_graph_by_hand(tmp_path: Path) -> None:
    graph = prepared(tmp_path)
    assert graph.types.node_types == ("customer", "order", "stays") and graph.types.time == "time"
    bought = [(0, 1), (1, 0), (2, 1), (4, 2), (5, 2)]  # the fourth names no customer
    assert edges(graph, "order", "customer", "customer") == bought
    assert edges(graph, "customer", "rev_customer", "order") == sorted((b, a) for a, b in bought)
    assert edges(graph, "order", "before", "order") == [(2, 0), (3, 1), (5, 4)]
    assert edges(graph, "order", "rev_before", "order") == [(0, 2), (1, 3), (4, 5)]
    assert edges(graph, "customer", "asked", "stays") == [(0, 1), (1, 0), (1, 2), (1, 3), (2, 4)]

    # Statistics are those of the orders before March: 11, 12, 13 and 16.
    price = np.array([10, 30, 20, 1000, np.nan, 20])
    before = price[[0, 1, 2, 5]]
    expected = np.nan_to_num((price - before.mean()) / before.std()).clip(-10, 10)
    assert np.allclose(column(graph, "order", "price")[:, 0], expected)  # none was missing, so nothing marks it
    assert column(graph, "order", "price").shape == (6, 1)
    age = np.array([[20, 0], [40, 1], [60, 0], [40, 0]], np.float64)  # of a table without times, all; 40 is their mean
    age[:, 0] = (age[:, 0] - 40) / np.std([20, 60, 40])
    assert np.allclose(column(graph, "customer", "age"), age)
    # 0 is missing, 1 unseen or seen once; "app" came later.
    assert column(graph, "order", "channel", "categories")[:, 0].tolist() == [3, 2, 3, 1, 3, 2]
    assert column(graph, "customer", "city", "categories")[:, 0].tolist() == [3, 2, 3, 2]
    due = [seconds(date) for date in ("2024-01-09", "2024-02-12", "2024-03-07", "2024-05-01", "2024-02-22")]
    assert column(graph, "order", "due", "moments")[:, 0].tolist() == [due[0], NO_MOMENT, *due[1:]]
    notes = ["fine", "", "very fine", "late", "never", "so so"]
    expected = np.column_stack([hash_words(notes), [0, 1, 0, 0, 0, 0]])
    assert np.allclose(column(graph, "order", "note"), expected)
    hours = 2 * np.pi * np.array([10, 10, 22, 10, 10, 10]) / 24
    assert np.allclose(column(graph, "order", "at")[:, :2], np.column_stack([np.sin(hours), np.cos(hours)]), atol=1e-6)
    time = graph.types.node_arrays["order"]["time"].tolist()
    assert time[0] == seconds("2024-01-05 10:00:00") and tables_of(graph).span == seconds("2024-03-01") - time[0]

    questions = graph.types.node_arrays["stays"]
    assert questions["y"].tolist() == [1, 0, 0, 1, 0]
    masks = [questions[f"{name}_mask"].nonzero().view(-1).tolist() for name in ("train", "val", "test")]
    assert masks == [[0, 1, 2], [3], [4]]
    asked = graph.to_pyg()["customer", "asked", "stays"]
    assert torch.equal(asked.time, questions["time"][asked.edge_index[1]] - 1)  # the row is always seen


def test_both_layouts_are_one_graph(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    plain, options = prepared(tmp_path / "plain"), {"memory_bytes": 20_000}
    prepare_graph(as_relbench(tmp_path / "plain" / "source", tmp_path / "relbench"), tmp_path / "graph", **options)
    relbench = Graph.open(tmp_path / "graph")
    assert relbench.arrays.keys() == plain.arrays.keys()
    for name, array in plain.arrays.items():
        assert torch.equal(relbench.arrays[name], array), name
    assert tables_of(relbench) == tables_of(plain)


def test_what_comes_after_the_cut_changes_nothing_before_it(tmp_path: Path) -> None:
    """Statistics that looked ahead would."""
    order = FILES["order.csv"].replace(",1000,app,", ",-77,web,").replace(",,web,2024-05-01,never", ",5,new,,")
    (first, second) = (
        prepared(tmp_path / name, FILES | files) for name, files in (("a", {}), ("b", {"order.csv": order}))
    )
    before = [0, 1, 2, 5]
    for name in ("x", "categories", "moments"):
        arrays = [graph.types.node_arrays["order"][name] for graph in (first, second)]
        assert arrays[0].shape == arrays[1].shape and torch.equal(arrays[0][before], arrays[1][before])
        assert not torch.equal(*arrays)
    assert tables_of(first) == tables_of(second)


def test_it_goes_on_after_any_kill(tmp_path: Path) -> None:
    expected, source = prepared(tmp_path / "whole"), write(tmp_path / "source", FILES)
    settings: dict[str, Any] = {"memory_bytes": 3_000}
    until_it_is_there(
        tmp_path / "graph",
        5,
        lambda on_progress: prepare_graph(source, tmp_path / "graph", on_progress=on_progress, **settings),
    )
    found = Graph.open(tmp_path / "graph")
    assert found.fingerprint == expected.fingerprint
    for name, array in expected.arrays.items():
        assert torch.equal(found.arrays[name], array), name


def test_it_goes_on_after_a_kill_that_leaves_ids(tmp_path: Path) -> None:
    expected, source = prepared(tmp_path / "whole"), write(tmp_path / "source", FILES)
    before_the_last_record(lambda: prepare_graph(source, tmp_path / "graph"))
    assert Graph.open(tmp_path / "graph").fingerprint == expected.fingerprint
    assert user_ids(tmp_path / "graph", "customer").tolist() == ["b7", "a3", "c1", "d9"]


def test_a_shard_is_that_of_the_divided_graph(tmp_path: Path) -> None:
    graph = prepared(tmp_path)
    owners = [torch.arange(count) * 2 // (count + count % 2) for count in graph.types.num_nodes.values()]
    save_shards(graph, Partition(torch.cat(owners).to(torch.int32), 2), tmp_path / "divided")
    for index in range(2):
        prepare_graph(tmp_path / "source", tmp_path / "shards", shard=OneShard(index, 2))
        check_equal(tmp_path / "shards", tmp_path / "divided", index)


LABELS = "who,at,{}\na3,2024-02-01,{}\nb7,2024-02-02,{}\na3,2024-02-15,{}\na3,2024-03-02,{}\nc1,2024-04-02,{}\n"


@pytest.mark.parametrize(
    ("task_type", "answers", "y", "outputs"),
    [
        ("binary_classification", ("yes", "no", "yes", "", "no"), [1, 0, 1, -1, 0], 1),
        ("multiclass_classification", ("b", "c", "a", "a", "c"), [1, 2, 0, 0, 2], 3),
        ("regression", ("1", "2.5", "4", "", "-1"), [1, 2.5, 4, None, -1], 1),
    ],
)
def test_answers_of_a_task(task_type: str, answers: tuple[str, ...], y: Any, outputs: int, tmp_path: Path) -> None:
    task, labels = TASK.replace("binary_classification", task_type), LABELS.format("stays", *answers)
    graph = prepared(tmp_path, FILES | {"tasks/stays/manifest.yaml": task, "tasks/stays/labels.csv": labels})
    arrays, (told,) = graph.types.node_arrays["stays"], tables_of(graph).tasks.values()
    assert told.num_outputs == outputs and told.task_type == task_type
    assert [None if value != value else value for value in arrays["y"].tolist()] == y
    assert arrays["val_mask"].tolist() == [False, False, False, answers[3] != "", False]
    if task_type == "regression":
        assert told.mean == 2.5 and told.std == 1.5


def test_nan_in_parquet_is_no_answer_and_no_key(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    nan = float("nan")
    told = MANIFEST + "  visit: {fkeys: {of: order}, time_col: at}\n"
    files = {"tasks/stays/manifest.yaml": TASK.replace("binary", "multiclass"), "tasks/stays/labels.csv": None}
    source = write(tmp_path / "source", FILES | files | {"database.yaml": told})
    at = [np.datetime64(f"2024-0{day}", "us").item() for day in ("2-01", "2-02", "2-15", "3-02", "4-02")]
    asked = {"who": ["a3", "b7", "a3", "a3", "c1"], "at": at, "stays": [0.0, 1.0, 2.0, nan, 1.0]}
    parquet.write_table(pa.table(asked), source / "tasks/stays/labels.parquet")
    parquet.write_table(pa.table({"of": [11.0, nan, 12.0], "at": at[:3], "n": [1, 2, 2]}), source / "visit.parquet")
    prepare_graph(source, tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    assert graph.types.node_arrays["stays"]["y"].tolist() == [0, 1, 2, -1, 1]
    assert edges(graph, "visit", "of", "order") == [(0, 0), (2, 1)]


def test_dates_in_parquet_are_no_keys(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    days = pa.array([19_000, 19_001], pa.date32())
    source = write(tmp_path / "source", {"database.yaml": "tables: {day: {pkey: at}, sale: {fkeys: {of: day}}}"})
    parquet.write_table(pa.table({"at": days}), source / "day.parquet")
    parquet.write_table(pa.table({"of": days.cast(pa.timestamp("us"))}), source / "sale.parquet")
    with pytest.raises(ValueError, match="2 things are wrong") as refusal:
        prepare_graph(source, tmp_path / "graph")
    assert "'at' holds '2022-01-08' in row 1 (and in 1 more, such as row 2), and keys are whole" in str(refusal.value)
    assert "'of' holds '2022-01-08 00:00:00' in row 1" in str(refusal.value)


def test_answers_of_several_labels(tmp_path: Path) -> None:
    task = TASK.replace("binary", "multilabel").replace("target_col: stays", "target_col: [stays, pays]")
    labels = LABELS.format("stays,pays", "1,1", "0,1", "1,0", "0,0", "1,1")
    graph = prepared(tmp_path, FILES | {"tasks/stays/manifest.yaml": task, "tasks/stays/labels.csv": labels})
    assert graph.types.node_arrays["stays"]["y"].tolist() == [[1, 1], [0, 1], [1, 0], [0, 0], [1, 1]]


BUYS = """\
task_type: recommendation
src_entity_table: customer
src_entity_col: who
dst_entity_table: order
dst_entity_col: what
time_col: at
eval_k: 3
"""


def test_answers_of_a_task_that_recommends_are_edges(tmp_path: Path) -> None:
    """Of words and of lists, in one table and in one for each split, of which that to test may have no answers."""
    rows = "who,at,what\na3,2024-02-01,13 16\nb7,2024-02-02,\nb7,2024-03-02,11\nc1,2024-04-02,15 11 11\n"
    more = {"tasks/buys/manifest.yaml": BUYS, "tasks/buys/labels.csv": rows}
    graph = prepared(tmp_path / "plain", FILES | more)
    task = tables_of(graph).tasks["buys"]
    assert (task.receiver, task.k, task.answers) == ("order", 3, ("buys", "answer", "order"))
    assert edges(graph, "buys", "answer", "order") == [(0, 2), (0, 5), (2, 0), (3, 0), (3, 0), (3, 4)]
    arrays = graph.to_pyg()["buys", "answer", "order"]
    questions = graph.types.node_arrays["buys"]
    assert (arrays.time == NEVER).all() and arrays.edge_time.equal(questions["time"][arrays.edge_index[0]])
    found = [questions[f"{split}_mask"].nonzero().view(-1).tolist() for split in ("train", "val", "test")]
    assert found == [[0], [2], [3]] and ("buys", "answer", "order") not in tables_of(graph).edge_types

    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source = as_relbench(tmp_path / "plain" / "source", tmp_path / "relbench")
    write(source, {"tasks/buys/manifest.yaml": BUYS})
    at = [np.datetime64(f"2024-0{day}", "us").item() for day in ("2-01", "2-02", "3-02", "4-02")]
    tables = {
        "train": {"who": ["a3", "b7"], "at": at[:2], "what": [[13, 16], []]},
        "val": {"who": ["b7"], "at": at[2:3], "what": [[11, 99]]},  # RelBench leaves keys out that name no row
        "test": {"who": ["c1"], "at": at[3:]},
    }
    for split, columns in tables.items():
        parquet.write_table(pa.table(columns), source / "tasks/buys" / f"{split}.parquet")
    prepare_graph(source, tmp_path / "graph")
    recommends = Graph.open(tmp_path / "graph")
    assert edges(recommends, "buys", "answer", "order") == [(0, 2), (0, 5), (2, 0)]
    assert recommends.types.node_arrays["buys"]["test_mask"].tolist() == [False, False, False, True]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("dst_entity_table: order", "dst_entity_table: orders", "dst_entity_table must be one of .*, got 'orders'"),
        ("src_entity_col: who\n", "", "names no src_entity_col"),
        ("time_col: at\n", "", "has no time_col"),
        ("eval_k: 3", "eval_k: 0", "eval_k must be a number of rows to recommend, of one column, got 0"),
        ("eval_k: 3", "eval_ks: 3", "says eval_ks, which nobody knows: did you mean eval_k"),
        ("b7,2024-03-02", "b7,2024-02-01", "is trained at 2024-02-01 00:00:00, not before its first"),
        ("13 16", "13 99", "'what' holds '99' in row 1, which no row of .*order.csv has as its number"),
        ("13 16", "1.5", "'what' holds '1.5' in row 1, and keys are whole numbers or words"),
        ("13 16", "", "are those of no question to train on"),
    ],
)
def test_a_task_that_cannot_recommend_is_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    rows = "who,at,what,split\na3,2024-02-01,13 16,train\nb7,2024-03-02,11,val\n"
    more = {"tasks/buys/manifest.yaml": BUYS.replace(old, new), "tasks/buys/labels.csv": rows.replace(old, new)}
    with pytest.raises(ValueError, match=told):
        prepared(tmp_path, FILES | more)


def test_names_of_tables_may_have_dots(tmp_path: Path) -> None:
    manifest = MANIFEST.replace("customer: {", "my.customer: {").replace("customer: customer", "customer: my.customer")
    task = TASK.replace("entity_table: customer", "entity_table: my.customer")
    more = {"database.yaml": manifest, "my.customer.csv": FILES["customer.csv"], "customer.csv": None}
    found = prepared(tmp_path / "dots", FILES | more | {"tasks/stays/manifest.yaml": task})
    assert found.types.node_types == ("my.customer", "order", "stays")
    assert torch.equal(found.indices, prepared(tmp_path / "none").indices)
    assert ColumnEncoder(tables_of(found), "stays", 4).of_tables.keys() == {"of_my_dot_customer", "of_order"}


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    source = write(tmp_path / "source", FILES | {"customer.csv": None})
    columns = {"id": ["b7", "a3", "c1", "d9"], "tags": [["x"], [], ["y"], None], "one": [1] * 4, "none": [None] * 4}
    parquet.write_table(pa.table(columns), source / "customer.parquet")
    prepare_graph(source, tmp_path / "graph")
    graph = Graph.open(tmp_path / "graph")
    assert tables_of(graph).features["customer"] == () and not graph.types.node_arrays["customer"]
    assert sorted(tables_of(graph).notes) == [
        "customer.none has no value before the training cut: it is left out.",
        "customer.one has one value before the training cut: it is left out.",
        "customer.tags holds lists, or the like: it is left out.",
    ]


def test_kinds_are_told_or_found(tmp_path: Path) -> None:
    """Many different words are text, unless they are said to be a category; a number may be one."""
    rows = "".join(f"k{n},name {n},{n % 3},{n}\n" for n in range(1_100))
    files = FILES | {"customer.csv": f"id,name,level,rank\nb7,,1,1\na3,x,0,2\nc1,y,2,3\n{rows}"}
    graph = prepared(tmp_path / "found", files)
    assert [f.kind for f in tables_of(graph).features["customer"]] == ["x", "x", "x"]
    told = MANIFEST.replace("{pkey: id}", "{pkey: id, columns: {name: category, level: category, rank: ignore}}")
    graph = prepared(tmp_path / "told", files | {"database.yaml": told})
    assert tables_of(graph).features["customer"] == (
        Feature("name", "categories", 0, 1, 2),  # no name is there twice
        Feature("level", "categories", 1, 1, 5),
    )


def test_texts_by_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_length = "def lengths(texts):\n    return [[len(text), 1] for text in texts]\n"
    (tmp_path / "lengths_of_texts.py").write_text(by_length)
    monkeypatch.syspath_prepend(tmp_path)
    graph = prepared(tmp_path, FILES | {"database.yaml": MANIFEST + "text: lengths_of_texts:lengths\n"})
    assert column(graph, "order", "note").tolist() == [[4, 1, 0], [0, 0, 1], [9, 1, 0], [4, 1, 0], [5, 1, 0], [5, 1, 0]]


def test_a_row_without_a_time_is_never_seen(tmp_path: Path) -> None:
    order = FILES["order.csv"].replace("2024-01-20 10:00:00", "")
    graph = prepared(tmp_path, FILES | {"order.csv": order})
    assert graph.types.node_arrays["order"]["time"][1] == NEVER
    assert "1 rows of order have no time, and no question sees them." in tables_of(graph).notes


def test_times_are_told_as_dates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.extensions.temporal.temporal_sampler.rank_zero_info", told.append)
    early = "who,at,stays\na3,2020-02-01,1\nb7,2020-02-01,0\n"
    PartitionedDataModule(prepared(tmp_path, FILES | {"tasks/stays/labels.csv": early}), task="stays")
    of_orders = [f"order__{name}__{end} (2024-01-05 10:00:00 to 2024-04-20 10:00:00)" for name, end in _OF_ORDERS]
    assert told == [
        "Edges of these types are always seen, as neither they nor their senders have a time: "
        "['customer__rev_customer__order'].",
        f"No seed sees edges of these types, by their time: {', '.join(of_orders)}. "
        "Seeds are at 2020-02-01 00:00:00 to 2020-02-01 00:00:00.",
    ]


@pytest.mark.parametrize("may_dangle", [False, True])
def test_a_table_of_two_keys_is_edges(may_dangle: bool, tmp_path: Path) -> None:
    """With the times of its rows; RelBench leaves keys out that name no row."""
    likes = "who,what,since\na3,12,2024-01-30\nb7,,2024-01-30\nc1,11,2024-03-09\n" + (
        "zz,11,2024-01-30\n" if may_dangle else ""
    )
    told = MANIFEST + "  likes: {fkeys: {who: customer, what: order}, time_col: since}\n"
    files = FILES | {"likes.csv": likes, "manifest.yaml" if may_dangle else "database.yaml": told}
    graph = prepared(tmp_path, files | ({"database.yaml": None} if may_dangle else {}))
    assert "likes" not in graph.types.node_types
    assert edges(graph, "customer", "likes", "order") == [(1, 1), (2, 0)]
    assert edges(graph, "order", "rev_likes", "customer") == [(0, 2), (1, 1)]
    times = graph.types.edge_arrays["customer", "likes", "order"]["time"]
    assert times.tolist() == [seconds("2024-03-09"), seconds("2024-01-30")]  # by receiver


def test_rows_stay_in_order_where_a_join_returns_another(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a join does that goes to the disk; an edge without a key is left out, and equal edges keep their times."""
    likes = "who,what,since\na3,12,2024-01-30\nb7,,2024-01-30\na3,12,2024-03-09\na3,12,2024-02-01\n"
    told = MANIFEST + "  likes: {fkeys: {who: customer, what: order}, time_col: since}\n"
    files = FILES | {"likes.csv": likes, "database.yaml": told}
    stream = Work.stream
    prepared(tmp_path / "in order", files)

    def backwards(self: Work, query: str, table: Table) -> Iterator[dict[str, Any]]:
        for piece in reversed(list(stream(self, query, table))):
            for row in reversed(range(len(piece["row"]))):
                yield {name: cells.slice(row, 1) for name, cells in piece.items()}

    monkeypatch.setattr(Work, "stream", backwards)
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", Mock(side_effect=OSError(errno.ENOSPC, "No space left")))
        with pytest.raises(OSError, match=r"is full, .* make room and repeat the command to go on"):
            prepared(tmp_path / "backwards", files)
    graph = prepared(tmp_path / "backwards", files)
    assert graph.types.edge_arrays["customer", "likes", "order"]["time"].numel() == 3
    folders = tmp_path / "in order" / "graph", tmp_path / "backwards" / "graph"
    arrays = [{file.relative_to(each): file.read_bytes() for file in each.rglob("*.npy")} for each in folders]
    assert arrays[0] == arrays[1]


def test_texts_are_sums_of_what_each_word_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_module, "TEXTS_AT_ONCE", 3)
    texts = ["", "Good good, bad", "bad", "so so so", "!", "Ünder a tree", "good"]
    expected = np.zeros((len(texts), 64))
    for row, text in zip(expected, texts, strict=True):
        for word in re.findall(r"\w+", text.lower()):
            found = crc32(word.encode())
            row[found % 64] += 1 if found & 2**30 else -1
            row[(found >> 8) % 64] += 1 if found & 2**31 else -1
        row *= 8 / max(np.linalg.norm(row), 1e-9)
    np.testing.assert_allclose(hash_words(texts), expected, rtol=1e-6)


@pytest.mark.parametrize(("fraction", "zeros"), [("", ""), (".250000", ".000000")])
def test_questions_carry_the_columns_of_their_table(fraction: str, zeros: str, tmp_path: Path) -> None:
    labels = FILES["tasks/stays/labels.csv"].replace(",1\n", ",yes\n").replace(",0\n", ",no\n")
    labels = labels.replace("2024-02-02", f"2024-02-02 00:00:00{fraction}")
    prepare_graph(write(tmp_path / "source", FILES | {"tasks/stays/labels.csv": labels}), tmp_path / "graph")
    columns = columns_for(None, tmp_path / "graph", "stays", 5)(1, np.array([0, 1, 1]))
    assert {name: column.astype(str).tolist() for name, column in columns.items()} == {
        "who": ["b7", "a3", "a3"],
        "at": [
            f"2024-02-02T00:00:00{fraction}",
            f"2024-02-15T00:00:00{zeros}",
            f"2024-03-02T00:00:00{zeros}",
        ],
        "row": ["0", "1", "1"],
        "class": ["no", "yes", "yes"],
    }
