r"""The correction of LLCG: steps on batches of the whole graph, behind the mean, after which replicas are still equal.

.. math::
    \bar\theta \leftarrow \bar\theta - \gamma\, \nabla \mathcal{L}_\mathrm{global}(\bar\theta;\, \text{batch})

sliced      each rank computes a slice of each batch, and the mean of their gradients moves all
rank0       rank 0 computes whole batches while the others wait, and sends them its model

With ``buffers="global"``, the statistics of batch normalisation are taken anew on the whole graph as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.correction_gradients import (
    average_gradient_,
    mean_gradient,
    require_seeds,
    step_of,
    unrecorded,
    without_noise,
)
from lightning_gnn_dist.rounds.drift import DriftCorrection
from lightning_gnn_dist.rounds.means.averaging import AveragedMoments, Parameters
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook, hook_of
from lightning_gnn_dist.rounds.sparse_gradients import no_rows, take_rows_
from lightning_gnn_dist.strategies.correction import Correction
from lightning_gnn_dist.strategies.correction_optimizer import CorrectionOptimizer
from lightning_gnn_dist.wire import collectives


class CorrectionSteps(MeetingHook):
    """Takes the steps, of which each rank computes a slice.

    Args:
        correction: How many, and what takes them.
        means: The hooks of the mean.
    """

    looks_beyond_parts = averages_gradients = follows_mean = True

    def __init__(self, correction: Correction, means: Sequence[MeetingHook]) -> None:
        self._correction, self._drift = correction, hook_of(means, DriftCorrection)
        moments = hook_of(means, AveragedMoments)
        self._are_averaged = moments is not None and moments.are_all
        self._averages_buffers = any(isinstance(hook, Parameters) and hook.with_buffers for hook in means)

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._data = refusals.require_corrections(fit.lightning_module.trainer, "A correction on the whole graph")
        refusals.require_step(fit.lightning_module)
        self._optimizer = CorrectionOptimizer(self._correction, fit.optimizers, are_averaged=self._are_averaged)
        names = fit.names_of_rows()
        if names and self._correction.optimizer == "averaged" and not self._are_averaged:
            raise ValueError(
                f'Correction(optimizer="averaged") would average all moments of {names[0]}: add '
                'average_optimizer=True, which puts those of touched rows together, or use optimizer="persistent".'
            )
        with self._in_own_form():
            made = self._optimizer.of_a_function([*fit.dense_parameters(), *self._with_rows()]) if names else []
            for state in fit.states:
                state.check_optimizers(made)

    def apply(self) -> None:
        steps = self._correction.steps
        if isinstance(steps, float):
            batches = self.fit.round.batches_of_ranks
            per_step: int = self.fit.lightning_module.trainer.accumulate_grad_batches
            # The mean over ranks, so that all take as many even where a clock of their own ended their round.
            steps = math.ceil(steps * (sum(batches) / len(batches)) / per_step)
        with unrecorded(self.fit.lightning_module):
            with self._in_own_form():
                self._optimizer.prepare(self.fit.trained_parameters(), self.fit.round.round_idx, steps)
            self.take(steps)
        if self._averages_buffers:  # each rank's forwards have moved its own
            collectives.average_(self.fit.lightning_module.buffers())

    def take(self, steps: int) -> None:
        """Take the steps of a round. Collective."""
        for batch in self._batches(steps, sliced=True):
            gradient, seeds = mean_gradient(self.fit, [batch])
            average_gradient_(self.fit, gradient, seeds)  # that of the whole batch, whatever the slices' sizes
            self._step(gradient)

    def state(self) -> dict[str, Any]:
        return {"correction": self._optimizer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.begin_round()
        if "correction" in state:
            with self._in_own_form():
                self._optimizer.restore(state["correction"], self.fit.trained_parameters())

    def _step(self, gradient: list[Tensor]) -> None:
        with self._in_own_form():
            self._optimizer.step(self.fit.trained_parameters(), gradient, self._clip)
        for state in self.fit.states:
            state.have_changed()

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
        first = 0 if self._drift is None else self._drift.batches_of_graph  # the anchor's come before
        return self._data.correction_batches(self.fit.round.round_idx, sliced=sliced, start=first, stop=first + steps)

    def _with_rows(self) -> list[Tensor]:
        """Return the trained parameters whose gradients have some rows alone."""
        return [each for each in self.fit.trained_parameters() if id(each) in self.fit.rows]

    @contextmanager
    def _in_own_form(self) -> Iterator[None]:
        """In the block, what lives with one rank each can be stepped where it is, and clipped together."""
        with ExitStack() as stack:
            for state in self.fit.states:
                stack.enter_context(state.stepping(self.fit.precision_plugin))
            yield


class StepsOnRank0(CorrectionSteps):
    """Takes them on rank 0, which sends its model to the others."""

    def begin(self, fit: Fit) -> None:
        for state in fit.states if collectives.world_size() > 1 else []:
            state.refuse_replicas('Correction(way="rank0")', 'way="sliced"')
        super().begin(fit)

    def take(self, steps: int) -> None:
        tables = self._with_rows()
        touched = [no_rows(table) for table in tables]
        if collectives.rank() == 0:
            self.fit.round.others_wait = True
            for batch in self._batches(steps, sliced=False):
                gradient, seeds = mean_gradient(self.fit, [batch])
                require_seeds(self.fit, seeds)
                sparse = [each for each in gradient if each.is_sparse]
                touched = [all_rows + own for all_rows, own in zip(touched, sparse, strict=True)]
                self._step(gradient)
            self.fit.round.others_wait = False
        collectives.broadcast_([parameter.data for parameter in self.fit.dense_parameters()])
        if tables and collectives.world_size() > 1:
            take_rows_(tables, [each.coalesce()._indices()[0] for each in touched], source=0)


WAYS = {"sliced": CorrectionSteps, "rank0": StepsOnRank0}


class GlobalStatistics(MeetingHook):
    """Replaces running means and variances by their mean over batches of the whole graph, then over ranks by seeds.

    Layers in evaluation mode keep theirs: they are frozen.

    Statistics that ranks saw on their own parts do not fit the whole graph, which the model is evaluated on: parts
    differ, and neighbours are missing.

    Args:
        num_batches: How many batches it takes.
    """

    follows_mean = True

    def __init__(self, num_batches: int) -> None:
        self._num_batches = num_batches

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._data = refusals.require_corrections(fit.lightning_module.trainer, 'buffers="global"')
        refusals.require_step(fit.lightning_module)

    @torch.no_grad()
    def apply(self) -> None:
        fit, module = self.fit, self.fit.lightning_module
        norms = [child for child in module.modules() if _learns_statistics(child)]
        momenta = [norm.momentum for norm in norms]
        with unrecorded(module), without_noise(module, moving=norms):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over batches
            step, seeds = step_of(module), 0
            for batch in self._data.correction_batches(fit.round.round_idx, stop=self._num_batches):
                if batch.batch_size:
                    seeds += batch.batch_size
                    with fit.precision_plugin.train_step_context():
                        step(fit.batch_to_device(batch))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        collectives.average_((buffer for norm in norms for buffer in norm.buffers()), float(seeds))


def _learns_statistics(module: nn.Module) -> TypeGuard[_BatchNorm]:
    return isinstance(module, _BatchNorm) and module.track_running_stats and module.training
