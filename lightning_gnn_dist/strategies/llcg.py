r"""Learn Locally, Correct Globally (Ramezani et al., ICLR 2022, arXiv:2111.08202).

Round :math:`r` on every rank :math:`p`: :math:`K_r` local steps on the rank's own part, then

.. math::
    \bar\theta \leftarrow \sum_p w_p \theta_p,
    \qquad\text{then, } S \text{ times:}\qquad
    \bar\theta \leftarrow \bar\theta - \gamma\, \nabla \mathcal{L}_\mathrm{global}(\bar\theta;\, \text{batch})
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import MAX_INTEGER, check_choice, is_integer, is_number, shown
from lightning_gnn_dist.rounds.clock import RoundClock
from lightning_gnn_dist.rounds.drift import Drift, DriftCorrection, Towards
from lightning_gnn_dist.rounds.launchers import Launch
from lightning_gnn_dist.rounds.means.averaging import Moments
from lightning_gnn_dist.rounds.means.finite import Nonfinite
from lightning_gnn_dist.rounds.means.norm_statistics import GlobalStatistics
from lightning_gnn_dist.rounds.means.outer import Outer
from lightning_gnn_dist.rounds.part import Fit, Part
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy, Weights
from lightning_gnn_dist.rounds.rows.tables import refuse_average_of_moments, refuse_owned
from lightning_gnn_dist.strategies.correction import Correction, CorrectionByAnchor, Way
from lightning_gnn_dist.strategies.correction_optimizer import CorrectionOptimizer, Mode, Schedule

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
        correction: Way = "sliced",
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
        check_choice("correction", correction, Way)
        takes_one = is_integer(correction_steps) and correction_steps == 1 and correction == "sliced"
        if drift is not None and drift.corrects and not takes_one:
            raise ValueError(
                f"drift={self.drift} takes one step along the gradient of the anchor, which all ranks compute: leave "
                f"correction_steps={shown(correction_steps)} and correction={correction!r} out."
            )
        self.correction_steps = int(correction_steps) if is_integer(correction_steps) else float(correction_steps)
        self.correction: Way = correction
        if correction_optimizer is None:
            correction_optimizer = "averaged" if self.average_optimizer is True else "persistent"
        self._corrector = CorrectionOptimizer(correction_optimizer, correction_lr)
        self._correction: Correction | None = None  # of the running fit

    def end_round(self) -> None:
        self.average_replicas()  # what was learned locally
        self.hold_further_stages()  # is corrected globally

    def stages(self, fit: Fit) -> list[list[Part]]:
        means, *further = super().stages(fit)
        self._correction = self._correction_of(means, fit) if self.correction_steps else None
        statistics = GlobalStatistics((self.drift or Drift()).anchor_steps) if self.buffers == "global" else None
        corrections: list[Part] = [each for each in (self._correction, statistics) if each is not None]
        return [means, *further, corrections]

    def _correction_of(self, means: list[Part], fit: Fit) -> Correction:
        if self.correction == "rank0" and self.world_size > 1:
            refuse_owned(fit.lightning_module, f'{type(self).__name__}(correction="rank0")', 'correction="sliced"')
        if self._corrector.mode == "averaged" and self.average_optimizer is not True:
            refuse_average_of_moments(fit.lightning_module)
        drift = next((part for part in means if isinstance(part, DriftCorrection)), None)
        if drift is not None and drift.drift.corrects:
            return CorrectionByAnchor(self._corrector, drift, means)
        first = drift.drift.anchor_steps if drift is not None and drift.drift.towards == "global" else 0
        shortens = self._shortens_steps
        return Correction(
            self._corrector, self.correction_steps, self.correction, means, first=first, shortens=shortens
        )

    @property
    def shares_gradients(self) -> bool:
        return bool(self.correction_steps) or super().shares_gradients

    def _check_alone(self, what: str) -> None:
        if self._correction is not None and self._correction.others_wait:
            raise RuntimeError(
                f'{what} inside a correction: with correction="rank0" nobody answers. Use correction="sliced", or '
                "define correction_step(batch), which returns the mean loss without it."
            )
        super()._check_alone(what)


def _check_steps(steps: Any) -> None:
    most = MAX_INTEGER if is_integer(steps) else 1
    if not is_number(steps) or not 0 <= steps <= most:
        raise ValueError(
            f"correction_steps must be a whole number (2: two steps a round) or a share of the local steps between "
            f'0.0 and 1.0 (0.1: one for every ten), or "auto", got {shown(steps)}.'
        )
