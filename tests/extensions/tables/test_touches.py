"""Who puts together the rows that ranks have touched is known with two waits."""

import pytest
import torch

from lightning_gnn_dist.extensions.tables.exchange import Touches

OF_RANKS = [[0, 2, 3, 7, 8], [], [2, 3, 4, 8, 9, 11], [3, 7]]


@pytest.mark.gpu
def test_the_host_waits_for_the_number_of_ids_and_for_counts() -> None:
    notes = pytest.importorskip("pretend", reason="only pretended devices count how often the host waits").notes
    of_ranks = [torch.tensor(ids, dtype=torch.int64, device="cuda") for ids in OF_RANKS]
    notes.clear()
    touches = Touches(of_ranks)
    for rank in range(4):
        touches.of_home(rank), [touches.sent(rank, home) for home in range(4)]
    assert sum(times for (kind, _, _), times in notes.items() if kind == "sync") == 2, notes
