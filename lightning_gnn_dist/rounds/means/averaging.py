"""The hooks of a meeting that average: trained parameters, buffers, moments, and frozen parameters that differ.

Of weights whose gradients have some rows alone, and of their moments, a :class:`~..meeting_hook.ReplicaState` puts
together the rows that ranks have touched; they are no part of an average.

Some frozen parameters change between meetings: the half of a GAN that is frozen while the other learns, a teacher, a
moving target. Most, such as a pretrained encoder's, never change and may be large. So ranks compare checksums of frozen
parameters, and average those that differ. A tensor's version or address would not tell, as a write through ``.data``
leaves both as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.means.reducer import Groups, is_rounded, length_of
from lightning_gnn_dist.rounds.meeting_hook import MeetingHook
from lightning_gnn_dist.wire.octets import checksum

Moments = bool | Literal["momentum", "variance"]
# What torch's optimizers call their running means of gradients, and of their squares.
_MOMENTS = {
    "momentum": frozenset({"exp_avg", "momentum_buffer", "grad_avg"}),
    "variance": frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "exp_inf", "sum"}),
}
_TRAINED = -1  # stands for a parameter that is averaged anyway


def check_moments(average_optimizer: object) -> None:
    """Refuse a value that does not say which moments are averaged."""
    if not isinstance(average_optimizer, bool) and not (
        isinstance(average_optimizer, str) and average_optimizer in _MOMENTS
    ):
        raise ValueError(
            'average_optimizer must be True, False, "momentum" (running means of gradients alone) or "variance" (of '
            f"their squares alone), got {shown(average_optimizer)}."
        )


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
        module = self.fit.lightning_module
        buffers = module.buffers() if self.with_buffers else ()
        return [sum(each.numel() for each in chain(module.parameters(), buffers))]

    def trained(self) -> list[Tensor]:
        parameters = self.fit.lightning_module.parameters()
        return [each for each in parameters if each.requires_grad and id(each) not in self.fit.excluded]

    def checksums(self) -> list[int]:
        """Return a checksum of 48 bits for each frozen parameter; -1 where it is trained, or no other has it."""
        excluded = self.fit.excluded
        return [
            _TRAINED if each.requires_grad or id(each) in excluded else checksum([each]) % (1 << 48)
            for each in self.fit.lightning_module.parameters()
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
        return [*found, *module.buffers()] if self.with_buffers else found


class AveragedMoments(MeetingHook):
    """The states of the optimizers. Those of rows go with the rows.

    Args:
        which: All of them, or those of one kind.
    """

    def __init__(self, which: Moments) -> None:
        self._names = _MOMENTS[which] if isinstance(which, str) else None

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
        own = [each for each in self.fit.lightning_module.parameters() if id(each) in excluded or id(each) in rows]
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
