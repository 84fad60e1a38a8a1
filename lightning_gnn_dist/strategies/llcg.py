r"""Learn Locally, Correct Globally (Ramezani et al., ICLR 2022, arXiv:2111.08202).

Round :math:`r` on every rank :math:`p`: :math:`K_r` local steps on the rank's own part, then

.. math::
    \bar\theta \leftarrow \sum_p w_p \theta_p,
    \qquad\text{then, } S \text{ times:}\qquad
    \bar\theta \leftarrow \bar\theta - \gamma\, \nabla \mathcal{L}_\mathrm{global}(\bar\theta;\, \text{batch})
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, ClassVar, Literal

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import MAX_INTEGER, check_choice, is_integer, is_number, shown
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.clock import RoundClock
from lightning_gnn_dist.rounds.correction_gradients import (
    average_gradient_,
    mean_gradient,
    require_seeds,
    trained_parameters,
    unrecorded,
)
from lightning_gnn_dist.rounds.drift import Drift, Towards
from lightning_gnn_dist.rounds.launchers import Launch
from lightning_gnn_dist.rounds.means.averaging import Moments
from lightning_gnn_dist.rounds.means.finite import Nonfinite
from lightning_gnn_dist.rounds.means.norm_statistics import reestimate_statistics
from lightning_gnn_dist.rounds.means.outer import Outer
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy, Weights
from lightning_gnn_dist.rounds.rows.merging import take_rows_
from lightning_gnn_dist.rounds.rows.owned_gradients import norms_of_ranks
from lightning_gnn_dist.rounds.rows.tables import (
    dense_parameters,
    no_rows,
    refuse_average_of_moments,
    refuse_owned,
    tables_of,
)
from lightning_gnn_dist.rounds.walking import buffers_of
from lightning_gnn_dist.strategies.correction_optimizer import CorrectionOptimizer, Mode, Schedule
from lightning_gnn_dist.wire import collectives

Correction = Literal["sliced", "rank0"]
GlobalBuffers = Literal["average", "local", "global"]
# Of a meeting that corrects drift, by default.
_SHARE = 0.1  # correction steps for a local step
_THRIFTY = Outer(lr=1.0, momentum=0.8, nesterov=False, adaptive=True, bits=8)


class LLCGStrategy(RoundStrategy):
    r"""Average the replicas when a round ends, then take a few steps on the whole graph.

    Only the correction sees the edges that partitioning cut, and the labels of all parts in one batch. Every rank
    computes its slice of one global batch and the gradients are averaged, so that ranks share the work and the
    replicas stay equal without a broadcast. The loss is that of ``training_step``, or of ``correction_step(batch)``
    if the module defines one; it must be a mean over the seeds of the batch. Its gradient is clipped as in local
    steps: by ``gradient_clip_val``, or by the module's ``configure_gradient_clipping``, which is given the
    correction's optimizer. With manual optimisation it is not clipped.

    Beyond the paper, a global gradient is also the control variate in every local step of the round
    that follows (:mod:`~lightning_gnn_dist.rounds.drift`), the optimizers' moments are averaged as well, and the
    averages have momentum while rounds agree. Where parts differ this is what makes local training as good as training
    on the whole graph. The paper's method is ``drift=None, weights="uniform"``, and
    ``GlobalBatching(sampler=NeighborSampler([-1, -1]))`` in the data module.

    Corrections and anchors call ``training_step`` outside Lightning's loop, without the hooks around it, and the first
    anchor comes before the first ``on_train_epoch_start``. What the step logs and counts in metrics is forgotten, and
    anchors leave buffers alone; Python state of its own is not protected. ``correction_step`` is the way out.

    A correction is a training step: dropout is on, and batch norms normalise by the batch and move their statistics,
    which are averaged afterwards. An anchor normalises by the batch too, as local steps do, but draws no dropout and
    moves nothing (:func:`~lightning_gnn_dist.rounds.correction_gradients.without_noise`).

    A round moves the model for the average, S times for the correction steps and for the anchor, by default in 8 bits a
    number, and twice for Adam's moments, in 16. Averaging moves it once, in 32.

    Arguments that are not listed are those of :class:`~lightning_gnn_dist.rounds.round_strategy.RoundStrategy`.

    Args:
        clock: Decides when a round ends.
        correction_steps: :math:`S`. An integer, or a share of the round's local steps such as 0.1 (rounded up).
            With 0, ``drift=None`` and ``weights="uniform"`` this is local SGD. ``"auto"``: 0.1, and the more steps the
            shorter they are; one step with ``drift=None`` or ``Drift(corrects=True)``.
        correction: ``"sliced"``, or the paper's ``"rank0"``: rank 0 computes the whole batch while the others wait, so
            the step must not call a collective (``self.all_gather``).
        correction_optimizer: An optimizer of the correction's own. ``"averaged"``: like the module's, starting each
            time from the mean state of the ranks. ``"persistent"``: the same, with a state that lives on from round
            to round. ``"reset"``: the same, new at every meeting. ``"sgd"``: plain SGD. Or a function from
            parameters to an optimizer. Default: ``"averaged"`` with ``average_optimizer=True``, else ``"persistent"``.
        correction_lr: :math:`\gamma`, or a function from the round's number to it. Default: the learning rate of the
            local steps, schedule included, and with ``correction_steps="auto"`` :math:`S^{-3/4}` times that.
        drift: What local gradients are steered towards: the gradient of the whole graph, or with ``Drift("ranks")``
            the mean of the ranks' gradients. None: no correction of drift.
        buffers: ``"average"`` or ``"local"``, or ``"global"``: at a meeting the statistics of batch normalisation are
            taken anew on as many batches of the whole graph as an anchor (4 without drift), but for layers in
            evaluation mode. Other buffers are averaged.
        average_optimizer: Average the optimizers' moments too: all, or one kind. Default: all, when drift is corrected.
        outer: The optimizer of the meetings, and the bits of what they send. Default: when drift is corrected
            ``Outer(lr=1.0, momentum=0.8, nesterov=False, adaptive=True, bits=8)``, else the mean is the model.
    """

    strategy_name = "llcg"
    drift_modes: ClassVar[tuple[Towards, ...]] = ("global", "ranks")
    buffer_modes: ClassVar[Any] = GlobalBuffers

    def __init__(
        self,
        clock: RoundClock | None = None,
        *,
        correction_steps: int | float | Literal["auto"] = "auto",
        correction: Correction = "sliced",
        correction_optimizer: Mode | Callable[[list[Tensor]], Optimizer] | None = None,
        correction_lr: float | Schedule | None = None,
        drift: Drift | None = Drift("global"),
        nonfinite: Nonfinite = "refuse",
        weights: Weights = "nodes",
        buffers: GlobalBuffers = "average",
        average_optimizer: Moments | None = None,
        outer: Outer | None = None,
        launch: Launch = Launch(),
    ) -> None:
        super().__init__(
            clock,
            weights=weights,
            buffers=buffers,  # type: ignore[arg-type]  # this class offers one more
            average_optimizer=drift is not None if average_optimizer is None else average_optimizer,
            drift=drift,
            nonfinite=nonfinite,
            outer=_THRIFTY if outer is None and drift is not None else outer,
            launch=launch,
        )
        is_auto = isinstance(correction_steps, str) and correction_steps == "auto"
        self._shortens_steps = is_auto and correction_lr is None
        if is_auto:
            correction_steps = 1 if drift is None or drift.corrects else _SHARE
        _check_steps(correction_steps)
        check_choice("correction", correction, Correction)
        takes_one = is_integer(correction_steps) and correction_steps == 1 and correction == "sliced"
        if drift is not None and drift.corrects and not takes_one:
            raise ValueError(
                f"drift={self.drift} takes one step along the gradient of the anchor, which all ranks compute: leave "
                f"correction_steps={shown(correction_steps)} and correction={correction!r} out."
            )
        self.correction_steps = int(correction_steps) if is_integer(correction_steps) else float(correction_steps)
        self.correction = correction
        if correction_optimizer is None:
            correction_optimizer = "averaged" if self.average_optimizer is True else "persistent"
        self._corrector = CorrectionOptimizer(correction_optimizer, correction_lr)
        self._others_wait = False
        self._rounds_ahead = 0  # of the anchor that is taken

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.correction_steps:
            self._corrector.check(self.optimizers)
            with self.replicas.in_own_form():
                self._corrector.check_tables(self._module())
            if self._corrector.mode == "averaged" and self.average_optimizer is not True:
                refuse_average_of_moments(self._module())

    def end_round(self) -> None:
        self.average_replicas()
        if self.drift is not None and self.drift.corrects:
            self._correct_by_anchor()
        elif (steps := self._steps()) > 0:
            with unrecorded(self._module()):
                self._prepare_correction(steps)
                (self._correct_together if self.correction == "sliced" else self._correct_on_rank0)(steps)
            if self.buffers != "local":  # each rank's forwards have moved its own
                collectives.average_(buffers_of(self._module()))
        if self.buffers == "global":
            reestimate_statistics(self, self._batches(sliced=True, stop=(self.drift or Drift()).anchor_steps))

    def shared_gradient(self, own: list[Tensor]) -> list[Tensor]:
        if not self._anchor_steps:
            return super().shared_gradient(own)
        # The round's first batches; its corrections take those that follow.
        data = refusals.require_anchors(self._module().trainer, self._what_needs_global_batches)
        batches = data.anchor_batches(self.state.round_idx + self._rounds_ahead, of="graph")
        parameters = dense_parameters(self._module())
        gradient, seeds = mean_gradient(self, islice(batches, self._anchor_steps), parameters)
        average_gradient_(self, gradient, seeds)
        return gradient

    def extra_state(self) -> dict[str, Any]:
        return super().extra_state() | {"correction": self._corrector.state()}

    def restore_extra_state(self, state: Mapping[str, Any]) -> None:
        super().restore_extra_state(state)
        if "correction" in state:
            with self.replicas.in_own_form():
                self._corrector.restore(state["correction"], self.optimizers, trained_parameters(self._module()))

    @property
    def shares_gradients(self) -> bool:
        return bool(self.correction_steps) or super().shares_gradients

    def _begin_fit(self, trainer: Trainer) -> None:
        if self._what_needs_global_batches:
            refusals.require_corrections(trainer, self._what_needs_global_batches)
            refusals.require_step(self._module())
        if self.correction_steps and self.correction == "rank0" and self.world_size > 1:
            refuse_owned(self._module(), f'{type(self).__name__}(correction="rank0")', 'correction="sliced"')
        self._others_wait = False
        self._rounds_ahead = 0
        super()._begin_fit(trainer)
        if self.drift is not None and self.drift.corrects and self._keeper_of_rows() is not None:
            raise ValueError(
                f"drift={self.drift} takes anchors before boundary=History() has computed the rows that they read: use "
                "boundary=Halo(), or Drift() as it is by default."
            )

    @property
    def _anchor_steps(self) -> int:
        """How many batches of the whole graph the anchor of a round takes before its corrections."""
        return self.drift.anchor_steps if self.drift is not None and self.drift.towards == "global" else 0

    @property
    def _what_needs_global_batches(self) -> str:
        if self.correction_steps:
            return "A correction on the whole graph"
        if self._anchor_steps:
            return f"drift={self.drift}"
        return 'buffers="global"' if self.buffers == "global" else ""

    def _prepare_correction(self, steps: int) -> None:
        parameters = trained_parameters(self._module())
        with self.replicas.in_own_form():
            self._corrector.prepare(
                self.optimizers,
                parameters,
                self.state.round_idx,
                are_averaged=self.average_optimizer is True,
                share_of_lr=steps**-0.75 if self._shortens_steps else 1.0,
            )

    def _correct_by_anchor(self) -> None:
        """Step along the anchor gradient of the round that follows. Collective."""
        done = self.state.batches_done + self.state.batches_of_ranks[self.global_rank]
        self._rounds_ahead = 1
        gradient = self.drift_correction.anchor(self.state.round_idx + 1, done)
        self._rounds_ahead = 0
        self._prepare_correction(steps=1)
        self._step(gradient, dense_parameters(self._module()))

    def _correct_together(self, steps: int) -> None:
        for batch in self._correction_batches(steps, sliced=True):
            gradient, seeds = mean_gradient(self, [batch])
            average_gradient_(self, gradient, seeds)  # that of the whole batch, whatever the slices' sizes
            self._step(gradient)

    def _correct_on_rank0(self, steps: int) -> None:
        tables = list(tables_of(self._module()).values())
        touched = [no_rows(table) for table in tables]
        if self.is_global_zero:
            self._others_wait = True
            for batch in self._correction_batches(steps, sliced=False):
                gradient, seeds = mean_gradient(self, [batch])
                require_seeds(self, seeds)
                touched = [all_rows + own for all_rows, own in zip(touched, _sparse(gradient), strict=True)]
                self._step(gradient)
            self._others_wait = False
        collectives.broadcast_([parameter.data for parameter in dense_parameters(self._module())])
        if tables and collectives.world_size() > 1:
            take_rows_(tables, [each.coalesce()._indices()[0] for each in touched], source=0)

    def _step(self, gradient: list[Tensor], parameters: list[Tensor] | None = None) -> None:
        parameters = trained_parameters(self._module()) if parameters is None else parameters
        with self.replicas.in_own_form(), norms_of_ranks(self.precision_plugin, self.replicas.tables):
            self._corrector.step(self.optimizers, parameters, gradient, self.state.round_idx, self._clip)
        self.replicas.have_changed()

    def _clip(self, optimizer: Optimizer) -> None:
        """Clip as in local steps. With manual optimisation ``training_step`` does that, so nothing is clipped here."""
        module = self._module()
        if module.automatic_optimization:
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=module.trainer.gradient_clip_val,
                gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
            )

    def _check_alone(self, what: str) -> None:
        if self._others_wait:
            raise RuntimeError(
                f'{what} inside a correction: with correction="rank0" nobody answers. Use correction="sliced", or '
                "define correction_step(batch), which returns the mean loss without it."
            )
        super()._check_alone(what)

    def _correction_batches(self, steps: int, *, sliced: bool) -> Iterator[Any]:
        return self._batches(sliced=sliced, start=self._anchor_steps, stop=self._anchor_steps + steps)

    def _batches(self, *, sliced: bool, start: int = 0, stop: int | None = None) -> Iterator[Any]:
        data = refusals.require_corrections(self._module().trainer, self._what_needs_global_batches)
        return data.correction_batches(self.state.round_idx, sliced=sliced, start=start, stop=stop)

    def _steps(self) -> int:
        if isinstance(self.correction_steps, int):
            return self.correction_steps
        per_step: int = self._module().trainer.accumulate_grad_batches
        # The mean over ranks, so that all take as many even where a clock of their own ended their round.
        mean = sum(self.state.batches_of_ranks) / len(self.state.batches_of_ranks)
        return math.ceil(self.correction_steps * mean / per_step)


def _sparse(gradient: list[Tensor]) -> list[Tensor]:
    return [each for each in gradient if each.is_sparse]


def _check_steps(steps: Any) -> None:
    most = MAX_INTEGER if is_integer(steps) else 1
    if not is_number(steps) or not 0 <= steps <= most:
        raise ValueError(
            f"correction_steps must be a whole number (2: two steps a round) or a share of the local steps between "
            f'0.0 and 1.0 (0.1: one for every ten), or "auto", got {shown(steps)}.'
        )
