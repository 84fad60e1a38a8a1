"""How large a batch may be: foreseen from its nodes and edges, and corrected by what batches before it really took."""

from __future__ import annotations

from lightning_gnn_dist.evaluation import budget

_FIRST = 4  # the first batch takes this part of what others may
_MEASURABLE = 4 << 20  # bytes; what smaller batches take is lost in what an allocator keeps
_LEAST_FACTOR = 0.1


class Forecast:
    """Learns how many bytes a batch takes for each byte that was foreseen for it.

    What counts is how far the process has grown since the work began: an allocator keeps much of what is freed.

    Args:
        most_bytes: Bytes that a batch may take.
    """

    def __init__(self, most_bytes: float) -> None:
        self._most, self._factor, self._is_first = most_bytes, 1.0, True
        self._base = budget.held_bytes()

    @property
    def allowed(self) -> float:
        """The bytes that may be foreseen for the next batch."""
        return self._most / self._factor / (_FIRST if self._is_first else 1)

    def begin(self) -> None:
        """Note that a batch begins."""
        self._measures = budget.reset_peak()

    def end(self, foreseen: float, held_by_tables: int) -> None:
        """Note what a batch was foreseen to take, and how many bytes tables of rows take beside it."""
        self._is_first = False
        most = budget.peak_bytes() if self._measures else None
        if most is not None and self._base is not None and foreseen > _MEASURABLE:
            # Memory that was freed before is used again, and does not show: so batches grow step by step.
            self._factor = max((most - self._base - held_by_tables) / foreseen, self._factor / 2, _LEAST_FACTOR)

    def was_too_much(self, foreseen: float) -> None:
        """Note that memory was short for a batch: from now on, half of it is the most."""
        self._most = min(self._most, foreseen * self._factor) / 2
