"""The mean of the ranks' numbers in fewer bytes, the same to the bit on all ranks.

    each rank       cuts its numbers into a piece for each rank, rounds them, and sends each piece to its rank
    rank r          adds the pieces r of all ranks in float32, divides by their weights, rounds, and sends that to all

What a rank has rounded away it adds to what it sends next time (error feedback, Seide et al., Interspeech 2014).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.codec import Codec
from lightning_gnn_dist.wire.collectives import check_total, octets

ROW = 256  # numbers that share one range
_ROWS_AT_ONCE = 1 << 12  # bounds what is held beside the numbers


class RoundedMean:
    """Takes means of vectors of one length.

    Args:
        channel: The ranks.
        codec: Rounds what they send.
        length: The numbers in a vector.
        keeps_lost: Whether a rank adds what it has rounded away to what it sends next time.

    Attributes:
        lost: What this rank has rounded away of what it sent, and of the piece that it has averaged.
    """

    def __init__(self, channel: Channel, codec: Codec, length: int, *, keeps_lost: bool = True) -> None:
        self._channel, self._codec, self.length, self._keeps_lost = channel, codec, length, keeps_lost
        self._rows = math.ceil(length / ROW / channel.size)  # of a piece
        self.lost = [torch.zeros(channel.size, self._rows, ROW), torch.zeros(1, self._rows, ROW)]

    def __call__(self, vector: Tensor, weight: float, number: int, *, is_agreed: bool = False) -> Tensor:
        """Return the mean of the vectors of all ranks, float32 on the CPU. Collective.

        Args:
            vector: This rank's.
            weight: What it counts for. The sum of all weights must be positive.
            number: How many means were taken before: it decides how numbers are rounded.
            is_agreed: Whether all ranks are known to have vectors of this length. Then weights travel with the numbers;
                otherwise ranks tell each other lengths and weights before, which takes an exchange.
        """
        size, rows = self._channel.size, self._rows
        chance = torch.Generator().manual_seed(number * size + self._channel.rank)
        own = self._in_pieces(vector.cpu().float())
        weights = None if is_agreed else self._weights(weight)
        packed = self._rounded(own, 0, chance, counts=weight != 0)
        if weights is None:
            weights, received = self._exchange_with_weights(packed, weight)
        else:
            received = self._channel.exchange_equal(packed)
        mean = torch.zeros(1, rows, ROW)
        for piece, share in zip(self._unpacked(received), (weights / weights.sum()).tolist(), strict=True):
            mean[0].add_(piece, alpha=share)
        means = self._channel.exchange_equal(self._rounded(mean, 1, chance).expand(size, -1, -1))
        return self._unpacked(means).view(-1)[: self.length]

    def moved(self, channel: Channel) -> RoundedMean:
        """Return the same for other ranks. What was lost of the mean is kept by who averages the same piece."""
        moved = RoundedMean(channel, self._codec, self.length, keeps_lost=self._keeps_lost)
        if (channel.size, channel.rank) == (self._channel.size, self._channel.rank):
            moved.lost = [*self.lost]
        else:
            moved.lost[0] = moved._in_pieces(self.lost[0].view(-1)[: self.length])
        return moved

    def _weights(self, weight: float) -> Tensor:
        """The weights of all ranks; refuse ranks that average other numbers. All ranks raise or none."""
        size = self._channel.size
        own = torch.tensor([[weight, self.length]], dtype=torch.float64)
        weights, lengths = self._channel.exchange_equal(own.expand(size, -1)).unbind(1)
        if len(set(lengths.tolist())) > 1:
            raise RuntimeError(
                f"The ranks are about to average different numbers of values: {list(map(int, lengths))}, in order of "
                "rank. A parameter is frozen, or an optimizer has no state yet, on some ranks only."
            )
        check_total(float(weights.sum()))
        return weights

    def _exchange_with_weights(self, packed: Tensor, weight: float) -> tuple[Tensor, Tensor]:
        """Return the weights of all ranks, and the pieces that they have sent here."""
        own = octets(torch.tensor([weight], dtype=torch.float64)).expand(self._channel.size, -1)
        received = self._channel.exchange_equal(torch.cat([packed.flatten(1), own], 1))
        pieces, told = received.split([received.shape[1] - own.shape[1], own.shape[1]], 1)
        weights = told.contiguous().view(torch.float64).flatten()
        check_total(float(weights.sum()))
        return weights, pieces.contiguous().view(packed.shape)

    def _in_pieces(self, vector: Tensor) -> Tensor:
        size, rows = self._channel.size, self._rows
        return torch.nn.functional.pad(vector, (0, size * rows * ROW - self.length)).view(size, rows, ROW)

    def _rounded(self, pieces: Tensor, which: int, chance: torch.Generator, *, counts: bool = True) -> Tensor:
        """Return pieces, with what was lost of those before, as bytes, and note what is lost of them, if they count."""
        pieces = pieces + self.lost[which]
        some = pieces.view(-1, ROW).split(_ROWS_AT_ONCE)
        packed = torch.cat([self._codec.pack(rows, chance) for rows in some])
        packed = packed.view(len(pieces), self._rows, packed.shape[1])
        if self._keeps_lost and counts:
            self.lost[which] = (pieces - self._unpacked(packed)).nan_to_num_(0.0, 0.0, 0.0)  # of NaN nothing is kept
        return packed

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Return the numbers of pieces that are bytes."""
        some, like = packed.view(-1, packed.shape[2]).split(_ROWS_AT_ONCE), torch.empty(0, ROW)
        return torch.cat([self._codec.unpack(rows, like) for rows in some]).view(*packed.shape[:2], ROW)
