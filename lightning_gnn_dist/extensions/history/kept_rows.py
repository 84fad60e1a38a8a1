"""The hook of meetings that computes the rows of nodes outside a part, for the round that follows."""

from __future__ import annotations

import math
from typing import Any, NoReturn

from lightning_gnn_dist.data.datamodule import GraphDataModule
from lightning_gnn_dist.rounds.lightning_internals import datamodule_of
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook

_LOOKED_AT = 100_000  # rounds whose ends are compared with changes of parts


class KeptRows(MeetingHook):
    """Lets ranks compute the rows for each other, with the model that all have alike, before anything reads them."""

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._data: GraphDataModule = datamodule_of(fit.lightning_module.trainer)
        self._is_checked = False

    def begin_round(self) -> None:
        loader, start = self._data._train_batches, self.fit.round.batches_done
        assert loader is not None
        if not self._is_checked and (every := loader.end_of_phase(0)) is not None:
            self._check_parts(every)
        self._is_checked = True
        if self._data._home.is_cut:
            loader.move_to(start)
            assert self._data._home.outside is not None
            self._data._home.outside.refresh(loader.phase_of(start))

    def _check_parts(self, every: int) -> None:
        """Refuse parts that change within a round: after so many batches."""
        trainer: Any = self.fit.lightning_module.trainer
        last, start = trainer.max_epochs, self.fit.round.batches_done
        for idx in range(self.fit.round.round_idx, _LOOKED_AT if last is None or last < 0 else min(last, _LOOKED_AT)):
            stop = start + trainer.strategy.batches_of_round(idx)
            if stop == math.inf:
                _refuse(f"with {trainer.strategy.clock} nobody knows before when that is. Use EverySteps or EveryPass")
            if start // every != (stop - 1) // every:
                _refuse(
                    f"round {idx} is of batches {start} to {stop - 1}, and parts change every {every} batches. Let "
                    "rounds have a length that divides this"
                )
            start = stop


def _refuse(why: str) -> NoReturn:
    raise ValueError(
        "boundary=History() has ranks compute rows for their parts at meetings, so parts may change only there, and "
        f"{why}, or keep parts, with Holding(Fixed()), or use boundary=Halo()."
    )
