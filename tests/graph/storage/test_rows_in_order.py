"""Rows in a file are those that were written, however chunks, pages and pieces fall."""

from __future__ import annotations

import fcntl
from itertools import pairwise
from typing import Any

import pytest
import torch

from lightning_gnn_dist.graph.storage import rows_in_order
from lightning_gnn_dist.graph.storage.rows_in_order import ReadInOrder, RowsInFile, WriteInOrder, in_file, in_ram


@pytest.fixture(params=[True, False])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_in_order, "CHUNK_BYTES", 4096)
    if not request.param:

        def refuse(*_: Any) -> int:
            raise OSError("no way past the cache")

        monkeypatch.setattr(fcntl, "fcntl", refuse)


CUTS = [0, 1, 700, 701, 2500, 3001]


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("shape", [(3,), (2, 5), ()])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_pieces_of_rows_are_written_read_and_added_to(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    rows = torch.randn(CUTS[-1], *shape).to(dtype)
    table = RowsInFile.like(rows, len(rows))
    writing, left_out = WriteInOrder(table), [700, 701]
    for start, stop in pairwise(CUTS):
        if [start, stop] != left_out:
            writing.put(start, rows[start:stop])
    writing.end()
    rows[700:701] = 0
    assert torch.equal(table[:], rows), "as a tensor"
    assert torch.equal(in_ram(table), rows) and torch.equal(in_ram(in_file(rows)), rows)
    reading, again = ReadInOrder(table), WriteInOrder(table)
    for start, stop in pairwise(CUTS):
        again.put(start, reading.rows(start, stop) + rows[start:stop])
    again.end()
    assert torch.equal(in_ram(table), rows + rows)


def test_rows_in_ram_are_written_and_read_where_they_are() -> None:
    rows = torch.zeros(4, 2)
    writing, reading = WriteInOrder(rows), ReadInOrder(rows)
    writing.put(1, torch.ones(2, 2))
    writing.end()
    assert rows.sum() == 4 and reading.rows(1, 3).data_ptr() == rows[1:].data_ptr()
    assert in_ram(rows) is rows
