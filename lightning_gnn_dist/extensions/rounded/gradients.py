"""Gradients that ranks average in fewer bits while the backward pass goes on.

DDP deals the trained parameters out to buckets, from the last to the first, a million numbers or a little more in each.
A bucket that has all its gradients is rounded and sent by a thread, in the same order on all ranks, and its mean takes
the place of the gradients. What is rounded away is added at the next step. Buckets are settled before the first step,
so that a run gives the same bits as the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.rounded.codec import Bits, Codec
from lightning_gnn_dist.extensions.rounded.rounded_mean import RoundedMean, means_together
from lightning_gnn_dist.rounds.reducer import real
from lightning_gnn_dist.wire.channel import Background
from lightning_gnn_dist.wire.collectives import scatter_back
from lightning_gnn_dist.wire.hosts import GradientSums, open_channel_of_means

THREAD_NAME = "lightning_gnn_dist.extensions.rounded.gradients"


class RoundedGradients(GradientSums):
    """Averages what DDP would. Make it on all ranks at once.

    Args:
        ddp: torch's module.
        parameters: Those whose gradients are averaged.
        bits: Bits of a number on the wire.
    """

    is_of_ddp = False

    def __init__(self, ddp: Any, parameters: Sequence[Tensor], bits: Bits) -> None:
        self._order = {each: place for place, each in enumerate(parameters)}
        self._codec, self._channel = Codec(bits), open_channel_of_means()
        self._channel.is_waited_for = False
        self._means: dict[int, RoundedMean] = {}  # by the number of the bucket
        self._restored: list[Tensor] = []
        self._number: int | None = None  # None before the first step, when DDP settles its buckets
        self._thread = Background(THREAD_NAME)
        # It refuses a hook whose annotations are text.
        ddp.register_comm_hook(None, lambda _, bucket: self._begun(bucket))

    def begin(self, step: int) -> None:
        """Get ready for a backward pass whose gradients are averaged. The step decides how numbers are rounded."""
        self._number = step << 16

    def close(self) -> None:
        """End what is under way, if that takes no more than some seconds, and the connections. Not collective."""
        self._thread.close()
        self._channel.close()

    def state(self) -> dict[str, Any]:
        """Return what this rank has rounded away, for a checkpoint."""
        lost = [each for place in sorted(self._means) for each in self._means[place].lost]
        return {"lost": lost or self._restored}

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with what was rounded away in the fit of a checkpoint, if its buckets were as large."""
        self._restored, self._means = list(lost), {}

    def _begun(self, bucket: Any) -> Any:
        """Send a bucket that has all its gradients. The thread of autograd calls it."""
        buffer = bucket.buffer()
        future: Any = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        if self._number is None or self._channel.size == 1:
            future.set_result(buffer)
            return future
        pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
        gradients = real([gradient for _, gradient in sorted(pairs, key=lambda pair: self._order[pair[0]])])
        # A copy on the CPU, which a device has finished: the thread that sends knows nothing of its streams.
        flat = torch.cat([each.detach().reshape(-1) for each in gradients]).cpu()
        place, number = bucket.index(), self._number

        def average() -> None:
            try:
                (mean,) = means_together([self._mean(place, len(flat))], [flat], 1.0, number + place)
                scatter_back(mean, gradients)
                future.set_result(buffer)
            except BaseException as error:  # raised where DDP waits for it
                future.set_exception(error)

        self._thread.submit(average)
        return future

    def _mean(self, place: int, length: int) -> RoundedMean:
        if place not in self._means:
            self._means[place] = RoundedMean(self._channel, self._codec, length)
            saved = self._restored[2 * place : 2 * place + 2]
            if [each.shape for each in saved] == [each.shape for each in self._means[place].lost]:
                self._means[place].lost = saved
        return self._means[place]
