"""Folders that cannot be right each get one sentence, which names the file and the way out; odd ones are right."""

from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.prepare import columns as columns_module
from tests.extensions.databases.folders import FILES, MANIFEST, TASK, write

D, B, C, T, L = "database.yaml", "order.csv", "customer.csv", "tasks/stays/manifest.yaml", "tasks/stays/labels.csv"

SPLIT = "who,at,stays,split\na3,2024-01,1,train\nc1,2024-04,0,val\n"


def changed(name: str, old: str, new: str) -> dict[str, str | None]:
    assert old in FILES[name]
    return {name: FILES[name].replace(old, new)}


BAD: list[tuple[dict[str, str | None], str]] = [
    # What the folder says of itself.
    ({D: "tables: ["}, "is no YAML"),
    ({D: "- customer"}, "must hold names with values"),
    ({D: "val_timestamp: 2024-03-01\nnotes: [order has no rows.]"}, r"names no tables: .* order has no rows\."),
    (changed(D, "pkey: id", "pk: id"), "table 'customer' knows no 'pk': did you mean pkey"),
    (changed(D, "test_timestamp: 2024-04-01", "test_timestamp: 2024-02-01"), "test_timestamp must be later"),
    (changed(D, "val_timestamp: 2024-03-01", "val_timestamp: in March"), "val_timestamp must be a date"),
    (changed(D, "val_timestamp: 2024-03-01", "val_timestamp: 2020-03-01"), "are those of no question to train on"),
    (
        changed(D, "val_timestamp: 2024-03-01", "val_timestamp: 2020-03-01") | {L: SPLIT},
        r"\(2020-03-01 00:00:00\) is not among the times of rows and questions, 2024-01-01 00:00:00 to 2024-04-20",
    ),
    ({"manifest.yaml": MANIFEST}, "are of two layouts: leave one of them out"),
    ({"nodes/a.csv": "id\n1\n", "edges/a__b__a.csv": "a,b\n1,1\n"}, "are of two layouts"),
    # Tables and keys.
    ({C: None}, "table 'customer' has no file: .*customer.parquet"),
    ({"customer.tsv": "id\n1\n"}, "table 'customer' has two files"),
    ({C: "id,city,age\n"}, "customer.csv has no rows"),
    (changed(D, "pkey: number", "pkey: numbr"), "pkey names the column 'numbr', and .*order.csv has"),
    (changed(D, "pkey: id", "pkey: [id, city]"), r"'customer': pkey names the column \['id', 'city'\], and"),
    (changed(D, "time_col: at", "time_col: {at: b}"), "time_col names the column {'at': 'b'}, and .*order.csv has"),
    (changed(D, "customer: customer,", "customer: [customer],"), r"holds keys of .\['customer'\]., and the tables are"),
    (changed(D, "customer: customer,", "customer: client,"), r"order.customer holds keys of 'client', and the tables"),
    (changed(D, "pkey: number, ", ""), "keys of 'order', which has no pkey"),
    (changed(D, "pkey: id", ""), "table 'customer' has neither a pkey nor fkeys"),
    (changed(D, "note: text", "note: words"), "column 'note' must be one of"),
    (changed(D, "note: text", "customer: category"), "'customer' holds keys, which are edges"),
    (changed(D, "time_col: at", "time_col: before"), "is said to hold keys and times"),
    (changed(D, "fkeys: {", "fkeys: customer, columns: {a: b}}\n  x: {fkeys: {"), "fkeys must name columns"),
    (changed(C, "c1,Oslo", "a3,Oslo"), "column 'id' lists node a3 twice, first in row 2, then in row 3: every"),
    (changed(C, "c1,Oslo", ",Oslo"), "'id' is empty in row 3, and every node has an id"),
    (changed(B, "13,a3,11", "13,a3,99"), "'before' holds '99' in row 3, which no row of .*order.csv has as its number"),
    (changed(B, "14,", "14.5,"), "'number' holds '14.5' in row 4, and keys are whole numbers or words"),
    (changed(D, "fkeys: {customer: customer, before: order}, ", "") | {T: None, L: None}, "names no foreign keys"),
    ({"customer.csv": "id,id,age\n1,1,1\n"}, "has two columns called 'id'"),
    # Times.
    (changed(B, "2024-01-20 10:00:00", "yesterday"), "'at' holds 'yesterday' in row 2, and times are dates"),
    (
        {B: FILES[B].replace("2024-", "2024.")},
        "'at' holds '2024.01-05 10:00:00' in row 1 .*, and times are dates",
    ),
    ({L: SPLIT.replace("2024-0", "170674560000")}, "are seconds, and those of stays .* milliseconds"),
    ({L: SPLIT.replace("2024-0", "70")}, "small numbers, such as days"),
    (
        {L: "who,at,stays\na3,1.5,1\nc1,2.5,0\n"},
        "'at' holds '1.5' in row 1 .*, and times are whole numbers",
    ),
    # Columns.
    (changed(D, "note: text", "channel: number"), "'channel' holds 'web' in row 1 .* no number. .*{channel: category}"),
    (changed(D, "note: text", "channel: time"), "'channel' holds 'web' in row 1 .*, and times are dates"),
    (changed(B, ",1000,", ",dear,"), "'price' holds 'dear' in row 4, which is no number, as nearly all others are"),
    (changed(B, ",1000,", ",inf,"), "'price' holds 'inf' in row 4, which is no finite number: .*--drop price"),
    (changed(B, "2024-05-01", "soon"), "'due' holds 'soon' in row 5, and times are dates"),
    (changed(D, "tables:", "text: no_module:embed\ntables:"), "text names 'no_module:embed', .* cannot be imported"),
    (changed(D, "tables:", "text: builtins:len\ntables:"), "it must return one row of finite numbers"),
    # Tasks.
    (changed(T, "binary_classification", "ranking"), "task_type must be one of"),
    (changed(T, "entity_col: who\n", ""), "names no entity_col"),
    (changed(T, "entity_col: who", "entity_col: client"), "names the column 'client', and .*labels.csv has"),
    (changed(T, "time_col: at\n", ""), "has no time_col, and rows have times"),
    (changed(T, "target_col: stays", "target_col: leaves"), "has no column 'leaves', the answers"),
    ({T: None}, "tasks.stays has tables and no manifest.yaml, which says what is asked"),
    ({T: TASK + "kind: autocomplet\n"}, "kind must be autocomplete, or a word that hides nothing, got 'autocomplet'"),
    ({T: TASK + "remove_columns: [[order, cost]]\n"}, "hides the column order.cost, and there is none"),
    ({T: TASK + "remove_columns: [[order, at]]\n"}, "hides order.at, which holds keys or times"),
    ({L: None}, "has no train.parquet"),
    ({"tasks/stays/train.csv": FILES[L]}, "has a table for all splits, labels, and one for train"),
    ({D: MANIFEST.replace("val_timestamp: 2024-03-01\n", "")}, "does not say which question is to train on"),
    (changed(L, "b7,2024-02-02,0", "b7,2024-02-02,2"), "must be 0 and 1, or two words of a binary_classification"),
    (
        {L: FILES[L].replace(",1\n", ",yes\n").replace(",0\n", ",-1\n")},  # type: ignore[union-attr]
        "holds -1 among words",
    ),
    (changed(L, "b7,2024-02-02", "b7,2024-02-45"), "'at' holds '2024-02-45' in row 2, and times are dates"),
    (changed(L, "b7,2024-02-02", "b7,"), "'at' is empty in row 2, and a question has a time"),
    (changed(L, "b7,2024-02-02", "q7,2024-02-02"), "'who' holds 'q7' in row 2, which no row of .*customer.csv has as"),
    (changed(L, "b7,2024-02-02", ",2024-02-02"), "'who' is empty in row 2, and a question is about a row"),
    (
        {L: "who,at,stays,split\na3,2024-02-01,1,train\nb7,2024-01-01,0,val\n"},
        r"is trained at 2024-02-01 00:00:00, later than its first question .* \(2024-01-01 00:00:00\)",
    ),
    (
        {D: MANIFEST.replace("val_timestamp: 2024-03-01\n", ""), L: None}
        | {"tasks/stays/train.csv": FILES[L], "tasks/stays/val.csv": "who,at,stays\n"},
        "val.csv has no rows: leave the table out, or fill it",
    ),
    ({L: "who,at,stays,split\na3,2024-02-01,1,learn\n"}, "'split' holds 'learn' in row 1"),
    (changed(T, "binary_", "multilabel_"), "must be lists of 0 and 1"),
    ({"tasks/order/manifest.yaml": TASK, "tasks/order/labels.csv": FILES[L]}, "'order' is a table and a task"),
]


