"""The hooks of a meeting that average: trained parameters, buffers, moments, and frozen parameters that differ.

Of weights whose gradients have some rows alone, and of their moments, a :class:`~..meeting_hook.ReplicaState` puts
together the rows that ranks have touched; they are no part of an average.

Some frozen parameters change between meetings: the half of a GAN that is frozen while the other learns, a teacher, a
moving target. Most, such as a pretrained encoder's, never change and may be large. So ranks compare checksums of frozen
parameters, and average those that differ. A tensor's version or address would not tell, as a write through ``.data``
leaves both as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.checkpoints import forget_moments, optimizer_tensors
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
    """The mean of the replicas becomes the model.

    Args:
        trained: Whether trained parameters go as they are. Else their pseudo-gradients go.
    """

    def __init__(self, *, trained: bool) -> None:
        self._sends_trained = trained
        self._unequal: set[int] = set()  # parameters that differed between ranks when they met, by number

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
        return {"whole": self.tensors(trained=self._sends_trained)}

    def tensors(self, *, trained: bool) -> list[Tensor]:
        """Return those that differ though they are frozen, and if asked for those that are trained and go whole."""
        whole = {id(each) for each in self.fit.dense_parameters()} if trained else set()
        return [
            each.data
            for idx, each in enumerate(self._all())
            if (id(each) in whole if each.requires_grad else idx in self._unequal)
        ]

    def sizes(self) -> list[int]:
        return [sum(each.numel() for each in self._all())]

    def trained(self) -> list[Tensor]:
        return [each for each in self._all() if each.requires_grad and id(each) not in self.fit.excluded]

    def equal(self) -> list[Tensor]:
        return self.tensors(trained=True)

    def apply(self) -> None:
        if self.fit.round.is_left_out:
            forget_moments(self.fit.optimizers)  # those that are its own are NaN, too

    def checksums(self) -> list[int]:
        """Return a checksum of 48 bits for each frozen parameter; -1 where it is trained, or no other has it."""
        excluded = self.fit.excluded
        return [
            _TRAINED if each.requires_grad or id(each) in excluded else checksum([each]) % (1 << 48)
            for each in self._all()
        ]

    def compare(self, rows: Sequence[Sequence[int]]) -> None:
        """Average, until the next call, the parameters whose checksums differ; a row holds one rank's checksums."""
        columns = enumerate(zip(*rows, strict=True))
        self._unequal = {idx for idx, column in columns if len(set(column)) > 1}

    def _all(self) -> list[nn.Parameter]:
        return list(self.fit.lightning_module.parameters())


class AveragedBuffers(MeetingHook):
    """The module's buffers, such as the statistics of batch normalisation."""

    def contribute(self) -> Groups:
        return {"whole": self.equal()}

    def sizes(self) -> list[int]:
        return [sum(each.numel() for each in self.equal())]

    def equal(self) -> list[Tensor]:
        return list(self.fit.lightning_module.buffers())


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
        rounded = [each for each in self.equal() if is_rounded(each)]
        return [length_of(rounded), sum(each.numel() for each in self.equal())]

    def equal(self) -> list[Tensor]:
        rows, excluded = self.fit.rows, self.fit.excluded
        own = [each for each in self.fit.lightning_module.parameters() if id(each) in excluded or id(each) in rows]
        skipped = {
            id(moment)
            for each in own
            for moment in optimizer_tensors(self.fit.optimizers, self.has, [each])
            if id(each) not in rows or (each.requires_grad and moment.shape == each.shape)
        }
        return [each for each in optimizer_tensors(self.fit.optimizers, self.has) if id(each) not in skipped]

    def has(self, name: str) -> bool:
        """Return whether moments of a name are averaged."""
        return self._names is None or name in self._names
