"""The optimizer of correction steps, beside that of local steps. Its state is equal on all ranks that step."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.means.averaging import optimizer_tensors
from lightning_gnn_dist.strategies.correction import Correction, check_lr
from lightning_gnn_dist.wire import collectives

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
                _check_copies(optimizer)

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
            _average_states(self._optimizers)
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
        _check_sizes(state["optimizers"], self._optimizers)
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            _check_rows(saved["state"], _parameters_of([optimizer]))
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


def _average_states(optimizers: Sequence[Optimizer]) -> None:
    """Average the optimizers' states over ranks, in place. Collective."""
    tensors = optimizer_tensors(optimizers)
    device = _parameters_of(optimizers)[0].device
    rows = collectives.gather_numbers([sum(tensor.numel() for tensor in tensors)], device)
    refusals.check_sizes([size for (size,) in rows])
    collectives.average_(tensors)


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


def _checked(optimizer: Any) -> Optimizer:
    """Return what the user's function gave; refuse it if it cannot take correction steps."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"Correction(optimizer=...) must give a torch.optim.Optimizer, its result is a {type(optimizer).__name__}: "
            + _WAY_OUT
        )
    _check_steps_alone(optimizer)
    return optimizer


def _check_copies(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    _check_steps_alone(optimizer)
    if any(isinstance(value, Optimizer) for value in vars(optimizer).values()):
        raise ValueError(f"{name} wraps another optimizer, whose state a copy would share: {_WAY_OUT}")


@lru_cache(maxsize=16)
def _needs_closure(step: Callable[..., Any]) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def _check_steps_alone(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if _needs_closure(type(optimizer).step):
        raise ValueError(f"{name} computes gradients itself, in a closure, which no correction can give: {_WAY_OUT}")
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ValueError(
            f"{name} takes sparse gradients only, and a correction has dense ones, too: use LazyAdam, in the module or "
            "for the correction alone, Correction(optimizer=lambda parameters: LazyAdam(parameters, lr=0.001))."
        )


def _check_rows(saved: Mapping[int, Mapping[str, Any]], parameters: Sequence[Tensor]) -> None:
    """Refuse moments of other rows: a table may live with one rank each, or be whole on all."""
    for number, entry in saved.items():
        shape = parameters[number].shape
        of_rows = [each.shape for each in entry.values() if isinstance(each, Tensor) and each.dim() == len(shape) > 1]
        odd = [other for other in of_rows if other[1:] == shape[1:] and other[0] not in (1, shape[0])]
        if odd:
            raise ValueError(
                f"The checkpoint's correction optimizer has numbers of shape {tuple(odd[0])} for a parameter of which "
                f"this rank has {tuple(shape)}: resume with the kind of table (OwnedEmbedding or nn.Embedding) that it "
                "was written with, or start from its weights (Module.load_from_checkpoint(path))."
            )


def _check_sizes(saved: Sequence[Mapping[str, Any]], optimizers: Sequence[Optimizer]) -> None:
    theirs = [[len(group["params"]) for group in state["param_groups"]] for state in saved]
    ours = [[len(group["params"]) for group in optimizer.param_groups] for optimizer in optimizers]
    if theirs != ours:
        raise ValueError(
            f"The checkpoint's correction optimizers hold {theirs} parameters, by optimizer and group, and the model's "
            f"make {ours}: resume with the optimizers that configure_optimizers() gave then, and with the parameters "
            "unfrozen that were."
        )
