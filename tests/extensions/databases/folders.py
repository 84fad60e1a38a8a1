"""A small database in text, by hand, and the same in RelBench's layout."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.conftest import module_of
from tests.pages import ROOT

write_shop = module_of(ROOT / "examples" / "shop.py").write_shop
MANIFEST = """\
val_timestamp: 2024-03-01
test_timestamp: 2024-04-01
tables:
  customer: {pkey: id}
  order: {pkey: number, time_col: at, fkeys: {customer: customer, before: order}, columns: {note: text}}
"""
TASK = """\
task_type: binary_classification
entity_table: customer
entity_col: who
time_col: at
target_col: stays
"""
FILES = {
    "database.yaml": MANIFEST,
    "customer.csv": "id,city,age\nb7,Oslo,20\na3,Lund,\nc1,Oslo,60\nd9,Lund,40\n",
    "order.csv": (
        "number,customer,before,at,price,channel,due,note\n"
        "11,a3,,2024-01-05 10:00:00,10,web,2024-01-09,fine\n"
        "12,b7,,2024-01-20 10:00:00,30,shop,,\n"
        "13,a3,11,2024-02-10 22:00:00,20,web,2024-02-12,very fine\n"
        "14,,12,2024-03-05 10:00:00,1000,app,2024-03-07,late\n"
        "15,c1,,2024-04-20 10:00:00,,web,2024-05-01,never\n"
        "16,c1,15,2024-02-20 10:00:00,20,shop,2024-02-22,so so\n"
    ),
    "tasks/stays/manifest.yaml": TASK,
    "tasks/stays/labels.csv": (
        "who,at,stays\na3,2024-02-01,1\nb7,2024-02-02,0\na3,2024-02-15,0\na3,2024-03-02,1\nc1,2024-04-02,0\n"
    ),
}


def write(folder: Path, files: Mapping[str, str | None]) -> Path:
    """Write texts by the names of their files; None leaves one out."""
    for name, text in files.items():
        if text is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def seconds(date: str) -> int:
    return int(np.datetime64(date, "s").astype(np.int64))


def as_relbench(plain: Path, folder: Path) -> Path:
    """The same database as RelBench's manifest and Parquet files have it."""
    import pyarrow as pa
    from pyarrow import parquet

    def copy(source: Path, target: Path, rows: slice = slice(None)) -> None:
        with source.open() as file:
            lines = list(csv.DictReader(file))[rows]
        table = {name: pa.array([_cell(name, line[name]) for line in lines]) for name in lines[0]}
        target.parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(table), target)

    for name in ("customer", "order"):
        copy(plain / f"{name}.csv", folder / "db" / f"{name}.parquet")
    for split, rows in (("train", slice(3)), ("val", slice(3, 4)), ("test", slice(4, 5))):
        copy(plain / "tasks/stays/labels.csv", folder / f"tasks/stays/{split}.parquet", rows)
    head = "name: small\nmanifest_version: 1\n"
    write(folder, {"manifest.yaml": head + MANIFEST, "tasks/stays/manifest.yaml": "kind: forecast\n" + TASK})
    return folder


def _cell(name: str, cell: str) -> Any:
    """Of the type that a database has: RelBench's Parquet files hold dates, numbers and nulls."""
    if cell == "":
        return None
    if name in ("at", "due"):
        return np.datetime64(cell, "us").item()
    if name in ("number", "before", "stays"):
        return int(cell)
    return float(cell) if name in ("age", "price") else cell
