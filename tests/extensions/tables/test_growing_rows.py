"""Rows that become more and more, against a dictionary."""

import pytest
import torch

from lightning_gnn_dist.extensions.tables import growing_rows
from lightning_gnn_dist.extensions.tables.growing_rows import GrowingRows


@pytest.mark.parametrize("least_bytes", [0, growing_rows._LEAST_BYTES])
def test_rows_are_those_of_a_dictionary(least_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_rows, "_LEAST_BYTES", least_bytes)
    rows, known, counts = GrowingRows(), {}, dict[int, int]()
    rows.declare("row", torch.zeros(1, 2))
    rows.declare("count", torch.full((1,), 5))
    chance = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(300, (30,), generator=chance).unique()
        is_new = rows.slots(ids) < 0
        assert is_new.tolist() == [row not in known for row in ids.tolist()]
        made = torch.randn(int(is_new.sum()), 2, generator=chance)
        rows.add(ids[is_new], {"row": made})
        known |= dict(zip(ids[is_new].tolist(), made, strict=True))
        slots = rows.slots_with(ids)
        rows.put("count", slots, rows.take("count", slots) + 1)
        counts |= {row: counts.get(row, 5) + 1 for row in ids.tolist()}
    ids, slots = rows.by_id()
    assert ids.tolist() == sorted(known)
    assert torch.equal(rows.take("row", slots), torch.stack([known[row] for row in sorted(known)]))
    assert rows.take("count", slots).tolist() == [counts[row] for row in sorted(known)]
    some, slots = rows.in_ranges([(10, 40), (40, 40), (250, 260)])
    assert some.tolist() == [row for row in sorted(known) if 10 <= row < 40 or 250 <= row < 260]
    assert torch.equal(rows.slots(some), slots)
    assert len(rows.all_of("row")) == len(rows) == len(known)
