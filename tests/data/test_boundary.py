"""Ways to treat a boundary: what cannot be meant is refused, and equal ones are equal."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_gnn_dist.data.boundary import Halo


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hops": 2}, "hops must be 1, got 2: farther nodes are another rank's business"),
        ({"hops": 0}, "hops must be 1, got 0"),
        ({"hops": True}, "hops must be 1, got True"),
        *(({"bytes": limit}, "bytes must be an integer of at least 1") for limit in (0, 1e6, float("nan"), "1MB")),
        *(({"neighbors": limit}, "neighbors must be an integer of at least 1") for limit in (0, 2.5, "2")),
    ],
)
def test_a_halo_that_cannot_be_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Halo(**wrong)
