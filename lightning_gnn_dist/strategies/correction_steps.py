r"""The correction of LLCG: steps on batches of the whole graph, behind the mean, after which replicas are still equal.

.. math::
    \bar\theta \leftarrow \bar\theta - \gamma\, \nabla \mathcal{L}_\mathrm{global}(\bar\theta;\, \text{batch})

sliced      each rank computes a slice of each batch, and the mean of their gradients moves all
rank0       rank 0 computes whole batches while the others wait, and sends them its model
by anchor   all step along the anchor gradient of the next round, which is of the whole graph, too
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.joint import KeepsRows
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.correction_gradients import (
    average_gradient_,
    mean_gradient,
    require_seeds,
    unrecorded,
)
from lightning_gnn_dist.rounds.drift import DriftCorrection
from lightning_gnn_dist.rounds.lightning_internals.trainer import datamodule_of
from lightning_gnn_dist.rounds.means.averaging import AveragedBuffers, AveragedMoments
from lightning_gnn_dist.rounds.means.means import length_of
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.rounds.walking import buffers_of
from lightning_gnn_dist.strategies.correction import Correction
from lightning_gnn_dist.strategies.correction_optimizer import CorrectionOptimizer
from lightning_gnn_dist.tables.exchange import take_rows_
from lightning_gnn_dist.tables.gradients import norms_of_ranks
from lightning_gnn_dist.tables.table import no_rows
from lightning_gnn_dist.wire import collectives

NEEDS = "A correction on the whole graph"


class CorrectionSteps(Part):
    """Takes the steps.

    Args:
        correction: How many, who computes them, and what takes them.
        behind: The parts of the mean.
        first: The number of a round's first batch of the whole graph that is not the anchor's.
    """

    def __init__(self, correction: Correction, behind: Sequence[Part], *, first: int = 0) -> None:
        self._correction, self._first = correction, first
        self._optimizer = CorrectionOptimizer(correction.optimizer, correction.lr)
        self._are_averaged = any(isinstance(part, AveragedMoments) and part.are_all for part in behind)
        self._averages_buffers = any(isinstance(part, AveragedBuffers) for part in behind)
        self.others_wait = False  # for rank 0

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        refusals.require_corrections(fit.lightning_module.trainer, NEEDS)
        refusals.require_step(fit.lightning_module)
        self._optimizer.check(fit.optimizers)
        if fit.tables is not None and (trained := [table.weight for table in fit.tables.trained()]):
            with self._in_own_form():
                self._optimizer.check_tables(fit.lightning_module, [*fit.dense_parameters(), *trained])

    def apply(self) -> None:
        if (steps := self._number()) == 0:
            return
        with unrecorded(self.fit.lightning_module):
            self._prepare(steps)
            (self._correct_together if self._correction.way == "sliced" else self._correct_on_rank0)(steps)
        if self._averages_buffers:  # each rank's forwards have moved its own
            collectives.average_(buffers_of(self.fit.lightning_module))

    def sizes(self) -> list[int]:
        return [length_of(self.fit.trained_parameters())]

    def state(self) -> dict[str, Any]:
        return {"correction": self._optimizer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.begin_round()
        if "correction" in state:
            with self._in_own_form():
                parameters = self.fit.trained_parameters()
                self._optimizer.restore(state["correction"], self.fit.optimizers, parameters)

    def _number(self) -> int:
        """Return how many steps follow the round."""
        if isinstance(self._correction.steps, int):
            return self._correction.steps
        batches = self.fit.round.batches_of_ranks
        per_step: int = self.fit.lightning_module.trainer.accumulate_grad_batches
        # The mean over ranks, so that all take as many even where a clock of their own ended their round.
        return math.ceil(self._correction.steps * (sum(batches) / len(batches)) / per_step)

    def _prepare(self, steps: int) -> None:
        with self._in_own_form():
            self._optimizer.prepare(
                self.fit.optimizers,
                self.fit.trained_parameters(),
                self.fit.round.round_idx,
                are_averaged=self._are_averaged,
                share_of_lr=steps**-0.75 if self._correction.lr == "shortened" else 1.0,
            )

    def _correct_together(self, steps: int) -> None:
        for batch in self._batches(steps, sliced=True):
            gradient, seeds = mean_gradient(self.fit, [batch])
            average_gradient_(self.fit, gradient, seeds)  # that of the whole batch, whatever the slices' sizes
            self._step(self.fit.trained_parameters(), gradient)

    def _correct_on_rank0(self, steps: int) -> None:
        tables = [] if self.fit.tables is None else [table.weight for table in self.fit.tables.trained()]
        touched = [no_rows(table) for table in tables]
        if collectives.rank() == 0:
            self.others_wait = True
            for batch in self._batches(steps, sliced=False):
                gradient, seeds = mean_gradient(self.fit, [batch])
                require_seeds(self.fit, seeds)
                sparse = [each for each in gradient if each.is_sparse]
                touched = [all_rows + own for all_rows, own in zip(touched, sparse, strict=True)]
                self._step(self.fit.trained_parameters(), gradient)
            self.others_wait = False
        collectives.broadcast_([parameter.data for parameter in self.fit.dense_parameters()])
        if tables and collectives.world_size() > 1:
            take_rows_(tables, [each.coalesce()._indices()[0] for each in touched], source=0)

    def _step(self, parameters: list[Tensor], gradient: list[Tensor]) -> None:
        with self._in_own_form():
            self._optimizer.step(self.fit.optimizers, parameters, gradient, self.fit.round.round_idx, self._clip)
        if self.fit.tables is not None:
            self.fit.tables.have_changed()

    def _clip(self, optimizer: Optimizer) -> None:
        """Clip as in local steps. With manual optimisation ``training_step`` does that, so nothing is clipped here."""
        module = self.fit.lightning_module
        if module.automatic_optimization:
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=module.trainer.gradient_clip_val,
                gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
            )

    def _batches(self, steps: int, *, sliced: bool) -> Iterator[Any]:
        data = refusals.require_corrections(self.fit.lightning_module.trainer, NEEDS)
        return data.correction_batches(
            self.fit.round.round_idx, sliced=sliced, start=self._first, stop=self._first + steps
        )

    @contextmanager
    def _in_own_form(self) -> Iterator[None]:
        """In the block, rows that live with one rank each can be stepped where they are, and clipped together."""
        if (tables := self.fit.tables) is None:
            yield
            return
        with tables.in_own_form(), norms_of_ranks(self.fit.precision_plugin, tables.owned):
            yield


class StepAlongAnchor(CorrectionSteps):
    """Takes one step along the anchor gradient of the next round, which need not be computed twice then.

    Args:
        correction: What takes it.
        behind: The parts of the mean.
        drift: What the anchor is of.
    """

    def __init__(self, correction: Correction, behind: Sequence[Part], drift: DriftCorrection) -> None:
        super().__init__(correction, behind)
        self._drift = drift

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        data = datamodule_of(fit.lightning_module.trainer)
        if isinstance(data, KeepsRows) and data.keeps_rows():
            raise ValueError(
                f"drift={self._drift.drift} takes anchors before boundary=History() has computed the rows that they "
                "read: use boundary=Halo(), or Drift() as it is by default."
            )

    def apply(self) -> None:
        gradient = self._drift.anchor_ahead()
        self._prepare(1)
        self._step(self.fit.dense_parameters(), gradient)
