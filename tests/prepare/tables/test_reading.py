"""Texts that DuckDB reads: headings, cells, lines that are no rows, and how many rows there are."""

import csv
import gzip
from pathlib import Path

import pyarrow as pa
import pytest

from lightning_gnn_dist.prepare.engine import Problems, Work, quoted
from lightning_gnn_dist.prepare.reading import ROW, columns_of, load


def read_table(path: Path) -> dict[str, list[str | None]]:
    with Work(path.parent / "work", 10**8) as work:
        table = load(work, "table", path)
        rows = work.run(f"SELECT {', '.join(map(quoted, table.types))} FROM {table.name} ORDER BY {ROW}")
        work.problems += table.check(work.run)
        work.check()
    return {name: [row[at] for row in rows] for at, name in enumerate(table.types)}


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize("separator", [",", "\t", ";", " "])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_columns_have_names(separator: str, end: str, tmp_path: Path) -> None:
    rows = [["id", "size", "name"], ["7", "0.5", "ada"], ["-3", "2", "bob"]]
    table = read_table(write(tmp_path / "t.csv", "\ufeff" + end.join(separator.join(row) for row in rows)))
    assert table == {"id": ["7", "-3"], "size": ["0.5", "2"], "name": ["ada", "bob"]}


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_numbers_without_a_heading_and_packed(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"edge.csv.{suffix}"
    if suffix == "gz":
        path.write_bytes(gzip.compress(b"0,1\n1,2\n"))
    else:
        with pa.output_stream(path, compression="zstd") as stream:
            stream.write(b"0,1\n1,2\n")
    assert read_table(path) == {"0": ["0", "1"], "1": ["1", "2"]}


def test_lines_of_json(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"id": "a", "age": 3}\n{"id": "", "age": null}\n{"age": 4.5, "id": "007"}\n')
    assert columns_of(path) == ["id", "age"]
    assert read_table(path) == {"id": ["a", None, "007"], "age": [3.0, None, 4.5]}
    path = write(tmp_path / "u.jsonl", '{"id": "2024-01-01T00:00", "y": 1, "at": "10:00:00"}\n{"id": "q", "y": "q"}\n')
    assert read_table(path) == {"id": ["2024-01-01T00:00", "q"], "y": ["1", "q"], "at": ["10:00:00", None]}


def test_marks_in_names_are_no_patterns(tmp_path: Path) -> None:
    write(tmp_path / "n1.csv", "id\nb\n")
    assert read_table(write(tmp_path / "n[1].csv", "id\na\n")) == {"id": ["a"]}


def test_lines_may_end_in_two_ways(tmp_path: Path) -> None:
    table = read_table(write(tmp_path / "t.csv", 'a,b\r\n1,"x"\n3,y z\r\n\n4,w'))
    assert table == {"a": ["1", "3", "4"], "b": ["x", "y z", "w"]}


def test_quotes_hold_separators_and_ends_of_lines(tmp_path: Path) -> None:
    text = 'id,name\n1,"a, b"\n2,"a\nb"\n\n3,"say ""x"""\n'
    assert read_table(write(tmp_path / "t.csv", text))["name"] == ["a, b", "a\nb", 'say "x"']


LAST = ["8", "8.5", "eight", "1_000", '"8"', ' "8, 9"', "e ", '"a ""b"" c"', '1"2', "٣", "NULL", "NaN"]


@pytest.mark.parametrize("last", LAST)
def test_cells_are_those_of_the_csv_module_wherever_they_stand(last: str, tmp_path: Path) -> None:
    cells = [*map(str, range(400)), last, "7"]
    text = "n,word,cell\n" + "".join(f"{at},w{at % 3} {at},{cell}\n" for at, cell in enumerate(cells))
    found = read_table(write(tmp_path / "t.csv", text))
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()[1:], skipinitialspace=True)]
    assert [found["n"], found["word"], found["cell"]] == [list(column) for column in zip(*rows, strict=True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("a,a\n1,2\n", "two columns called 'a': rename"),
        ("a,A\n1,2\n", "two columns called 'A' and 'a', which differ by case alone: rename"),
        ("a,b\n1,2\n1,2,3\n", "line 3: 3 cells, but there are 2 columns"),
        ("a b\n1 2\n1 2 3\n", "line 3: 3 cells, but there are 2 columns"),
        ("a,b\n1,2\n1\n1,2\n7\n", "2 things are wrong:\n- .*line 3: 1 cells.*\n- .*line 5: 1 cells"),
        (",id,label\n0,0,1\n", "a column without a name, number 1"),
        ("source," + "9" * 200_000 + "\n0,0\n", "its first line cannot be read"),
    ],
)
def test_what_is_no_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        read_table(write(tmp_path / "t.csv", text))
    assert not isinstance(refusal.value, Problems) or str(tmp_path) in str(refusal.value)
