"""Columns of words, dates and gaps become numbers, and what becomes of each is told before the graph is written."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.graph.user_ids import category_names, class_names, user_ids
from lightning_gnn_dist.prepare import columns
from lightning_gnn_dist.prepare.engine import Problems

NODES = """\
id,city,seen,age,label,zip
007,Oslo,2024-01-05,3,a,1
1_000,Lund,2024-01-06,,b,2
NaN,,,5,,3
NULL,Oslo,2024-01-05 12:00:00,7,a,1
"""
MORE = "".join(f"n{at},,,{at},,1\n" for at in range(30))
EDGES = "source,target,kind,w\n007,1_000,x,1\n1_000,NaN,y,2\nNULL,007,x,\n"


DATES = "id,d\n" + "".join(f"n{at},2024-01-{at + 1:02}\n" for at in range(20))


def tables(folder: Path, nodes: str = NODES, edges: str = EDGES) -> dict[str, Path]:
    (folder / "nodes.csv").write_text(nodes)
    (folder / "edges.csv").write_text(edges)
    return {"source": folder / "edges.csv", "nodes": folder / "nodes.csv"}


def prepared(folder: Path, **options: Any) -> Graph:
    given = {name: options.pop(name) for name in ("nodes", "edges") if name in options}
    prepare_graph(**tables(folder, **given), out=folder / "graph", **options)
    return Graph.open(folder / "graph")


def test_they_become_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = {name: str(path) for name, path in tables(tmp_path).items()}
    main(["prepare", given["source"], f"{tmp_path}/graph", "--nodes", given["nodes"], "--as", "category", "zip"])
    said = capsys.readouterr().out
    assert said.index("nodes  city    one of 2 categories") < said.index("4 nodes, 3 edges")
    assert "nodes  seen    days since 1970-01-01; an empty cell is 19,727.5, the mean, and a mark" in said
    assert "edges  w       a number; an empty cell is 1.5, the mean, and a mark" in said
    graph = Graph.open(tmp_path / "graph")
    arrays = {name: array.tolist() for name, array in {**graph.node_arrays, **graph.edge_arrays}.items()}
    assert arrays == {
        "x": [[19727, 0, 3, 0], [19728, 0, 5, 1], [19727.5, 1, 5, 0], [19727.5, 0, 7, 0]],
        "y": [0, 1, -1, 0],
        "categories": [[2, 1], [1, 2], [0, 3], [2, 1]],
        "edge_kind": [1, 1, 2],
        "edge_w": [1.5, 1, 2],
        "edge_w_is_missing": [1, 0, 0],
    }
    assert user_ids(tmp_path / "graph").tolist() == ["007", "1_000", "NaN", "NULL"]
    assert class_names(tmp_path / "graph") == ["a", "b"]
    assert category_names(tmp_path / "graph") == {"city": ["Lund", "Oslo"], "zip": ["1", "2", "3"]}


def test_zeros_in_front_and_capitals(tmp_path: Path) -> None:
    nodes = "Id,Label,SPLIT,zip,n\n1,007,train,02139,0.5\n2,,,2139,-3\n3,008,,,+3\n"
    graph = prepared(tmp_path, nodes=nodes, edges="source,target,Weight\n1,2,0.5\n2,3,1\n")
    assert graph.node_arrays["x"].tolist() == [[0.5], [-3], [3]] and graph.node_arrays["y"].tolist() == [0, -1, 1]
    assert graph.split("train").tolist() == [0] and graph.edge_arrays["edge_weight"].tolist() == [0.5, 1]
    assert class_names(tmp_path / "graph") == ["007", "008"]
    assert category_names(tmp_path / "graph") == {"zip": ["02139", "2139"]}


def test_codes_of_four_digits_are_no_years(tmp_path: Path) -> None:
    codes = ["K12", *(f"{at:04}" for at in [*range(10), *range(415, 425)])]
    nodes = "id,code,d\n" + "".join(f"{at},{code},2024-01-{at + 1:02}\n" for at, code in enumerate(codes))
    graph = prepared(tmp_path, nodes=nodes, edges="source,target\n0,1\n")
    assert category_names(tmp_path / "graph") == {"code": sorted(codes)}
    assert graph.node_arrays["x"].tolist() == [[19723 + at] for at in range(21)]  # days since 1970


@pytest.mark.parametrize("count", [960, 1_000, 1_001])
def test_many_different_words_are_counted(count: int, tmp_path: Path) -> None:
    nodes = "id,w\n" + "".join(f"{at},w{at}\n" for at in range(count))
    graph = prepared(tmp_path, nodes=nodes, edges="source,target\n0,1\n")
    assert ("categories" in graph.node_arrays) == (count <= 1_000)


def test_many_different_words_are_text(tmp_path: Path) -> None:
    nodes = "id,name,n\n" + "".join(f"{at},name {at},{at}\n" for at in range(1_500))
    graph = prepared(tmp_path, nodes=nodes, edges="source,target\n0,1\n")
    assert graph.node_arrays["x"].shape == (1_500, 65) and "categories" not in graph.node_arrays
    prepare_graph(**tables(tmp_path, nodes, "source,target\n0,1\n"), out=tmp_path / "g", kinds={"name": "category"})
    assert sorted(Graph.open(tmp_path / "g").node_arrays["categories"][:, 0].tolist()) == [*range(1, 1_501)]


@pytest.mark.parametrize("most", [1_499, 1_500])
def test_words_of_a_category_are_counted_one_by_one(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MOST", most)
    nodes = "id,name\n" + "".join(f"{at},name {at}\n" for at in range(1_500))
    refusal = pytest.raises(ValueError, match=r"'name' has more than 1,499 different words: say that it is text \(--as")
    with refusal if most < 1_500 else nullcontext():
        prepared(tmp_path, nodes=nodes, edges="source,target\n0,1\n", kinds={"name": "category"})


def test_times_may_be_dates(tmp_path: Path) -> None:
    for name, text in (
        ("nodes/a.csv", "id,born\n1,1970-01-02\n2,1970-01-01 00:00:05\n"),
        ("edges/a__to__a.csv", "source,target\n1,2\n2,1\n"),
    ):
        (tmp_path / "tables" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tables" / name).write_text(text)
    prepare_graph(tmp_path / "tables", tmp_path / "graph", time="born")
    assert Graph.open(tmp_path / "graph").types.node_arrays["a"]["born"].tolist() == [86_400, 5]


@pytest.mark.parametrize("times", [("1717200050", "1717200000"), ("2024-06-01 00:00:50", "2024-06-01")])
def test_times_of_edges_of_one_type_are_whole_numbers(times: tuple[str, str], tmp_path: Path) -> None:
    edges = f"source,target,time,w\n007,1_000,{times[0]},0.5\n1_000,007,{times[1]},1.5\n"
    graph = prepared(tmp_path, edges=edges, time="time")
    assert graph.edge_arrays["edge_time"].tolist() == [1_717_200_000, 1_717_200_050]
    assert graph.edge_arrays["edge_w"].tolist() == [1.5, 0.5] and graph.types.time is None
    np.save(tmp_path / "edges.npy", [[0, 1], [1, 0]])
    for source, message in (
        ("edges.npy", "--time is of tables"),
        ("edges.csv", "names the column 'at'"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_graph(tmp_path / source, tmp_path / "other", time="at")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": NODES.replace(",3,a", ",old,a") + MORE}, "'age' holds 'old'"),
        ({"kinds": {"seen": "number"}}, "'seen' holds '2024-01-05' in row 1 .*, which is no number. Correct"),
        ({"kinds": {"city": "time"}}, "'city' holds 'Oslo' in row 1 .*, and times are dates"),
        ({"kinds": {"town": "text"}}, "--as names the column 'town', which holds no features, .*: those of .* are"),
        (
            {"kinds": {"label": "category"}},
            r"--as names the column 'label', .*: those of .* are \['age', 'city', 'kind'",
        ),
        ({"kinds": {"source": "text"}}, "--as names the column 'source', which holds no features, as those of keys"),
        (
            {"nodes": DATES + "q,2024-13-01\n"},
            "'d' holds '2024-13-01' in row 21, and times are dates, .*nearly all others",
        ),
        (
            {"edges": EDGES.replace("kind", "w_is_missing")},
            "'w_is_missing' is called as the mark of empty cells of 'w'",
        ),
        ({"kinds": {"city": "word"}}, "--as: 'city' must be one of .*, got 'word'"),
        ({"nodes": NODES.replace(",3,a,1", ",inf,a,1")}, "'age' holds 'inf' in row 1, which is no finite float32"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        prepared(tmp_path, **options)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    nodes = "id,split,big\n1,train,16777217\n2,learn,3\n1,test,1\n"
    edges = "source,target,w\n1,2,inf\n3,,1\n"
    with pytest.raises(ValueError, match="6 things are wrong") as refusal:
        prepared(tmp_path, nodes=nodes, edges=edges)
    told = str(refusal.value)
    for each in (
        "column 'id' lists node 1 twice, first in row 1, then in row 3: every node has one row",
        "'split' holds 'learn' in row 2",
        "'big' holds '16777217' in row 1",
        "'w' holds 'inf'",
    ):
        assert each in told


def test_what_two_looks_find_is_told_and_counted_once() -> None:
    assert str(Problems(["One is wrong.", "One is wrong."])) == "One is wrong."
    assert str(Problems(["One.", "Two.", "One."])) == "2 things are wrong:\n- One.\n- Two."


def test_frames_are_read_as_files_are(tmp_path: Path) -> None:
    """All that tells its columns by Arrow's interface, as frames of pandas and Polars do; a kill costs nothing."""
    pa, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    given = tables(tmp_path, NODES.replace("2024-01-05 12:00:00", "2024-01-07"), EDGES)

    class Frame:
        def __init__(self, path: Path) -> None:
            options = csv.ConvertOptions(column_types={"id": "string", "source": "string", "target": "string"})
            self._table = csv.read_csv(path, convert_options=options)

        def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
            return self._table.__arrow_c_stream__(requested_schema)

    def killed(stage: str, share: float) -> None:
        raise KeyboardInterrupt

    frames = Frame(given["source"]), tmp_path / "graph"
    with pytest.raises(KeyboardInterrupt):
        prepare_graph(*frames, nodes=Frame(given["nodes"]), on_progress=killed)
    prepare_graph(*frames, nodes=Frame(given["nodes"]))
    with pytest.raises(
        ValueError, match=r"^the frame nodes is no table, or is damaged \(.*Decimal d:50.*Write it again"
    ):
        prepare_graph(frames[0], tmp_path / "other", nodes=pa.table({"id": pa.array([1], pa.decimal256(50))}))
    halves = pa.table({"id": ["007", "1_000", "NaN", "NULL"], "f": pa.array(np.arange(4, dtype=np.float16))})
    prepare_graph(frames[0], tmp_path / "halves", nodes=halves)
    assert Graph.open(tmp_path / "halves").node_arrays["x"].tolist() == [[0], [1], [2], [3]]
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv does not exist"):
        prepare_graph(frames[0], tmp_path / "other", nodes=tmp_path / "nowhere.csv")
    prepare_graph(**given, out=tmp_path / "expected")
    found, expected = Graph.open(tmp_path / "graph"), Graph.open(tmp_path / "expected")
    assert found.fingerprint == expected.fingerprint and found.arrays.keys() == expected.arrays.keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "edges.csv",
        "expected",
        "graph",
        "halves",
        "nodes.csv",
    ]
