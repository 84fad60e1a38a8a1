r"""The mean of the ranks' numbers in fewer bytes, the same to the bit on all ranks.

    each rank       cuts its numbers into a piece for each rank, rounds them, and sends each piece to its rank
    rank r          adds the pieces r of all ranks in float32, divides by their weights, rounds, and sends that to all

What a rank has rounded away it adds to what it sends next time (error feedback, Seide et al., Interspeech 2014).
Numbers are rounded at random, so that they are right in the mean:

    16 bits     bfloat16: the upper half of a float32, to which a random number below one step is added before
    8 bits      256 steps between the least and the greatest number of a row; these two travel along as float32

With :math:`u` uniform in [0, 1), a number :math:`x` of a row from :math:`a` to :math:`b` becomes
:math:`a + s \lfloor (x - a) / s + u \rfloor` with :math:`s = (b - a) / 255` (AdaQP, Wan et al., arXiv:2306.01381).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_gnn_dist.wire.channel import CPU, Channel
from lightning_gnn_dist.wire.collectives import check_total, counted, gather_numbers, octets

Bits = Literal[8, 16]
_STEPS = 255
BYTES_OF_RANGE = 8  # two float32
_TINY = torch.finfo(torch.float32).tiny
_INFINITE = 0x7F800000  # the exponent of infinities and NaN
_NAN = 0x7FC0  # of a bfloat16


class Codec:
    """Packs rows into bytes, and unpacks them.

    Args:
        bits: Bits of a number: 8 or 16.
    """

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def bytes_of_row(self, width: int) -> int:
        """The bytes that a row of ``width`` numbers takes."""
        return 2 * width if self.bits == 16 else width + BYTES_OF_RANGE

    @torch.no_grad()
    def pack(self, rows: Tensor, chance: torch.Generator, lost: Tensor | None = None) -> Tensor:
        """Return the bytes of rows on the CPU, uint8, shape ``(n, bytes of a row)``.

        Args:
            rows: Rows of floating point numbers, shape ``(n, ...)``.
            chance: Decides which numbers are rounded up.
            lost: Takes what is rounded away, float32, shape ``(n, width)`` in one piece; 0 of what is not finite.
        """
        flat = rows.reshape(len(rows), rows.shape[1:].numel()).to(torch.float32).contiguous()
        if self.bits == 8:
            return _to_steps(flat, chance, lost)
        below = torch.randint(1 << 16, flat.shape, generator=chance, dtype=torch.int32)
        bits = flat.view(torch.int32)
        below[(bits & _INFINITE) == _INFINITE] = 0  # infinities and NaN have no next number, and stay
        # The greatest finite numbers may become infinite, as in torch.
        packed = ((bits + below) >> 16).to(torch.int16).masked_fill_(flat.isnan(), _NAN).view(torch.uint8)
        if lost is not None:
            lost.copy_((flat - self.unpack(packed, flat)).nan_to_num_(0.0, 0.0, 0.0))
        return packed

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """Return the rows, in the type and of the shape that the rows of ``like`` have."""
        if not packed.numel():
            return like.new_empty((len(packed), *like.shape[1:]))
        # Wider numbers lie in memory of their own, as they may not begin at any byte.
        if self.bits == 16:
            flat = packed.clone(memory_format=torch.contiguous_format).view(torch.bfloat16)
        else:
            ends = packed[:, -BYTES_OF_RANGE:].clone(memory_format=torch.contiguous_format).view(torch.float32)
            flat = packed[:, :-BYTES_OF_RANGE].float().mul_(ends[:, 1:]).add_(ends[:, :1])
        return flat.to(like.dtype).view(len(packed), *like.shape[1:])


def _to_steps(rows: Tensor, chance: torch.Generator, lost: Tensor | None) -> Tensor:
    """Return rows as bytes, a byte for each number and the least and the step of each row behind."""
    packed = torch.zeros(len(rows), rows.shape[1] + BYTES_OF_RANGE, dtype=torch.uint8)
    if not rows.numel():
        return packed
    ends = torch.stack([rows.amin(1), rows.amax(1)], 1)
    ends[:, 1].sub_(ends[:, 0]).div_(_STEPS)
    least, step = ends.split(1, 1)
    drawn = torch.rand(rows.shape, generator=chance, dtype=torch.float32)
    places = (rows - least).div_(step.clamp(min=_TINY)).add_(drawn).floor_().nan_to_num_(0.0).clamp_(0, _STEPS)
    packed[:, :-BYTES_OF_RANGE], packed[:, -BYTES_OF_RANGE:] = places, ends.view(torch.uint8)
    if lost is not None:
        torch.sub(rows, places.mul_(step).add_(least), out=lost).nan_to_num_(0.0, 0.0, 0.0)
    return packed


ROW = 256  # numbers that share one range
_ROWS_AT_ONCE = 1 << 9  # stay in the cache of a processor


class RoundedMean:
    """Takes means of vectors of one length.

    Args:
        channel: The ranks.
        codec: Rounds what they send.
        length: The numbers in a vector.
        keeps_lost: Whether a rank adds what it has rounded away to what it sends next time.

    Attributes:
        channel: The ranks.
        length: The numbers in a vector.
        lost: What this rank has rounded away of what it sent, and of the piece that it has averaged.
    """

    def __init__(self, channel: Channel, codec: Codec, length: int, *, keeps_lost: bool = True) -> None:
        self.channel, self.length, self._codec, self._keeps_lost = channel, length, codec, keeps_lost
        self._rows = math.ceil(length / ROW / channel.size)  # of a piece
        self._chance = torch.Generator()
        self.lost = [torch.zeros(channel.size, self._rows, ROW), torch.zeros(1, self._rows, ROW)]

    def to_ranks(self, vector: Tensor, number: int, *, counts: bool) -> Tensor:
        """Return the bytes of each rank's piece of a vector, in a row for each rank. Not collective."""
        self._chance.manual_seed(number * self.channel.size + self.channel.rank)
        size, rows = self.channel.size, self._rows
        padded = torch.nn.functional.pad(vector.cpu().float(), (0, size * rows * ROW - self.length))
        return self._rounded(padded.view(size, rows, ROW), 0, counts=counts)

    def answers(self, received: Tensor, weights: Tensor) -> Tensor:
        """Return the bytes of the mean of the pieces that came from all ranks, in a row for each rank."""
        mean = torch.zeros(1, self._rows, ROW)
        whole, shares = mean[0], (weights / weights.sum()).tolist()
        for piece, share in zip(self._unpacked(received), shares, strict=True):
            whole.add_(piece, alpha=share)
        return self._rounded(mean, 1).expand(self.channel.size, -1)

    def read(self, answers: Tensor) -> Tensor:
        """Return the mean whose pieces the ranks have answered."""
        return self._unpacked(answers).view(-1)[: self.length]

    def _rounded(self, pieces: Tensor, which: int, *, counts: bool = True) -> Tensor:
        """Return pieces, with what was lost of those before, as bytes, and note what is lost of them, if they count."""
        rows = (pieces + self.lost[which] if self._keeps_lost else pieces).view(-1, ROW)
        if self._keeps_lost:
            lost = torch.empty_like(rows)
            both = zip(rows.split(_ROWS_AT_ONCE), lost.split(_ROWS_AT_ONCE), strict=True)
            packed = [self._codec.pack(some, self._chance, away) for some, away in both]
            if counts:
                self.lost[which] = lost.view_as(pieces)
        else:
            packed = [self._codec.pack(some, self._chance) for some in rows.split(_ROWS_AT_ONCE)]
        return _joined(packed).view(len(pieces), -1)

    def _unpacked(self, packed: Tensor) -> Tensor:
        """Return the numbers of pieces that are bytes, a row for each piece."""
        rows = self._codec.unpack(packed.reshape(-1, self._codec.bytes_of_row(ROW)), self.lost[1][0, :0])
        return rows.view(len(packed), -1, ROW)


