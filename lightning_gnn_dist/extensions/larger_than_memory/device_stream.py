"""Brings batches to a CUDA device on a stream of its own, from page-locked memory: the host does not wait."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple, TypeAlias

import torch

from lightning_gnn_dist.batches.batch import SampledData, device_of_batch
from lightning_gnn_dist.engine.lending import pinned_pool


class Sent(NamedTuple):
    """A batch on its way to the device.

    Attributes:
        batch: The batch on the device; its tensors may not be complete yet.
        event: An event that is recorded when they are complete.
    """

    batch: SampledData
    event: torch.cuda.Event


InFlight: TypeAlias = deque[SampledData | Sent]


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for each device, so that one loader may read what another has left in a cache."""
    return torch.cuda.Stream(device)


class DeviceStream:
    """Brings batches to a CUDA device.

    Of a bulk that was made on the CPU, the first batch is sent at once, and each other one when the one before it is
    received, so few are on the device. Batches that were made on the device are only waited for.

    Args:
        device: The device that trains.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = device = torch.device("cuda", index)
        self.pool = pinned_pool()
        self._stream = _side_stream(device)

    @contextmanager
    def open(self) -> Iterator[None]:
        """What this thread launches in the block runs on the device, on a stream beside the training."""
        # The device is set first, or the end of the stream's block would open a context on another device.
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def load(self, batches: Iterable[SampledData]) -> InFlight:
        """Make a bulk of which :meth:`receive` takes one batch after the other."""
        with self.open():
            bulk: InFlight = deque(self._loaded(batch) for batch in batches)
            if bulk:
                bulk[0] = self.send(bulk[0])
        return bulk

    def _loaded(self, batch: SampledData) -> SampledData | Sent:
        is_there = device_of_batch(batch) == self.device
        return self.send(batch) if is_there else batch.apply(self.pool.copied)

    def bring(self, batch: SampledData) -> SampledData:
        """Bring a batch to the device, of which some arrays may be there; the host does not wait for it."""
        return self.receive(self.load([batch]))

    def send(self, batch: SampledData | Sent) -> Sent:
        """Begin the copy of a batch; the host does not wait for it."""
        if isinstance(batch, Sent):
            return batch
        with self.open():
            source = None if device_of_batch(batch) == self.device else copy.copy(batch)
            sent = Sent(batch.to(self.device, non_blocking=True), self._stream.record_event())
        if source is not None:
            self.pool.hold(source, sent.event)
        return sent

    def receive(self, bulk: InFlight) -> SampledData:
        """Take the first batch. Work that this thread launches from here on waits until it is complete."""
        sent = self.send(bulk.popleft())
        if bulk:
            bulk[0] = self.send(bulk[0])
        current = torch.cuda.current_stream(self.device)
        current.wait_event(sent.event)
        sent.batch.record_stream(current)  # otherwise its memory could be reused while this stream reads it
        return sent.batch
