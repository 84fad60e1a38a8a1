"""Text tables: headings, kinds of columns, pieces, and what is wrong in which line."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from lightning_gnn_dist.graph.storage.npy import Column
from lightning_gnn_dist.prepare.files import text_tables
from lightning_gnn_dist.prepare.files.tables import BYTES_PER_CELL, TablePieces, columns_of
from lightning_gnn_dist.prepare.files.text_tables import Progress, count_rows


def read_table(path: Path, on_progress: Progress = lambda share: None, memory_bytes: int = 10**9) -> dict[str, Column]:
    pieces = [piece for _, piece in TablePieces.of(path, columns_of(path), memory_bytes, on_progress)]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in columns_of(path)}


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("separator", [",", "\t", ";", " "])
def test_columns_have_names_and_kinds(separator: str, tmp_path: Path) -> None:
    rows = [["id", "size", "name"], ["7", "0.5", "ada"], ["-3", "2", "bob"]]
    table = read_table(write(tmp_path / "t.csv", "\n".join(separator.join(row) for row in rows)))
    assert table["id"].tolist() == [7, -3] and table["id"].dtype == np.int64
    assert table["size"].tolist() == [0.5, 2.0]
    assert table["name"].tolist() == ["ada", "bob"]


def test_numbers_without_a_heading_and_gzipped(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "edge.csv.gz", "wt") as file:
        file.write("0,1\n1,2\n")
    assert {name: column.tolist() for name, column in read_table(tmp_path / "edge.csv.gz").items()} == {
        "0": [0, 1],
        "1": [1, 2],
    }


@pytest.mark.parametrize("memory_bytes", [1, 10**9])
def test_a_later_piece_may_widen_a_column(memory_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tables, "LINES_AT_ONCE", 2)
    path = write(tmp_path / "t.csv", "a,b,c\n1,1,1\n2,2,2\n3,3.5,x\n\n4,4,4\n")
    shares: list[float] = []
    table = read_table(path, shares.append, memory_bytes)
    assert table["a"].tolist() == [1, 2, 3, 4]
    assert table["b"].tolist() == [1.0, 2.0, 3.5, 4.0]
    assert table["c"].tolist() == ["1", "2", "x", "4"]
    assert all(0 < share <= 1 for share in shares) and shares[-1] == 1.0


def test_a_table_is_parsed_once_if_it_fits_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_tables, "LINES_AT_ONCE", 2)
    path, fits = write(tmp_path / "t.csv", "a,b\n" + "1,0.5\n" * 9), 2 * 2 * BYTES_PER_CELL + 9 * 16
    for memory_bytes, is_kept in ((fits, True), (fits - 1, False)):
        table = TablePieces.of(path, ["b", "a"], memory_bytes, lambda share: None)
        assert (table.kept is not None) == is_kept
        found = [(first, list(piece), len(piece["a"]), piece["b"].sum()) for first, piece in table]
        assert found == [(at, ["b", "a"], min(2, 9 - at), min(2, 9 - at) / 2) for at in range(0, 9, 2)]


def test_quotes_hold_separators(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", 'id,name\n1,"a, b"\n'))
    assert table["name"].tolist() == ["a, b"]


@pytest.mark.parametrize("last", ["8", "8.5", "eight", "1_000", "", '"8"', ' "8, 9"', "e ", '"a ""b"" c"', '1"2', "٣"])
def test_cells_are_those_of_the_csv_module_wherever_they_stand(last: str, tmp_path: Path) -> None:
    cells = [*map(str, range(400)), last, "7"]  # the first lines alone do not tell the kind
    text = "n,word,cell\n" + "".join(f"{at},w{at % 3} {at},{cell}\n" for at, cell in enumerate(cells))
    found = read_table(write(tmp_path / "t.csv", text))
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()[1:], skipinitialspace=True)]
    kind = {"8": np.int64, '"8"': np.int64, "8.5": np.float64}.get(last, np.str_)
    assert found["word"].tolist() == [row[1] for row in rows] and found["n"].tolist() == list(range(402))
    assert found["cell"].tolist() == np.array([row[2] for row in rows]).astype(kind).tolist()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,b\n", "has a heading and no rows"),
        ("a,a\n1,2\n", "two columns called 'a'"),
        ("a,b\n1,2\n1,2,3\n", "1 lines after line 2: 3 cells, but there are 2 columns"),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(write(tmp_path / "t.csv", text))


def test_sizes_are_known_beforehand(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,b,c\n" + "1,2,3\n" * 5000)
    assert columns_of(path) == ["a", "b", "c"]
    assert 4900 < count_rows(path) < 5100


def test_rows_are_counted_where_lines_grow(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "a,b\n" + "".join(f"{row},{row * row}\n" for row in range(100_000)))
    assert abs(count_rows(path) - 100_000) < 4000


@pytest.mark.parametrize(
    ("first", "words"),
    [(",id,label", "a column without a name, number 1"), ("source," + "9" * 200_000, "its first line cannot be read")],
)
def test_a_heading_that_is_none_is_refused(tmp_path: Path, first: str, words: str) -> None:
    (tmp_path / "nodes.csv").write_text(f"{first}\n0,0,1\n")
    with pytest.raises(ValueError, match=words):
        read_table(tmp_path / "nodes.csv")