def means_together(
    means: Sequence[RoundedMean], vectors: Sequence[Tensor], weight: float, number: int, *, is_agreed: bool = False
) -> list[Tensor]:
    """Return the means of the vectors of all ranks, float32 on the CPU, in two exchanges for all of them. Collective.

    Args:
        means: What takes them, all with one channel.
        vectors: This rank's.
        weight: What it counts for. The sum of all weights must be positive.
        number: How many means were taken before; these have the numbers from it on, which decide how to round.
        is_agreed: Whether all ranks know that their vectors are equally long. Otherwise they compare lengths before.
    """
    if not is_agreed:
        _compare_lengths(means[0].channel, sum(mean.length for mean in means))
    if means[0].channel.hosts is not None:
        return _means_by_hosts(means, vectors, weight, number)
    return _means(means, vectors, weight, number)


def _means_by_hosts(
    means: Sequence[RoundedMean], vectors: Sequence[Tensor], weight: float, number: int
) -> list[Tensor]:
    """Return the means that the first ranks take for their hosts, of which they add up the numbers before."""
    hosts, lengths = means[0].channel.hosts, [mean.length for mean in means]
    flat = torch.cat([vector.cpu().float() for vector in vectors]).mul_(weight)
    total = torch.tensor([weight], dtype=torch.float64)
    with counted(hosts.sent_within(flat.nbytes + total.nbytes)):
        hosts.sum_on_first_(flat)
        hosts.sum_on_first_(total)
    if hosts.is_first:
        of_host = float(total)
        flat = torch.cat(_means(means, flat.div_(of_host or 1.0).split(lengths), of_host, number))
    hosts.spread_(flat)
    return list(flat.split(lengths))


def _means(means: Sequence[RoundedMean], vectors: Sequence[Tensor], weight: float, number: int) -> list[Tensor]:
    channel, counts = means[0].channel, weight != 0
    own = octets(torch.tensor([weight], dtype=torch.float64)).expand(channel.size, -1)
    sent = [
        mean.to_ranks(vector, idx, counts=counts)
        for idx, (mean, vector) in enumerate(zip(means, vectors, strict=True), number)
    ]
    sizes = [each.shape[1] for each in sent]
    *received, told = channel.exchange_equal(torch.cat([*sent, own], 1)).split([*sizes, own.shape[1]], 1)
    weights = told.contiguous().view(torch.float64).flatten()
    check_total(float(weights.sum()))
    answers = [mean.answers(pieces, weights) for mean, pieces in zip(means, received, strict=True)]
    found = channel.exchange_equal(torch.cat(answers, 1)).split(sizes, 1)
    return [mean.read(each) for mean, each in zip(means, found, strict=True)]


def _compare_lengths(channel: Channel, own: int) -> None:
    """Refuse ranks that average other numbers. All ranks raise or none. Collective."""
    if channel.hosts is None:
        lengths = channel.exchange_equal(torch.tensor([[own]] * channel.size)).flatten().tolist()
    else:
        lengths = [length for (length,) in gather_numbers([own], CPU)]
    if len({*lengths}) > 1:
        raise RuntimeError(
            f"The ranks are about to average different numbers of values: {lengths}, in order of rank. A parameter is "
            "frozen, or an optimizer has no state yet, on some ranks only."
        )


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
