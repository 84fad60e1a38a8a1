r"""The correction of LLCG: steps on batches of the whole graph, behind the mean, after which replicas are still equal.

.. math::
    \bar\theta \leftarrow \bar\theta - \gamma\, \nabla \mathcal{L}_\mathrm{global}(\bar\theta;\, \text{batch})

sliced      each rank computes a slice of each batch, and the mean of their gradients moves all
rank0       rank 0 computes whole batches while the others wait, and sends them its model

Their optimizer stands beside that of local steps; its state is equal on all ranks that step. With
``buffers="global"``, the statistics of batch normalisation are taken anew on the whole graph as well.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from lightning_gnn_dist.checks import MAX_INTEGER, MAX_NUMBER, check_fields, is_integer, is_number, shown, takes
from lightning_gnn_dist.gone import of_value
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.correction_gradients import (
    average_gradient_,
    loss_of,
    mean_gradient,
    require_seeds,
    unrecorded,
    without_noise,
)
from lightning_gnn_dist.rounds.drift import DriftCorrection
from lightning_gnn_dist.rounds.means import AveragedMoments, Parameters, optimizer_tensors
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook, hook_of
from lightning_gnn_dist.rounds.sparse_gradients import no_rows, take_rows_
from lightning_gnn_dist.wire import collectives

Way = Literal["sliced", "rank0"]
Mode = Literal["averaged", "persistent"]
Make = Callable[[list[Tensor]], Optimizer]
Schedule = Callable[[int], float]
OfLocalSteps = Literal["shortened", "local"]


@dataclass(frozen=True)
class Correction:
    r"""How many steps on batches of the whole graph follow a mean, who computes them, and what takes them.

    Args:
        steps: :math:`S`. An integer, or a share of the round's local steps, such as 0.1 (rounded up).
        way: ``"sliced"``: each rank computes a slice of each batch. Or the paper's ``"rank0"``: rank 0 computes the
            whole batch while the others wait, so the step must not call a collective (``self.all_gather``).
        optimizer: An optimizer of the correction's own. ``"averaged"``: like the module's, starting each time from the
            mean state of the ranks. ``"persistent"``: the same, with a state that lives on from round to round. Or a
            function from parameters to an optimizer, which keeps its own learning rate.
        lr: :math:`\gamma`, a number or a function from the round's number to it; or the learning rate of the local
            steps, schedule included (``"local"``), or :math:`S^{-3/4}` times that (``"shortened"``).
    """

    steps: int | float = 0.1
    way: Way = "sliced"
    optimizer: Mode | Make = "averaged"
    lr: float | Schedule | OfLocalSteps = "shortened"

    def __post_init__(self) -> None:
        most = MAX_INTEGER if is_integer(self.steps) else 1
        if not is_number(self.steps) or not 0 < self.steps <= most:
            raise ValueError(
                "steps must be a whole number (2: two steps a round) or a share of the local steps up to 1.0 (0.1: one "
                f"for every ten), got {shown(self.steps)}. For no correction use correction=None."
            )
        check_fields(self)
        if not (self.optimizer in get_args(Mode) if isinstance(self.optimizer, str) else takes(self.optimizer, [])):
            raise ValueError(
                f"optimizer must be one of {list(get_args(Mode))}, or a function from parameters to an optimizer such "
                f"as `lambda parameters: torch.optim.Adam(parameters, lr=0.001)`, got {shown(self.optimizer)}."
                f"{of_value('optimizer', shown(self.optimizer))}"
            )
        if not (self.lr in get_args(OfLocalSteps) if isinstance(self.lr, str) else takes(self.lr, 0)):
            check_lr(self.lr)
        if callable(self.optimizer) and self.lr != "shortened":
            raise ValueError("lr is ignored by an optimizer of your own: leave it out, and set it where you make that.")

    @classmethod
    def as_published(cls, steps: int | float = 1, way: Way = "sliced") -> Correction:
        """Return the paper's: whole steps of an optimizer of its own. ``"rank0"`` is its single server."""
        return cls(steps, way, "persistent", "local")


