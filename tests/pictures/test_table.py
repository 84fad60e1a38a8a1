"""The table of runs on a report."""

from __future__ import annotations

from dataclasses import replace

from lightning_gnn_dist.pictures.table import table_of
from tests.pictures.records import record


def test_the_table_has_the_best_and_the_last_value() -> None:
    titles, first, second = table_of({"a": record(), "b": replace(record(), finished=False)}, "val_loss")
    assert dict(zip(titles, first, strict=True)) | {"run": "a", "best": "0.0156", "cut": "10.0%"} == dict(
        zip(titles, first, strict=True)
    )
    assert second[0] == "b (did not end)"
