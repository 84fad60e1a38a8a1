"""The tensors that ranks average: trained parameters, buffers, moments, and frozen parameters that differ.

Of tables with sparse gradients, and of their moments, ranks put together the rows that they have touched
(:mod:`~lightning_gnn_dist.rounds.rows.touched_rows`); they are no part of an average.

Some frozen parameters change between meetings: the half of a GAN that is frozen while the other learns, a teacher, a
moving target. Most, such as a pretrained encoder's, never change and may be large. So ranks compare checksums of frozen
parameters, and average those that differ. A tensor's version or address would not tell, as a write through ``.data``
leaves both as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Literal

from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.rounds.correction_gradients import trained_parameters
from lightning_gnn_dist.rounds.lightning_internals import module_of
from lightning_gnn_dist.rounds.replica_state import optimizer_tensors
from lightning_gnn_dist.rounds.rows.lazy_adam import LazyAdam
from lightning_gnn_dist.rounds.rows.owned_embedding import owned_parameters
from lightning_gnn_dist.rounds.rows.tables import tables_of
from lightning_gnn_dist.rounds.walking import buffers_of, parameters_of
from lightning_gnn_dist.wire import collectives

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


class Averaging:
    """The tensors of one replica that a meeting averages.

    Args:
        strategy: The strategy whose module and optimizers are averaged.
        buffers: Whether the module's buffers are averaged, too.
        moments: Whether the states of the optimizers are averaged, too: all of them, or those of one kind.
    """

    def __init__(self, strategy: Strategy, *, buffers: bool, moments: Moments) -> None:
        self._strategy, self._buffers, self._moments = strategy, buffers, moments
        self._unequal: set[int] = set()  # parameters that differed between ranks when they met, by number

    def tensors(self, *, trained: bool = True, moments: bool = True) -> list[Tensor]:
        """Return the tensors to average, in the same order on every rank.

        Args:
            trained: Whether trained parameters are among them.
            moments: Whether moments of optimizers are, where they are averaged.
        """
        tables = {id(table) for table in tables_of(module_of(self._strategy)).values()}
        parameters = enumerate(self._parameters())
        tensors = [
            p.data
            for idx, p in parameters
            if (trained and id(p) not in tables if p.requires_grad else idx in self._unequal)
        ]
        return tensors + self._averaged_buffers() + (self.moments() if moments else [])

    def moments(self) -> list[Tensor]:
        """Return the tensors of the optimizers' states that are averaged."""
        if not self._moments:
            return []
        of_rows = {id(moment) for table in self._tables() for moment in self.of_rows(table)}
        return [each for each in optimizer_tensors(self._strategy.optimizers, self._names) if id(each) not in of_rows]

    def of_rows(self, table: Tensor) -> list[Tensor]:
        """Return the moments of a table that have a row for each of its own, if moments are averaged."""
        if not self._moments:
            return []
        holders = [each for each in self._strategy.optimizers if _holds(each, table)]
        for optimizer in holders:
            if isinstance(optimizer, LazyAdam):
                optimizer.begin_state(table)  # another rank may have touched rows where this one has none
        return [each for each in optimizer_tensors(holders, self._names, [table]) if each.shape == table.shape]

    def averages(self, name: str) -> bool:
        """Return whether moments of a name are averaged."""
        return bool(self._moments) and (self._names is None or name in self._names)

    def tables(self) -> list[Tensor]:
        """Return the tables, and their moments that are put together: like :meth:`tensors`, equal after a meeting."""
        return [each for table in self._tables() for each in (table.data, *self.of_rows(table))]

    def num_values(self, *, gradients: bool) -> int:
        """Return how many numbers a meeting exchanges at most, with or without gradients."""
        of_rows = [moment for table in self._tables() for moment in self.of_rows(table)]
        tensors = [*self._averaged_buffers(), *self.moments(), *of_rows, *self._parameters()]
        if gradients:
            tensors += trained_parameters(module_of(self._strategy))
        return sum(tensor.numel() for tensor in tensors)

    def checksums(self) -> list[int]:
        """Return a checksum of 48 bits for each frozen parameter; -1 where it is trained, or lives with its owners."""
        parameters, owned = self._parameters(), owned_parameters(module_of(self._strategy))
        return [
            _TRAINED if each.requires_grad or id(each) in owned else collectives.checksum([each]) % (1 << 48)
            for each in parameters
        ]

    def compare(self, rows: Sequence[Sequence[int]]) -> None:
        """Average, until the next call, the parameters whose checksums differ; a row holds one rank's checksums."""
        columns = enumerate(zip(*rows, strict=True))
        self._unequal = {idx for idx, column in columns if len(set(column)) > 1}

    @property
    def _names(self) -> frozenset[str] | None:
        return _MOMENTS[self._moments] if isinstance(self._moments, str) else None

    def _tables(self) -> list[Tensor]:
        """Those that every rank holds."""
        module = module_of(self._strategy)
        owned = owned_parameters(module)
        return [each for each in tables_of(module).values() if id(each) not in owned]

    def _parameters(self) -> list[nn.Parameter]:
        return parameters_of(module_of(self._strategy))

    def _averaged_buffers(self) -> list[Tensor]:
        return buffers_of(module_of(self._strategy)) if self._buffers else []


def summary(numbers: Sequence[int]) -> int:
    """Return one checksum of all numbers."""
    return zlib.crc32(repr(numbers).encode())


def _holds(optimizer: Optimizer, parameter: Tensor) -> bool:
    return any(each is parameter for group in optimizer.param_groups for each in group["params"])