@pytest.mark.parametrize(("files", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_a_bad_folder_gets_one_sentence(files: dict[str, str | None], message: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", FILES | files)
    with pytest.raises((ValueError, ModuleNotFoundError), match=message) as refusal:
        prepare_graph(source, tmp_path / "graph")
    told = str(refusal.value)
    assert "\n" not in told and len(told) < 700 and not (tmp_path / ".graph.preparing").exists()


def test_too_many_words_for_a_category(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns_module, "MOST", 100)
    rows = "".join(f"k{n},name {n}\n" for n in range(102))
    told = MANIFEST.replace("{pkey: id}", "{pkey: id, columns: {name: category}}")
    source = write(tmp_path / "source", FILES | {"customer.csv": f"id,name\nb7,\na3,\nc1,\n{rows}", D: told})
    with pytest.raises(ValueError, match=r"'name' has more than 100 different words: say .* \(columns: {name: text}"):
        prepare_graph(source, tmp_path / "graph")


@pytest.mark.parametrize("option", [["--time", "at"], ["--reverse"], ["--undirected"], ["--split", "1", "0", "0"]])
def test_options_of_other_layouts_are_refused(option: list[str], tmp_path: Path) -> None:
    source = write(tmp_path / "source", FILES)
    with pytest.raises(SystemExit, match="says itself which columns are times and keys"):
        main(["prepare", str(source), str(tmp_path / "graph"), *option])


@pytest.mark.parametrize(
    "files",
    [
        changed(D, "before: order", "before: customer") | changed(B, ",11,2024", ",c1,2024"),  # none of the other keys
        changed(B, "11,a3,,", "11,a3,13,") | {},  # a cycle: 11 after 13 after 11
        changed(B, "11,a3,,", "11,a3,11,"),  # a row that names itself
        changed(D, "customer: {pkey: id}", "customer: {pkey: id, fkeys: {city: town}}\n  town: {pkey: town}")
        | {"town.csv": "town,size\nOslo,7\nLund,1\n"},
    ],
)
def test_odd_folders_are_right(files: dict[str, Any], tmp_path: Path) -> None:
    if "before: customer" in str(files.get(D)):
        files[B] = files[B].replace(",12,2024", ",,2024").replace(",15,2024", ",,2024")
    prepare_graph(write(tmp_path / "source", FILES | files), tmp_path / "graph")
    assert Graph.open(tmp_path / "graph").num_edges > 0
