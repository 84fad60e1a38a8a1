"""A start at which all ranks are there, or everybody is told who is not."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist import collectives
from lightning_gnn_dist.checks import check_durations


class StartsTogether(DDPStrategy):
    """Calls the roll before the process group is made, which would wait for half an hour and name nobody.

    Args:
        start_timeout: How long the ranks wait for each other.
        options: Those of :class:`lightning.pytorch.strategies.DDPStrategy`.
    """

    def __init__(self, *, start_timeout: timedelta, **options: Any) -> None:
        super().__init__(**options)
        check_durations(start_timeout=start_timeout)
        self.start_timeout = start_timeout

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        place = self.cluster_environment
        assert place is not None
        # Held until the process group has a store of its own at the same port.
        held = collectives.roll_call(
            place.main_address, place.main_port, self.global_rank, self.world_size, self.start_timeout
        )
        super().setup_distributed()
        del held
