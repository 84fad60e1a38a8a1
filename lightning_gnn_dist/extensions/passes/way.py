"""The way of batches and rows between RAM and the device that computes.

    gathered into page-locked memory -> copied beside the computing -> computed -> copied back beside the next batch

The host launches one batch after the other and waits for none of them, until what is under way takes too many bytes.
Where a CPU computes, nothing is under way: every step is done when it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import bytes_of, in_type
from lightning_gnn_dist.batches.source import stream_to
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.layers.layer_pass import Way

What = TypeVar("What")
Arrived = tuple[Tensor, Tensor]  # nodes, or places, and their rows in RAM


class _Launched(NamedTuple, Generic[What]):
    what: What
    num_bytes: int
    event: torch.cuda.Event


class UnderWay(Generic[What]):
    """What the host has launched on a device and has not waited for, the oldest first.

    Args:
        most_bytes: Bytes from which on the host waits for the oldest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._launched = deque[_Launched[What]]()

    def add(self, what: What, num_bytes: int, event: torch.cuda.Event) -> None:
        """Note what has been launched before the event."""
        self._launched.append(_Launched(what, num_bytes, event))
        self._bytes += num_bytes

    def done(self) -> Iterator[What]:
        """Yield what is done; wait as long as the rest takes too many bytes."""
        while self._launched:
            if not self._launched[0].event.query():
                if self._bytes <= self._most_bytes:
                    return
                self._launched[0].event.synchronize()
            yield self._taken()

    def rest(self) -> Iterator[What]:
        """Wait for all, once, and yield it."""
        if self._launched:
            self._launched[-1].event.synchronize()
        while self._launched:
            yield self._taken()

    def _taken(self) -> What:
        what, num_bytes, _ = self._launched.popleft()
        self._bytes -= num_bytes
        return what


class WayAndBack(Way):
    """Brings batches and rows to the device that computes while it computes, and rows back.

    Args:
        device: The device.
        dtype: The type of the model's numbers, if batches are brought to it.
        most_bytes: Bytes that may be under way in each direction before the host waits.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None, most_bytes: int = 0) -> None:
        super().__init__(device, dtype)
        self._most_bytes, self._stream = most_bytes, stream_to(device)
        self._sent = UnderWay[None](most_bytes)
        self.pool = None if self._stream is None else self._stream.pool

    def batch(self, batch: Any) -> Any:
        return super().batch(batch) if self._stream is None else self._stream.bring(in_type(batch, self._dtype))

    def launched(self, batch: Any) -> None:
        """Note that all work on a batch is launched: its memory is free when that is done."""
        if self._stream is not None:
            self._sent.add(None, bytes_of(batch), torch.cuda.current_stream(self.device).record_event())
            deque(self._sent.done(), maxlen=0)

    def there(self, rows: Tensor) -> Tensor:
        return sent(rows, self.device)

    def back(self) -> WayBack:
        """Return what brings rows back to RAM."""
        return WayBack(self._most_bytes)


@cache
def _stream_back(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class WayBack:
    """Brings rows back to RAM, in the order in which they were computed.

    Args:
        most_bytes: Bytes that may be under way before the host waits.
    """

    def __init__(self, most_bytes: int) -> None:
        self._under_way = UnderWay[Arrived](most_bytes)

    def send(self, nodes: Tensor, rows: Tensor) -> Iterator[Arrived]:
        """Begin to bring rows back; yield nodes and rows that are in RAM by now."""
        if not rows.is_cuda:
            yield nodes, rows.cpu()
            return
        current, beside = torch.cuda.current_stream(rows.device), _stream_back(rows.device)
        beside.wait_event(current.record_event())
        rows.record_stream(beside)  # otherwise its memory could be reused before it is copied
        with torch.cuda.stream(beside):
            found = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            found.copy_(rows, non_blocking=True)
            self._under_way.add((nodes, found), rows.nbytes, beside.record_event())
        yield from self._under_way.done()

    def rest(self) -> Iterator[Arrived]:
        """Wait for what is still under way, and yield it."""
        return self._under_way.rest()
