"""Takes the means of a meeting, in as few bits as asked for. The sums are float32, and equal to the bit on all ranks.

    weights      how far a replica has come since the meeting before; what is rounded away is added at the next meeting
    gradients    as they are, in as many bits
    moments      as they are, in 16 bits: their sizes differ too much for eight

Everything else (buffers, counts of steps, frozen weights) goes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.rounded.codec import Bits, Codec
from lightning_gnn_dist.extensions.rounded.overlap import Overlap
from lightning_gnn_dist.extensions.rounded.rounded_mean import RoundedMean, means_together
from lightning_gnn_dist.rounds.means import AveragedMoments, OuterStep
from lightning_gnn_dist.rounds.meeting_hook import MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups, Reducer, is_rounded, real
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Channel, open_channel
from lightning_gnn_dist.wire.collectives import scatter_back
from lightning_gnn_dist.wire.hosts import open_channel_of_means

NewMean = Callable[[int], RoundedMean]  # of so many numbers
_BITS_OF_MOMENTS = 16


class Means(Reducer):
    """Takes means over ranks in few bits, or while they train.

    Args:
        bits: Bits of a number on the wire. None: ranks send numbers as they are.
        overlap: Whether means travel while ranks train, on connections of their own.
    """

    takes_ways = True

    def __init__(self, bits: Bits | None, *, overlap: bool = False) -> None:
        self.bits, self.is_late = bits, overlap
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
        if self.is_late and self._apart is None and size > 1:
            self._apart = open_channel(size)
            self._apart.is_waited_for = False

    def keep(self) -> None:
        """Note that all ranks have come to the end of a meeting, so that what was lost there can be added."""
        self._kept = self._of_pseudo_gradients

    def begin_meeting(self, round_idx: int, lengths: Sequence[int] | None = None) -> None:
        """Note the number of the meeting, which decides how numbers are rounded, and what is as long on all ranks."""
        self._number = round_idx << 16
        self._agreed = self._agreed if lengths is None else set(lengths)

    def mean_(self, groups: Groups, weight: float) -> None:
        if self._channel is None:
            super().mean_(groups, weight)
            return
        rest, moments = self.rest(groups), groups.get("moments", ())
        collectives.average_([*groups.get("whole", ()), *(each for each in moments if not is_rounded(each))], weight)
        self._number += self._average_rounded(rest, weight, self._number, self._agreed)

    def rest(self, groups: Groups) -> Groups:
        if self.bits is None:
            return {}
        rest = {name: groups[name] for name in ("pseudo_gradients", "moments", "gradient") if name in groups}
        return rest | ({"moments": [each for each in rest["moments"] if is_rounded(each)]} if "moments" in rest else {})

    def mean_of_rest_(self, rest: Groups, weight: float, channel: Channel, round_idx: int) -> None:
        self._moves, self._channel = True, channel if channel.size > 1 else None
        self._of_pseudo_gradients = None if self._kept is None else self._kept.moved(channel)
        self.begin_meeting(round_idx)
        if self._channel is not None:
            self._number += self._average_rounded(rest, weight, self._number, self._agreed)

    def stage(
        self, outer: OuterStep | None, moments: AveragedMoments | None
    ) -> tuple[list[MeetingHook], list[MeetingHook]]:
        if not self.is_late or outer is None:
            return super().stage(outer, moments)
        return [], [Overlap(self, outer, moments)]

    def reserve(self, count: int) -> int:
        """Return the number of the first of so many means that :meth:`later` takes."""
        self._number += count
        return self._number - count

    def later(
        self, pseudo_gradients: Sequence[Tensor], moments: Sequence[Tensor], weight: float, number: int
    ) -> Callable[[], None]:
        """Return what :meth:`mean_` does to tensors in RAM, for a thread to call, as all ranks do in one order.

        What a rank exchanges in the meantime goes on other connections. ``number`` is what :meth:`reserve` gave.
        """
        assert self._apart is not None
        channel = self._apart
        whole = [pseudo_gradients, moments]
        if self.bits is not None:
            whole = [[each for each in moments if not is_rounded(each)]]
        rest = self.rest({"pseudo_gradients": pseudo_gradients, "moments": moments})
        agreed = self._agreed

        def take() -> None:
            for tensors in whole:
                channel.average_(tensors, weight)
            self._average_rounded(rest, weight, number, agreed)

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

    def _average_rounded(self, rest: Groups, weight: float, number: int, agreed: set[int]) -> int:
        """Average groups of tensors in few bits; return how many there are. Means have the numbers from ``number``."""
        given = [(real(tensors), self._mean_of(name)) for name, tensors in rest.items() if tensors]
        flats = [torch.cat([each.detach().reshape(-1) for each in tensors]) for tensors, _ in given]
        means = [mean(len(flat)) for flat, (_, mean) in zip(flats, given, strict=True)]
        is_agreed = agreed.issuperset(map(len, flats))
        found = means_together(means, flats, weight, number, is_agreed=is_agreed) if means else []
        for flat, (tensors, _) in zip(found, given, strict=True):
            scatter_back(flat, tensors)
        return len(given)

    def _mean_of(self, name: str) -> NewMean:
        if name == "pseudo_gradients":
            return self._mean_of_pseudo_gradients
        if name == "moments":
            return partial(self._new_mean, self._apart or self._channel, _BITS_OF_MOMENTS)
        return partial(self._new_mean, self._channel, self.bits)

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
