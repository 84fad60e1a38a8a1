"""Rows of inner layers that ranks compute for each other at meetings, with the model that all have alike."""

from __future__ import annotations

from lightning_gnn_dist.joint import KeepsRows
from lightning_gnn_dist.rounds.part import Part


class KeptRows(Part):
    """Lets a data module refresh the rows of its boundary, before anything reads them in the round.

    Args:
        data: The data module.
    """

    def __init__(self, data: KeepsRows) -> None:
        self._data = data

    def begin_round(self) -> None:
        self._data.refresh_rows(self.fit.round.batches_done)
