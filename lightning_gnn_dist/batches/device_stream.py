"""Copies batches to a CUDA device while it trains.

    gathered into page-locked memory -> copied on a stream of its own -> the training stream waits for that copy alone

A plain ``batch.to("cuda")`` makes the host wait until the device has finished all its earlier work.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, TypeAlias

import torch
from lightning.pytorch import Trainer

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
        self.device = device
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


def handed_out(make: Callable[[], Iterable[SampledData]], stream: DeviceStream | None) -> Iterator[SampledData]:
    """Call ``make`` now, on the stream if there is one, and return an iterator over its batches.

    Iterating waits for the device, so the thread that trains must do it. A batch is not held once it was taken.
    """
    if stream is None:
        made = deque(make())
        return (made.popleft() for _ in range(len(made)))
    with stream.open():
        bulk = stream.load(make())
    return (stream.receive(bulk) for _ in range(len(bulk)))


def device_of(trainer: Trainer | None) -> torch.device:
    """The device that trains; the CPU without a trainer."""
    return trainer.strategy.root_device if trainer is not None else torch.device("cpu")


def stream_to(device: torch.device) -> DeviceStream | None:
    """A stream that brings batches to a CUDA device; None for another device, which needs none."""
    if device.type != "cuda":
        return None
    return DeviceStream(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))


class Crossing:
    """Counts what crosses the bus between RAM and a device, and how many rows need not. Threads share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.num_bytes, self.asked, self.hits = 0, 0, 0

    def __reduce__(self) -> Any:  # a copy counts for itself, as in a process that Lightning spawns
        return Crossing, ()

    def add(self, num_bytes: int, asked: int = 0, hits: int = 0) -> None:
        """Count bytes, and rows that batches needed, some of which were on the device."""
        with self._lock:
            self.num_bytes, self.asked, self.hits = self.num_bytes + num_bytes, self.asked + asked, self.hits + hits

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log."""
        figures = {"data/bus_bytes": float(self.num_bytes)} if self.num_bytes else {}
        if not self.asked:
            return figures
        hits = {"data/cache_hits": float(self.hits), "data/cache_hit_rate": self.hits / self.asked}
        return figures | {"data/cache_asked": float(self.asked)} | hits
