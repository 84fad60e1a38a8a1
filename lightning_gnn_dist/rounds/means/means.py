"""Takes the means of a meeting, in as few bits as asked for. The sums are float32, and equal to the bit on all ranks.

    weights      how far a replica has come since the meeting before; what is rounded away is added at the next meeting
    gradients    as they are, in as many bits
    moments      as they are, in 16 bits: their sizes differ too much for eight

Everything else (buffers, counts of steps, frozen weights) goes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Channel, open_channel
from lightning_gnn_dist.wire.codec import Bits, Codec
from lightning_gnn_dist.wire.collectives import scatter_back
from lightning_gnn_dist.wire.hosts import open_channel_of_means
from lightning_gnn_dist.wire.rounded_mean import RoundedMean, means_together

NewMean = Callable[[int], RoundedMean]  # of so many numbers
_BITS_OF_MOMENTS = 16


class Means:
    """Takes means over ranks.

    Args:
        bits: Bits of a number on the wire. None: ranks send numbers as they are.
        overlap: Whether means travel while ranks train, on connections of their own.
    """

    def __init__(self, bits: Bits | None, *, overlap: bool = False) -> None:
        self.bits, self.overlap = bits, overlap
        self._channel: Channel | None = None
        self._apart: Channel | None = None  # for what travels while ranks train
        self._of_pseudo_gradients: RoundedMean | None = None
        self._kept: RoundedMean | None = None  # of the last meeting that was held to its end, if ranks may die
        self._moves = False
        self._restored: list[Tensor] = []
        self._number = 0
        self._agreed: set[int] = set()

    def begin(self) -> None:
        """Open connections for a fit, unless they are. Collective."""
        size = collectives.world_size()
        if self.bits is not None and self._channel is None and size > 1:
            self._channel = open_channel_of_means()
        if self.overlap and self._apart is None and size > 1:
            self._apart = open_channel(size)
            self._apart.is_waited_for = False

    def move(self, channel: Channel) -> None:
        """Exchange with these ranks from now on, as if nothing had been taken since :meth:`keep`. Not collective."""
        self._moves = True
        self._channel = channel if channel.size > 1 else None
        self._of_pseudo_gradients = None if self._kept is None else self._kept.moved(channel)

    def keep(self) -> None:
        """Note that all ranks have come to the end of a meeting, so that what was lost there can be added."""
        self._kept = self._of_pseudo_gradients

    def begin_meeting(self, round_idx: int) -> None:
        """Note the number of the meeting, which decides how numbers are rounded."""
        self._number = round_idx << 16

    def agree(self, lengths: Sequence[int]) -> None:
        """Note, until the next call, that groups of tensors with so many numbers have as many on all ranks."""
        self._agreed = set(lengths)

    def average_gradient_(self, gradient: Sequence[Tensor], weight: float) -> None:
        """Replace a gradient, in place, by the mean over ranks. Collective."""
        self._average_([(gradient, self._mean_of_gradient)], weight)

    def average_(
        self, pseudo_gradients: Sequence[Tensor], tensors: Sequence[Tensor], moments: Sequence[Tensor], weight: float
    ) -> None:
        """Replace what a meeting averages, in place, by the means over ranks. Collective.

        Args:
            pseudo_gradients: Of this rank's replica, where the meeting has an optimizer.
            tensors: What goes as it is.
            moments: Moments of optimizers.
            weight: What this rank counts for.
        """
        if self._channel is None:
            collectives.average_(pseudo_gradients, weight)
            collectives.average_([*tensors, *moments], weight)  # in one go
            return
        collectives.average_([*tensors, *(each for each in moments if not is_rounded(each))], weight)
        self.average_rounded_(pseudo_gradients, [each for each in moments if is_rounded(each)], weight)

    def average_rounded_(self, pseudo_gradients: Sequence[Tensor], moments: Sequence[Tensor], weight: float) -> None:
        """Replace pseudo-gradients, and moments that are rounded, in place, by their means over ranks. Collective."""
        self._average_([(pseudo_gradients, self._mean_of_pseudo_gradients), (moments, self._mean_of_moments)], weight)

    def reserve(self, count: int) -> int:
        """Return the number of the first of so many means that :meth:`later` takes."""
        self._number += count
        return self._number - count

    def later(
        self, pseudo_gradients: Sequence[Tensor], moments: Sequence[Tensor], weight: float, number: int
    ) -> Callable[[], None]:
        """Return what :meth:`average_` does to tensors in RAM, for a thread to call, as all ranks do in one order.

        What a rank exchanges in the meantime goes on other connections. ``number`` is what :meth:`reserve` gave.
        """
        assert self._apart is not None
        channel = self._apart
        whole, rounded = [pseudo_gradients, moments], list[tuple[Sequence[Tensor], NewMean]]()
        if self.bits is not None:
            whole = [[each for each in moments if not is_rounded(each)]]
            rounded = [(pseudo_gradients, self._mean_of_pseudo_gradients)]
            rounded += [([each for each in moments if is_rounded(each)], self._mean_of_moments)]
        agreed = self._agreed

        def take() -> None:
            for tensors in whole:
                channel.average_(tensors, weight)
            self._average_rounded(rounded, weight, number, agreed)

        return take

    def close(self) -> None:
        """End the connections. Not collective."""
        for channel in (self._channel, self._apart):
            if channel is not None:
                channel.close()

    def forget(self) -> None:
        """Forget the fit before."""
        self._channel = self._apart = self._of_pseudo_gradients = self._kept = None
        self._agreed = set()
        self._restored = []

    def lost(self) -> list[Tensor]:
        """Return what rounding has left of this rank's pseudo-gradients, for a checkpoint; nothing where ranks may die.

        Their checkpoint is one rank's, from which any number of ranks may go on.
        """
        if self._moves:
            return []
        return self._restored if self._of_pseudo_gradients is None else self._of_pseudo_gradients.lost

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with what was rounded away in the fit of a checkpoint, if the numbers that ranks send are as many."""
        self._restored = list(lost)

    def _average_(self, groups: Sequence[tuple[Sequence[Tensor], NewMean]], weight: float) -> None:
        """Average groups of tensors by what is given with each for as many numbers; without bits, as they are."""
        if self._channel is None:
            for tensors, _ in groups:
                collectives.average_(tensors, weight)
            return
        self._number += self._average_rounded(groups, weight, self._number, self._agreed)

    @staticmethod
    def _average_rounded(
        groups: Sequence[tuple[Sequence[Tensor], NewMean]], weight: float, number: int, agreed: set[int]
    ) -> int:
        """Average groups of tensors in few bits; return how many there are. Means have the numbers from ``number``."""
        given = [(_real(tensors), mean) for tensors, mean in groups if tensors]
        flats = [torch.cat([each.detach().reshape(-1) for each in tensors]) for tensors, _ in given]
        means = [mean(len(flat)) for flat, (_, mean) in zip(flats, given, strict=True)]
        is_agreed = agreed.issuperset(map(len, flats))
        found = means_together(means, flats, weight, number, is_agreed=is_agreed) if means else []
        for flat, (tensors, _) in zip(found, given, strict=True):
            scatter_back(flat, tensors)
        return len(given)

    def _mean_of_gradient(self, length: int) -> RoundedMean:
        return self._new_mean(self._channel, self.bits, length)

    def _mean_of_moments(self, length: int) -> RoundedMean:
        return self._new_mean(self._apart or self._channel, _BITS_OF_MOMENTS, length)

    @staticmethod
    def _new_mean(channel: Channel | None, bits: int | None, length: int, *, keeps_lost: bool = False) -> RoundedMean:
        assert channel is not None and bits is not None
        return RoundedMean(channel, Codec(bits), length, keeps_lost=keeps_lost)

    def _mean_of_pseudo_gradients(self, length: int) -> RoundedMean:
        if self._of_pseudo_gradients is None or self._of_pseudo_gradients.length != length:
            self._of_pseudo_gradients = self._new_mean(self._apart or self._channel, self.bits, length, keeps_lost=True)
            if [each.shape for each in self._restored] == [each.shape for each in self._of_pseudo_gradients.lost]:
                self._of_pseudo_gradients.lost = self._restored
            self._restored = []
        return self._of_pseudo_gradients


def _real(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.view_as_real(each) if each.is_complex() else each for each in tensors]


def length_of(tensors: Sequence[Tensor]) -> int:
    """Return how many real numbers tensors have."""
    return sum(each.numel() for each in _real(tensors))


def is_rounded(moment: Tensor) -> bool:
    """Whether a moment is sent in fewer bits: real and complex numbers, but for single ones."""
    return moment.dim() > 0 and (moment.is_floating_point() or moment.is_complex())
