r"""The hooks of a meeting that average: parameters, buffers, moments, and the optimizer that steps along the mean.

Of weights whose gradients have some rows alone, and of their moments, a :class:`~.meeting_hook.ReplicaState` puts
together the rows that ranks have touched; they are no part of an average.

Some frozen parameters change between meetings: the half of a GAN that is frozen while the other learns, a teacher, a
moving target. Most, such as a pretrained encoder's, never change and may be large. So ranks compare checksums of frozen
parameters, and average those that differ. A tensor's version or address would not tell, as a write through ``.data``
leaves both as they are.

With :math:`\bar\theta` the mean of the replicas, and :math:`\theta` the model that the round began with, the optimizer
of the meetings takes the pseudo-gradient :math:`d = \theta - \bar\theta` for a gradient (SlowMo, Wang et al., ICLR
2020, arXiv:1910.00643; DiLoCo, Douillard et al., arXiv:2311.08105). It costs no byte.

With ``adaptive=True`` momentum is as large as rounds agree. With :math:`d_r` the pseudo-gradient of round :math:`r`,

.. math::
    c_r = \min\Bigl(1, \max\Bigl(0, \frac{\langle d_r, d_{r-1} \rangle}{\lVert d_{r-1} \rVert^2}\Bigr)\Bigr),
    \qquad v_r = \beta\, c_r^4\, v_{r-1} + d_r,
    \qquad \theta \leftarrow \theta - \eta\, v_r

While a model is far from its end, rounds go the same way, :math:`c` is near 1, and steps grow by up to
:math:`1 / (1 - \beta)`: batches of one rank are small, and Adam's steps are the shorter the noisier gradients are.
Near the end each round is shorter than the one before or undoes it, :math:`c` falls, and momentum, which would carry
the model beyond, falls with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from lightning_gnn_dist.checks import Fraction, Positive, check_callable, check_fields, shown, takes
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups, is_rounded, leave_out_, length_of
from lightning_gnn_dist.wire.collectives import checksum

Moments = bool | Literal["momentum", "variance"]
# What torch's optimizers call their running means of gradients, and of their squares.
MOMENTS = {
    "momentum": frozenset({"exp_avg", "momentum_buffer", "grad_avg"}),
    "variance": frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum"}),
}
_TRAINED = -1  # stands for a parameter that is averaged anyway


class Parameters(MeetingHook):
    """The mean of the replicas becomes the model, with its buffers, such as the statistics of batch normalisation.

    Args:
        trained: Whether trained parameters go as they are. Else their pseudo-gradients go.
        with_buffers: Whether buffers are averaged, too.
    """

    def __init__(self, *, trained: bool, with_buffers: bool) -> None:
        self._sends_trained, self.with_buffers = trained, with_buffers
        self.unequal: set[int] = set()  # parameters that differed between ranks when they met, by number

    def before_step(self, optimizer: Optimizer) -> None:
        """Refuse sparse gradients whose rows nobody counts."""
        sparse = (
            each
            for group in optimizer.param_groups
            for each in group["params"]
            if each.grad is not None and each.grad.is_sparse
        )
        for parameter in sparse:
            if id(parameter) not in self.fit.rows:
                raise ValueError(refusals.OTHER_SPARSE.format(f" of shape {tuple(parameter.shape)}"))

    def contribute(self) -> Groups:
        return {"whole": self._tensors(trained=self._sends_trained)}

    def equal(self) -> list[Tensor]:
        return self._tensors(trained=True)

    def sizes(self) -> list[int]:
        buffers = self.fit.buffers() if self.with_buffers else ()
        return [sum(each.numel() for each in chain(self.fit.lightning_module.parameters(), buffers))]

    def trained(self) -> list[Tensor]:
        named = self.fit.lightning_module.named_parameters()
        return [each for name, each in named if each.requires_grad and name not in self.fit.excluded]

    def checksums(self) -> list[int]:
        """Return a checksum of 48 bits for each frozen parameter; -1 where it is trained, or no other has it."""
        excluded = self.fit.excluded
        return [
            _TRAINED if each.requires_grad or name in excluded else checksum([each]) % (1 << 48)
            for name, each in self.fit.lightning_module.named_parameters()
        ]

    def compare(self, rows: Sequence[Sequence[int]]) -> None:
        """Average, until the next call, the parameters whose checksums differ; a row holds one rank's checksums."""
        columns = enumerate(zip(*rows, strict=True))
        self.unequal = {idx for idx, column in columns if len(set(column)) > 1}

    def _tensors(self, *, trained: bool) -> list[Tensor]:
        """Return those that differ though they are frozen, if asked for those that are trained, and buffers."""
        module, whole = self.fit.lightning_module, {id(each) for each in self.fit.dense_parameters()} if trained else ()
        found = [
            each.data
            for idx, each in enumerate(module.parameters())
            if (id(each) in whole if each.requires_grad else idx in self.unequal)
        ]
        return [*found, *self.fit.buffers()] if self.with_buffers else found


