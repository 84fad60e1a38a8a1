r"""Learn Locally, Correct Globally (Ramezani et al., ICLR 2022, arXiv:2111.08202).

Round :math:`r` on every rank :math:`p`: :math:`K_r` local steps on the rank's own part, then

.. math::
    \bar\theta \leftarrow \sum_p w_p \theta_p,
    \qquad\text{then, } S \text{ times:}\qquad
    \bar\theta \leftarrow \bar\theta - \gamma\, \nabla \mathcal{L}_\mathrm{global}(\bar\theta;\, \text{batch})
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from lightning_gnn_dist.checks import check_instance
from lightning_gnn_dist.rounds.clock import RoundClock
from lightning_gnn_dist.rounds.drift import Drift, Towards
from lightning_gnn_dist.rounds.launching import Launch
from lightning_gnn_dist.rounds.means import Moments, Outer
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Nonfinite, SendsMeans
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy, Weights
from lightning_gnn_dist.strategies.correction import WAYS, Correction, GlobalStatistics

GlobalBuffers = Literal["average", "local", "global"]


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
    on the whole graph. The paper's method is :meth:`as_published`, and ``GlobalBatching.as_published()`` in the data
    module. No default depends on another argument: ``drift=None`` alone switches off nothing else.

    Corrections and anchors call ``training_step`` outside Lightning's loop, without the hooks around it, and the first
    anchor comes before the first ``on_train_epoch_start``. What the step logs and counts in metrics is forgotten, and
    anchors leave buffers alone; Python state of its own is not protected. ``correction_step`` is the way out.

    A correction is a training step: dropout is on, and batch norms normalise by the batch and move their statistics,
    which are averaged afterwards. An anchor normalises by the batch too, as local steps do, but draws no dropout and
    moves nothing (:func:`~lightning_gnn_dist.rounds.correction_gradients.without_noise`).

    A round moves the model for the average, S times for the correction steps, once for the anchor, and twice for Adam's
    moments. Averaging moves it once. A number takes 32 bits; with ``reducer=Rounded(8)`` 8, and of moments 16.

    Arguments that are not listed are those of :class:`~lightning_gnn_dist.rounds.round_strategy.RoundStrategy`.

    Args:
        clock: Decides when a round ends.
        correction: The steps on the whole graph that follow the mean. None: none, and with ``drift=None``,
            ``weights="uniform"``, ``average_optimizer=False`` and ``outer=None`` this is local SGD.
        drift: What local gradients are steered towards: the gradient of the whole graph, or with ``Drift("ranks")``
            the mean of the ranks' gradients. None: no correction of drift.
        buffers: ``"average"`` or ``"local"``, or ``"global"``: at a meeting the statistics of batch normalisation are
            taken anew on as many batches of the whole graph as an anchor (4 without drift), but for layers in
            evaluation mode. Other buffers are averaged.
        average_optimizer: Average the optimizers' moments too: all, or one kind; False: none.
        outer: The optimizer of the meetings. None: the mean is the model.
    """

    strategy_name = "llcg"
    drift_modes: ClassVar[tuple[Towards, ...]] = ("global", "ranks")
    buffer_modes: ClassVar[Any] = GlobalBuffers

    def __init__(
        self,
        clock: RoundClock | None = None,
        *,
        correction: Correction | None = Correction(),
        drift: Drift | None = Drift("global"),
        nonfinite: Nonfinite = "refuse",
        weights: Weights = "nodes",
        buffers: GlobalBuffers = "average",
        average_optimizer: Moments = True,
        outer: Outer | None = Outer(momentum=0.8, adaptive=True),
        reducer: SendsMeans | None = None,
        launch: Launch = Launch(),
    ) -> None:
        super().__init__(
            clock,
            weights=weights,
            buffers=buffers,  # type: ignore[arg-type]  # this class offers one more
            average_optimizer=average_optimizer,
            drift=drift,
            nonfinite=nonfinite,
            outer=outer,
            reducer=reducer,
            launch=launch,
        )
        if correction is not None:
            check_instance("correction", correction, Correction, "a Correction, such as Correction(steps=0.5), or None")
        self.correction = correction

    @classmethod
    def as_published(
        cls,
        clock: RoundClock | None = None,
        *,
        correction: Correction | None = Correction.as_published(),
        nonfinite: Nonfinite = "refuse",
        buffers: GlobalBuffers = "average",
        launch: Launch = Launch(),
    ) -> LLCGStrategy:  # no Self, which a command line cannot read
        """Return the paper's method: the plain mean of replicas that count alike, then the correction.

        Its corrections see all neighbours: add ``global_batching=GlobalBatching.as_published()`` to the data module.

        Args:
            clock: Decides when a round ends. Default: after each pass over the training nodes.
            correction: The paper's, one step. ``Correction.as_published(way="rank0")`` takes it on a single server;
                None: no correction, which is PSGD-PA.
            nonfinite: As in the constructor.
            buffers: As in the constructor.
            launch: As in the constructor.
        """
        return cls(
            clock,
            correction=correction,
            drift=None,
            nonfinite=nonfinite,
            weights="uniform",
            buffers=buffers,
            average_optimizer=False,
            outer=None,
            launch=launch,
        )

    def hooks(self, fit: Fit) -> list[MeetingHook]:
        hooks = super().hooks(fit)  # what was learned locally
        if self.peers.are_several:  # is corrected globally; on one rank local gradients are those of the whole graph
            if self.correction is not None:
                hooks.append(WAYS[self.correction.way](self.correction, hooks))
            if self.buffers == "global":
                hooks.append(GlobalStatistics((self.drift or Drift()).anchor_steps))
        return hooks

    def _check_alone(self, what: str) -> None:
        if self.state.others_wait:
            raise RuntimeError(
                f'{what} inside a correction: with Correction(way="rank0") nobody answers. Use way="sliced", or '
                "define correction_step(batch), which returns the mean loss without it."
            )
        super()._check_alone(what)