def check_lr(lr: Any) -> float:
    """Return a learning rate; refuse what is none."""
    if not is_number(lr) or not 0 < lr <= MAX_NUMBER:
        raise ValueError(
            f"lr must be a positive number, a function of the round that gives one, or one of "
            f"{list(get_args(OfLocalSteps))}, got {shown(lr)}."
        )
    return lr  # type: ignore[no-any-return]


_WAY_OUT = (
    "give the correction one of its own, such as "
    "Correction(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001))."
)


class CorrectionOptimizer:
    """Steps along global gradients. Its state never enters that of the local steps.

    In a round every rank calls :meth:`prepare`; then the ranks that correct call :meth:`step`. It steps only parameters
    that a local optimizer holds. A function that makes it is called again when these hold other parameters, as after
    unfreezing; parameters that had a state keep it. What a schedule changes in the local optimizers, such as momentum,
    is followed, except by an optimizer of a function.

    Args:
        correction: Its ``optimizer`` and ``lr``.
        local: The optimizers of the local steps.
        are_averaged: Whether a meeting makes the states of ``local`` equal on all ranks.
    """

    def __init__(self, correction: Correction, local: Sequence[Optimizer], *, are_averaged: bool = False) -> None:
        self._make, self._lr = correction.optimizer, correction.lr
        self._mode = "function" if callable(self._make) else self._make
        self._local, self._are_averaged = local, are_averaged
        self._optimizers: list[Optimizer] = []
        self._layout: list[Any] = []  # the parameters that they were made for
        if self._mode != "function":
            for optimizer in local:
                _checked(optimizer, is_copied=True)

    def of_a_function(self, parameters: list[Tensor]) -> list[Optimizer]:
        """Return what a function makes for parameters, to look at; nothing where the optimizers are like the local."""
        return [_checked(self._make(parameters))] if callable(self._make) else []

    def prepare(self, parameters: list[Tensor], round_idx: int, steps: int = 1) -> None:
        """Get ready for the steps of a round. Collective: every rank calls it, also one that will take no step.

        Args:
            parameters: The parameters that are trained.
            round_idx: The number of the round.
            steps: How many steps it will take.
        """
        self._renew(parameters)
        if self._mode == "averaged" and not self._are_averaged:
            tensors, device = optimizer_tensors(self._optimizers), parameters[0].device
            rows = collectives.gather_numbers([sum(tensor.numel() for tensor in tensors)], device)
            refusals.check_sizes([size for (size,) in rows])
            collectives.average_(tensors)
        if self._mode == "function":
            return
        lr = check_lr(self._lr(round_idx)) if callable(self._lr) else self._lr
        share = steps**-0.75 if lr == "shortened" else 1.0
        for own, leader in zip(self._optimizers, self._local, strict=True):
            for group, other in zip(own.param_groups, leader.param_groups, strict=True):
                group.update((name, value) for name, value in other.items() if name != "params")
                group["lr"] = other["lr"] * share if isinstance(lr, str) else lr

    def step(
        self, parameters: list[Tensor], gradient: list[Tensor], clip: Callable[[Optimizer], None] = lambda _: None
    ) -> None:
        """Take one step of ``parameters`` along ``gradient``. Leaves no gradients behind. Not collective.

        ``clip`` clips the gradients that an optimizer is about to use.
        """
        along = dict(zip(map(id, parameters), gradient, strict=True))
        held = _parameters_of(self._optimizers)
        for parameter in held:
            parameter.grad = along.get(id(parameter))  # of one that is frozen by now none, also no old one
        for optimizer in self._optimizers:
            clip(optimizer)
            optimizer.step()
        for parameter in held:
            parameter.grad = None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint needs: the mode, and copies on the CPU of states that live on."""
        lasting = [] if self._mode == "averaged" else self._optimizers
        return {"mode": self._mode, "optimizers": [_plain(optimizer.state_dict()) for optimizer in lasting]}

    def restore(self, state: Mapping[str, Any], parameters: list[Tensor]) -> None:
        """Restore what :meth:`state` returned. Not collective."""
        if state["mode"] != self._mode:
            was = "the function it was" if state["mode"] == "function" else repr(state["mode"])
            raise ValueError(
                f"The checkpoint's correction optimizer is {state['mode']!r}, this strategy's is {self._mode!r}: "
                f"resume with Correction(optimizer={was}), or start from the checkpoint's weights "
                "(Module.load_from_checkpoint(path)) and leave ckpt_path out."
            )
        if not state["optimizers"]:
            return
        self._renew(parameters)
        theirs, ours = (
            [[len(group["params"]) for group in each["param_groups"]] for each in states]
            for states in (state["optimizers"], map(vars, self._optimizers))
        )
        if theirs != ours:
            raise ValueError(
                f"The checkpoint's correction optimizers hold {theirs} parameters, by optimizer and group, and the "
                f"model's make {ours}: resume with the optimizers that configure_optimizers() gave then, and with the "
                "parameters unfrozen that were."
            )
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(copy.deepcopy(saved))  # a copy, as it keeps tensors that it need not cast

    def _renew(self, parameters: list[Tensor]) -> None:
        """Make the optimizers, unless those of the last round still fit what the local optimizers hold."""
        ids = {id(parameter) for parameter in _parameters_of(self._local)}
        held = [parameter for parameter in parameters if id(parameter) in ids]
        if callable(self._make):
            layout: list[Any] = [id(parameter) for parameter in held]
        else:
            layout = [[[id(p) for p in group["params"]] for group in each.param_groups] for each in self._local]
        old = [] if self._mode == "averaged" else self._optimizers
        if old and layout == self._layout:
            return
        if callable(self._make):
            self._optimizers = [_checked(self._make(held))]
        else:
            self._optimizers = [_another(each, with_state=self._mode == "averaged") for each in self._local]
        for optimizer, former in zip(self._optimizers, old, strict=False):
            for parameter in (p for p in _parameters_of([optimizer]) if p in former.state):
                optimizer.state[parameter] = former.state[parameter]
        self._layout = layout


def _another(optimizer: Optimizer, *, with_state: bool) -> Optimizer:
    """Return an optimizer of the same class, groups and options, without hooks, and with a copy of the state or none.

    Its constructor is not called, as its arguments are unknown: ``defaults`` may hold more (AdamW) or fewer.
    """
    made = type(optimizer).__new__(type(optimizer))
    plain = {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}
    vars(made).update(plain)  # not `step`, which a scheduler ties to its own optimizer
    groups = [group | {"params": list(group["params"])} for group in optimizer.param_groups]
    made.__setstate__({"defaults": dict(optimizer.defaults), "state": defaultdict(dict), "param_groups": groups})
    if isinstance(optimizer, torch.optim.Adagrad):  # makes its state in its constructor; older torch only there
        start = optimizer.defaults["initial_accumulator_value"]
        others = [{**group, "params": [*group["params"]]} for group in groups]
        made.state.update(torch.optim.Adagrad(others, initial_accumulator_value=start).state)
    for parameter, state in optimizer.state.items() if with_state else ():
        made.state[parameter] = {  # a deep copy of a tensor takes several times as long
            name: value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in state.items()
        }
    return made


def _parameters_of(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _plain(value: Any) -> Any:
    """Return a copy on the CPU of what ``torch.load(weights_only=True)`` can read."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):  # a learning rate that a schedule computed with numpy
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _checked(optimizer: Any, *, is_copied: bool = False) -> Optimizer:
    """Return an optimizer; refuse one that cannot take correction steps, or that is to be copied and cannot be."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Correction(optimizer=...) must give a torch.optim.Optimizer, its result is a {name}: {_WAY_OUT}"
        )
    if not takes(type(optimizer).step, optimizer):
        raise ValueError(f"{name} computes gradients itself, in a closure, which no correction can give: {_WAY_OUT}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} takes sparse gradients only, and a correction has dense ones, too: use LazyAdam, in the module or "
            "for the correction alone, Correction(optimizer=lambda parameters: LazyAdam(parameters, lr=0.001))."
        )
    if is_copied and any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ValueError(f"{name} wraps another optimizer, whose state a copy would share: {_WAY_OUT}")
    return optimizer


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
        trainer, what = fit.lightning_module.trainer, "A correction on the whole graph"
        self._data = refusals.require_batches(trainer, "correction_batches", what)
        self._optimizer = CorrectionOptimizer(self._correction, fit.optimizers, are_averaged=self._are_averaged)
        names = fit.names_of_rows()
        if names and self._correction.optimizer == "averaged" and not self._are_averaged:
            raise ValueError(
                f'Correction(optimizer="averaged") would average all moments of {names[0]}: add '
                'average_optimizer=True, which puts those of touched rows together, or use optimizer="persistent".'
            )
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
            self._optimizer.prepare(self.fit.trained_parameters(), self.fit.round.round_idx, steps)
            first = 0 if self._drift is None else self._drift.batches_of_graph  # the anchor's come before
            self.take(first, first + steps)
        if self._averages_buffers:  # each rank's forwards have moved its own
            collectives.average_(self.fit.buffers())

    def take(self, first: int, last: int) -> None:
        """Take the steps of a round, on these of its batches. Collective."""
        for batch in self._data.correction_batches(self.fit.round.round_idx, start=first, stop=last):
            gradient, seeds = mean_gradient(self.fit, [batch])
            average_gradient_(self.fit, gradient, seeds)  # that of the whole batch, whatever the slices' sizes
            self._step(gradient)

    def state(self) -> dict[str, Any]:
        return {"correction": self._optimizer.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.begin_round()
        if "correction" in state:
            self._optimizer.restore(state["correction"], self.fit.trained_parameters())

    def _step(self, gradient: list[Tensor]) -> None:
        self._optimizer.step(self.fit.trained_parameters(), gradient, self._clip)

    def _clip(self, optimizer: Optimizer) -> None:
        """Clip as in local steps. With manual optimisation ``training_step`` does that, so nothing is clipped here."""
        module = self.fit.lightning_module
        if module.automatic_optimization:
            module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=module.trainer.gradient_clip_val,
                gradient_clip_algorithm=module.trainer.gradient_clip_algorithm,
            )

    def _with_rows(self) -> list[Tensor]:
        """Return the trained parameters whose gradients have some rows alone."""
        return [each for each in self.fit.trained_parameters() if id(each) in self.fit.rows]


class StepsOnRank0(CorrectionSteps):
    """Takes them on rank 0, which sends its model to the others."""

    def take(self, first: int, last: int) -> None:
        tables = self._with_rows()
        touched = [no_rows(table) for table in tables]
        if collectives.rank() == 0:
            self.fit.round.others_wait = True
            which: dict[str, Any] = {"sliced": False, "start": first, "stop": last}
            for batch in self._data.correction_batches(self.fit.round.round_idx, **which):
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
        trainer = fit.lightning_module.trainer
        self._data = refusals.require_batches(trainer, "correction_batches", 'buffers="global"')

    @torch.no_grad()
    def apply(self) -> None:
        fit, module = self.fit, self.fit.lightning_module
        norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]
        norms = [each for each in norms if each.track_running_stats and each.training]
        momenta = [norm.momentum for norm in norms]
        with unrecorded(module), without_noise(module, moving=norms):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean over batches
            seeds = 0
            for batch in self._data.correction_batches(fit.round.round_idx, stop=self._num_batches):
                if batch.batch_size:
                    seeds += batch.batch_size
                    with fit.precision_plugin.train_step_context():
                        loss_of(module, fit.batch_to_device(batch))
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        collectives.average_((buffer for norm in norms for buffer in norm.buffers()), float(seeds))