class AveragedMoments(MeetingHook):
    """The states of the optimizers. Those of rows go with the rows.

    Args:
        which: All of them, or those of one kind.
    """

    def __init__(self, which: Moments) -> None:
        self._names = MOMENTS[which] if isinstance(which, str) else None

    @property
    def are_all(self) -> bool:
        """Whether all kinds of moments are averaged."""
        return self._names is None

    def contribute(self) -> Groups:
        return {"moments": self.equal()}

    def sizes(self) -> list[int]:
        moments = self.equal()
        return [length_of(filter(is_rounded, moments)), sum(each.numel() for each in moments)]

    def equal(self) -> list[Tensor]:
        rows, excluded = self.fit.rows, self.fit.excluded
        named = self.fit.lightning_module.named_parameters()
        own = [each for name, each in named if name in excluded or id(each) in rows]
        skipped = {
            id(moment)
            for each in own
            for moment in optimizer_tensors(self.fit.optimizers, self.has, [each])
            if id(each) not in rows or (each.requires_grad and moment.shape == each.shape)
        }
        wanted = None if self._names is None else self.has
        return [each for each in optimizer_tensors(self.fit.optimizers, wanted) if id(each) not in skipped]

    def has(self, name: str) -> bool:
        """Return whether moments of a name are averaged."""
        return self._names is None or name in self._names


def forget_moments(optimizers: Iterable[Optimizer]) -> None:
    """Zero each tensor of the optimizers' states that is not finite."""
    for tensor in optimizer_tensors(optimizers):
        if not bool(tensor.isfinite().all()):
            tensor.zero_()


def optimizer_tensors(
    optimizers: Iterable[Optimizer],
    is_wanted: Callable[[str], bool] | None = None,
    of: Iterable[Tensor] | None = None,
) -> list[Tensor]:
    """Return the tensors of the optimizers' states, all or those of some names, in the same order on every rank.

    With ``of``, those of these parameters alone.
    """
    tensors, asked = [], None if of is None else {id(parameter) for parameter in of}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if asked is None or id(parameter) in asked:
                state = optimizer.state.get(parameter, {})
                names = [name for name in sorted(state) if is_wanted is None or is_wanted(name)]
                tensors += [state[name] for name in names if isinstance(state[name], Tensor)]
    return tensors


_STEPS = 1024  # c is a multiple of 1 / 1024: processors add in their own orders, and ranks must have the same


@dataclass(frozen=True)
class Outer:
    """The optimizer of the meetings, which steps from the model of the meeting before towards the mean of the replicas.

    ``Outer()`` goes the whole way, which is averaging. With momentum, what all rounds have in common adds up, and what
    replicas do against each other does not. On one rank there is no mean, and nothing is done.

    Args:
        lr: The share of the way to the mean that a step goes.
        momentum: How much of the step before is added.
        nesterov: Whether momentum is Nesterov's.
        adaptive: Whether momentum is as large as that only while rounds go on in one direction, and falls to 0 where
            each undoes the one before (:class:`AgreeingMomentum`).
        optimizer: A function from parameters to an optimizer of torch, in place of the four above.
    """

    lr: Positive = 1.0
    momentum: Fraction = 0.0
    nesterov: bool = False
    adaptive: bool = False
    optimizer: Callable[[list[Tensor]], Optimizer] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("adaptive", "nesterov"):
            if getattr(self, name) and self.momentum == 0:
                raise ValueError(f"{name}=True is of momentum, and momentum=0.0 is none: set momentum=0.8, say.")
        if self.optimizer is not None:
            example = "a function such as lambda parameters: torch.optim.Adam(parameters, lr=0.01)"
            check_callable("optimizer", self.optimizer, example, [])
            if replace(self, optimizer=None) != Outer():
                raise ValueError(
                    "lr, momentum, nesterov and adaptive are those of the optimizer that Outer makes: with optimizer= "
                    "set them there."
                )

    @classmethod
    def diloco(cls) -> Outer:
        """Return DiLoCo's: seven tenths of the way, with Nesterov's momentum."""
        return cls(lr=0.7, momentum=0.9, nesterov=True)


