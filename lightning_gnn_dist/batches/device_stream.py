"""The way of batches to a CUDA device, beside the training there.

    gathered into page-locked memory -> copied on a stream of its own -> the training stream waits for that copy alone

A plain ``batch.to("cuda")`` makes the host wait until the device has done all that it was asked for before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import SampledData


class PinnedPool:
    """Lends page-locked memory for the large arrays of batches.

    torch keeps such memory when the last tensor on it is gone, and lends it again once every copy from it that was
    begun is done: neither this pool nor its user has to remember which copies are under way. It stays with the process,
    in pieces of powers of two.
    """

    def take(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Sent(NamedTuple):
    """A batch on its way.

    Attributes:
        batch: Its tensors are on the device, and may not be complete.
        event: Comes when they are.
    """

    batch: SampledData
    event: torch.cuda.Event


Bulk: TypeAlias = deque[SampledData | Sent]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for a device: what one loader leaves in a cache, another may read."""
    return torch.cuda.Stream(device)


class DeviceStream:
    """Brings batches to a CUDA device.

    Of a bulk that was made on the CPU only the first batch is sent at once, and each of the others when the one before
    it is received: so few are on the device. Batches that were made there are only waited for.

    Args:
        device: Where batches are to be.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = PinnedPool()
        self._stream = _side_stream(device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """What this thread launches here, it launches on the device, beside the training."""
        # The device comes first: on its way back to another device a stream would open a context there.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def load(self, batches: Iterable[SampledData]) -> Bulk:
        """A bulk that is ready to be received, batch by batch."""
        with self.open():
            bulk: Bulk = deque(self._loaded(batch) for batch in batches)
            if bulk:
                bulk[0] = self.send(bulk[0])
        return bulk

    def _loaded(self, batch: SampledData) -> SampledData | Sent:
        is_there = batch.n_id.device == self.device
        return self.send(batch) if is_there else batch.pin_memory()

    def send(self, batch: SampledData | Sent) -> Sent:
        """Begin the copy of a batch; the host does not wait for it."""
        if isinstance(batch, Sent):
            return batch
        with self.open():
            return Sent(batch.to(self.device, non_blocking=True), self._stream.record_event())

    def receive(self, bulk: Bulk) -> SampledData:
        """Take the first batch. What this thread launches from here on finds it complete."""
        sent = self.send(bulk.popleft())
        if bulk:
            bulk[0] = self.send(bulk[0])
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent.event)
        sent.batch.record_stream(current)  # or its memory would be used again while this stream reads it
        return sent.batch


def handed_out(make: Callable[[], Iterable[SampledData]], stream: DeviceStream | None) -> Iterator[SampledData]:
    """The batches that ``make`` makes, here and now, on the stream if there is one.

    Iterating waits for them, and belongs to the thread that trains. Nothing holds on to a batch but who gets it.
    """
    if stream is None:
        made = deque(make())
        return (made.popleft() for _ in range(len(made)))
    with stream.open():
        bulk = stream.load(make())
    return (stream.receive(bulk) for _ in range(len(bulk)))
