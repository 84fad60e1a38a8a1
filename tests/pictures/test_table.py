"""The table of runs on a report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_gnn_dist.pictures.page import table_of
from tests.pictures.records import record


def test_the_table_has_the_best_and_the_last_value() -> None:
    titles, first, second = table_of({"a": record(), "b": replace(record(), finished=False)}, "val_loss")
    assert dict(zip(titles, first, strict=True)) | {"run": "a", "best": "0.0156", "cut": "10.0%"} == dict(
        zip(titles, first, strict=True)
    )
    assert second[0] == "b (did not end)"


@pytest.mark.parametrize(("title", "name"), [("MB at boundary", "boundary_bytes"), ("MB fetched", "fetched_bytes")])
def test_bytes_have_a_column_where_a_run_has_some(title: str, name: str) -> None:
    own = record()
    rows = replace(own, ranks=[[replace(row, **{name: 2e6}) for row in own.ranks[0]]])
    titles, first, second = table_of({"a": own, "b": rows}, "val_loss")
    assert (first[titles.index(title)], second[titles.index(title)]) == ("0.00", "12.00")
    assert title not in table_of({"a": own}, "val_loss")[0]