class OuterStep(MeetingHook):
    """Takes the step, alike on all ranks. Not for a rank that is alone.

    Args:
        outer: The settings.
    """

    averages_gradients = True

    def __init__(self, outer: Outer) -> None:
        self._outer = outer
        self._before: list[Tensor] = []
        self._sent: dict[int, Tensor] = {}  # the pseudo-gradients of a meeting, by the number of the parameter

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self._parameters = fit.dense_parameters(frozen=True)
        self._before = [torch.empty_like(each.detach()) for each in self._parameters]
        self._optimizer = _optimizer_of(self._before, self._outer)
        self.begin_round()

    @torch.no_grad()
    def begin_round(self) -> None:
        """Remember the model that a round begins with."""
        for before, now in zip(self._before, self._parameters, strict=True):
            before.copy_(now)

    def contribute(self) -> Groups:
        self._sent = self.pseudo_gradients()
        return {"pseudo_gradients": [*self._sent.values()]}

    def apply(self) -> None:
        self.take(self._sent)
        self._sent = {}

    def pseudo_gradients(self, ahead: Mapping[int, Tensor] = MappingProxyType({})) -> dict[int, Tensor]:
        """Return what leads from this replica back to where it began the round, by number of the parameter.

        ``ahead`` is what led from there back to the model of the meetings.
        """
        found = {
            place: (before - ahead[place] if place in ahead else before) - now.detach()
            for place, (before, now) in enumerate(zip(self._before, self._parameters, strict=True))
            if now.requires_grad
        }
        if self.fit.round.is_left_out:
            leave_out_(found.values())
        return found

    @torch.no_grad()
    def take(self, means: Mapping[int, Tensor]) -> None:
        """Step against the means of pseudo-gradients, by number of the parameter, and make that the model."""
        for place, mean in means.items():
            self._before[place].grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        for place in means:
            self._parameters[place].copy_(self._before[place])

    @torch.no_grad()
    def go_ahead(self, ahead: Mapping[int, Tensor]) -> None:
        """Go from the model of the meetings to where ``ahead`` leads back from."""
        for place, way_back in ahead.items():
            self._parameters[place].sub_(way_back)

    @torch.no_grad()
    def go_back(self) -> None:
        """Take all parameters that are trained back to the model of the meetings."""
        for before, now in zip(self._before, self._parameters, strict=True):
            if now.requires_grad:
                now.copy_(before)

    def state(self) -> dict[str, Any]:
        return {
            "outer": {
                "kind": type(self._optimizer).__name__,
                "optimizer": self._optimizer.state_dict(),
                "lost": self.fit.reducer.lost(),
            }
        }

    def shared_state(self) -> dict[str, Any]:
        """Return what a rank that joins must know: also the model that the round began with."""
        return {"outer": self.state()["outer"] | {"before": self._before}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the state of a checkpoint, or of a rank that was there before."""
        self.begin_round()
        if (saved := state.get("outer")) is None:
            return
        if (kind := type(self._optimizer).__name__) != saved["kind"]:
            raise ValueError(
                f"The optimizer of the meetings was {saved['kind']} in the checkpoint, and is {kind} in this fit: "
                "resume with outer= as it was."
            )
        self._optimizer.load_state_dict(saved["optimizer"])
        for before, other in zip(self._before, saved.get("before", self._before), strict=True):
            before.copy_(other)
        self.fit.reducer.restore(saved["lost"])


def _optimizer_of(parameters: list[Tensor], outer: Outer) -> Optimizer:
    if outer.optimizer is not None:
        optimizer = outer.optimizer(parameters)
        if not isinstance(optimizer, Optimizer) or not takes(optimizer.step):
            kind = "an optimizer of torch whose step needs no closure"
            raise TypeError(f"outer: optimizer must return {kind}, got {shown(optimizer)}.")
        return optimizer
    if outer.adaptive:
        return AgreeingMomentum(parameters, outer.lr, outer.momentum, nesterov=outer.nesterov)
    return SGD(parameters, outer.lr, outer.momentum, nesterov=outer.nesterov)


class AgreeingMomentum(Optimizer):
    r"""An optimizer of meetings with such momentum.

    Args:
        parameters: What is trained.
        lr: :math:`\eta`.
        momentum: :math:`\beta`.
        nesterov: Whether a step is :math:`d_r + \beta\, c_r^4\, v_r`, as Nesterov's is.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, momentum: float, *, nesterov: bool) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # torch's may return a loss
        """Step against the gradients. A closure is not called."""
        agreement = self._agreement()
        for group in self.param_groups:
            weight = group["momentum"] * agreement**4
            for parameter in group["params"]:
                if (gradient := parameter.grad) is None:
                    continue
                state = self.state[parameter]
                velocity = state["velocity"].mul_(weight).add_(gradient) if "velocity" in state else gradient.clone()
                step = gradient.add(velocity, alpha=weight) if group["nesterov"] else velocity
                parameter.sub_(step, alpha=group["lr"])
                state["velocity"], state["way"] = velocity, gradient.clone()

    def _agreement(self) -> float:
        """Return the projection of this pseudo-gradient on the one before, in [0, 1]; 0 in the first round."""
        both = repeated = torch.zeros((), dtype=torch.float64)
        for parameter in (each for group in self.param_groups for each in group["params"]):
            if parameter.grad is not None and "way" in self.state[parameter]:
                before = self.state[parameter]["way"].flatten().double()
                both = both + before.dot(parameter.grad.flatten().double())
                repeated = repeated + before.dot(before)
        if (size := float(repeated)) == 0:
            return 0.0
        return round(_STEPS * min(1.0, max(0.0, float(both) / size))) / _STEPS
