"""Gradients that ranks average in fewer bits while the backward pass goes on.

    buckets    the trained parameters, from the last to the first, a million numbers or a little more in each
    backward   a bucket that has all its gradients is rounded and sent by a thread, in the same order on all ranks
    its end    the means take the place of the gradients

What is rounded away is added at the next step. Which gradients share a bucket does not depend on when they come, so a
run gives the same bits as the one before, and as one whose exchange begins at the end of the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gnn_dist.extensions.rounded.codec import Bits, Codec
from lightning_gnn_dist.extensions.rounded.rounded_mean import RoundedMean, means_together
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import Background
from lightning_gnn_dist.wire.collectives import scatter_back
from lightning_gnn_dist.wire.hosts import GradientSums, open_channel_of_means

THREAD_NAME = "lightning_gnn_dist.extensions.rounded.gradients"
NUMBERS_OF_A_BUCKET = 1 << 20


class RoundedGradients(GradientSums):
    """Averages gradients over ranks. Make it on all ranks at once, after DDP, which leaves each rank its own.

    Args:
        parameters: Those whose gradients are averaged.
        bits: Bits of a number on the wire.
        overlaps: Whether to send during the backward pass, in which every trained parameter must then get a gradient.
    """

    is_of_ddp = False

    def __init__(self, parameters: Sequence[Tensor], bits: Bits, *, overlaps: bool) -> None:
        self._trained = parameters
        self._codec, self._channel = Codec(bits), open_channel_of_means()
        self._means: list[RoundedMean] = []
        self._restored: list[Tensor] = []
        self._buckets: list[list[Tensor]] = []
        self._places: dict[Tensor, int] = {}  # the bucket of each parameter that has no gradient yet
        self._missing: list[int] = []  # how many gradients a bucket lacks
        self._sent: list[Future[Tensor]] = []
        self._number = 0
        has_use = overlaps and self._channel.size > 1 and len(_buckets(self._trained)) > 1
        self._thread = Background(THREAD_NAME) if has_use else None
        self._channel.is_waited_for = not has_use
        hooked = self._trained if has_use else []
        self._handles = [each.register_post_accumulate_grad_hook(self._take) for each in hooked]

    def begin(self, step: int) -> None:
        """Get ready for a backward pass whose gradients are averaged. The step decides how numbers are rounded."""
        self._number = step << 16
        if self._thread is not None:
            self._buckets = _buckets(each for each in self._trained if each.requires_grad)
            self._places = {each: place for place, bucket in enumerate(self._buckets) for each in bucket}
            self._sent, self._missing = [], [len(bucket) for bucket in self._buckets]

    def finish(self) -> None:
        """Replace the gradients by their means over ranks, after the backward pass. Collective."""
        if self._channel.size == 1:
            return
        if self._thread is None:
            self._buckets = _buckets(each for each in self._trained if each.requires_grad and each.grad is not None)
            means = [self._mean(place, _flat(bucket)) for place, bucket in enumerate(self._buckets)]
        else:
            with collectives.counted(0.0):
                means = [sent.result() for sent in self._sent]
        for mean, bucket in zip(means, self._buckets, strict=True):
            scatter_back(mean, _gradients(bucket))

    def close(self) -> None:
        """End what is under way, if that takes no more than some seconds, and the connections. Not collective."""
        for handle in self._handles:
            handle.remove()
        if self._thread is not None:
            self._thread.close()
        self._channel.close()

    def state(self) -> dict[str, Any]:
        """Return what this rank has rounded away, for a checkpoint."""
        return {"lost": [each for mean in self._means for each in mean.lost] or self._restored}

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with what was rounded away in the fit of a checkpoint, if its buckets were as large."""
        self._restored, self._means = list(lost), []

    def _take(self, parameter: Tensor) -> None:
        """Note that a parameter has its gradient; send the buckets that are due. The thread of autograd calls it."""
        place = self._places.pop(parameter, None)
        if place is None:  # in a pass that only adds up gradients, or of a frozen parameter
            return
        self._missing[place] -= 1
        while len(self._sent) < len(self._buckets) and not self._missing[len(self._sent)]:
            self._send()

    def _send(self) -> None:
        assert self._thread is not None
        place = len(self._sent)
        self._sent.append(self._thread.submit(partial(self._mean, place, _flat(self._buckets[place]))))

    @torch.no_grad()
    def _mean(self, place: int, flat: Tensor) -> Tensor:
        if place == len(self._means):
            self._means.append(self._new_mean(place, len(flat)))
        elif self._means[place].length != len(flat):  # a parameter was frozen
            self._means[place] = RoundedMean(self._channel, self._codec, len(flat))
        (mean,) = means_together([self._means[place]], [flat], 1.0, self._number + place)
        return mean

    def _new_mean(self, place: int, length: int) -> RoundedMean:
        mean, saved = RoundedMean(self._channel, self._codec, length), self._restored[2 * place : 2 * place + 2]
        if [each.shape for each in saved] == [each.shape for each in mean.lost]:
            mean.lost = saved
        return mean


def leave_gradients(ddp: DistributedDataParallel) -> None:
    """Let DDP leave each rank its own gradients."""
    # It refuses a hook whose annotations are text.
    ddp.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))


def _done(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def _buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Deal parameters out, from the last, whose gradient comes first; within a bucket the first comes first."""
    buckets: list[list[Tensor]] = []
    room = 0
    for parameter in reversed(list(parameters)):
        if room <= 0:
            buckets.append([])
            room = NUMBERS_OF_A_BUCKET
        buckets[-1].insert(0, parameter)
        room -= parameter.numel()
    return buckets


def _gradients(bucket: Sequence[Tensor]) -> list[Tensor]:
    gradients = [each.grad for each in bucket if each.grad is not None]
    return [torch.view_as_real(each) if each.is_complex() else each for each in gradients]


@torch.no_grad()
def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """A copy on the CPU, which a device has finished: the thread that sends knows nothing of its streams."""
    return torch.cat([each.reshape(-1) for each in _gradients(bucket)]).cpu()
