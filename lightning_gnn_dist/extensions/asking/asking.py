"""Questions from rank to rank, on sockets of their own: a rank answers at any time, whatever its training does.

    asker: a question to each owner -> their answers
    owner: a thread for each asker: read a question, answer it, read the next

Exchanges of all ranks would have to pair, in the same order on each. Questions pair with nothing: ranks may ask in the
background, unequally often, and stop at any time. No rank can wait for one that waits for it: each answers in threads
that wait for their asker alone, and asks each other rank one thing at a time.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import struct
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Lock, Thread
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.addresses import HERE, family_of, keeps_on_host, of_interface, towards
from lightning_gnn_dist.wire.channel import Channel, LostRankError, patience
from lightning_gnn_dist.wire.collectives import counted, octets

Message: TypeAlias = list[Tensor]
Answer = Callable[[int, Message], Message]
Take = Callable[[int], Tensor]
Result = TypeVar("Result")

THREAD_NAME = "lightning_gnn_dist.extensions.asking.asking"
DONE, FAILED = 0, 1  # how an answer begins
SECONDS_FOR_HELLO = 10.0  # of a process that connects here, before it is taken for a stranger
SMALL_BYTES = 1 << 16  # what is smaller is sent in one piece
LARGE_BYTES = 1 << 20  # tensors of this size get memory that is lent
_ADDRESS_BYTES = 48  # an IPv6 address with its zone fits
_TOKEN_BYTES = 16
_DTYPES: list[torch.dtype] = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
]


class Asking:
    """Connections between the ranks of a channel. Making one is collective; asking is not.

    Args:
        channel: The ranks.
        answer: Answers a question, given its kind and its tensors. It may be called by several threads at once, and
            must ask nothing itself.
        take: Lends memory for large tensors that are received: so many bytes. Default: new memory.
    """

    def __init__(self, channel: Channel, answer: Answer, take: Take | None = None) -> None:
        self.rank, self.size = channel.rank, channel.size
        self._first, self._take = collectives.rank() - channel.rank, take or _new
        self._lock, self._error = Lock(), ""
        self._threads: list[Thread] = []
        self._asked: dict[int, socket.socket] = {}
        self._is_open = True
        self._seconds = patience().total_seconds() if self.size > 1 else 0.0
        if self.size == 1:
            return
        self._asked, askers = _connect(channel, self._seconds)
        ends = [*self._asked.values(), *askers.values()]
        self._end = weakref.finalize(self, _end, ends)  # also when the interpreter ends
        for rank, end in askers.items():
            name = f"{THREAD_NAME} of {rank}"
            self._threads.append(Thread(target=_serve, args=(end, answer), name=name, daemon=True))
            self._threads[-1].start()

    def ask(
        self, kind: int, questions: Sequence[Message | None], meanwhile: Callable[[], Result]
    ) -> tuple[list[Message | None], Result]:
        """Ask a question of each other rank for which there is one; return their answers, by rank.

        Args:
            kind: What all questions ask for.
            questions: The question for each rank, or None.
            meanwhile: What is done while the others work on their answers; its result is returned, too.
        """
        asked = [rank for rank in range(self.size) if rank != self.rank and questions[rank] is not None]
        with self._lock:
            self._check()
            self._error = "An earlier question to other ranks was not ended."  # until all answers are read
            for rank in asked:
                self._with(rank, lambda end, rank=rank: _send(end, kind, questions[rank] or []))  # type: ignore[misc]
            result = meanwhile()
            said = {rank: self._with(rank, lambda end: _receive(end, self._take)) for rank in asked}
            self._error = ""
        for rank, (outcome, answer) in said.items():
            if outcome == FAILED:
                text = answer[0].numpy().tobytes().decode(errors="replace")
                raise RuntimeError(f"Rank {self._first + rank} cannot answer rank {self._first + self.rank}: {text}")
        return [said[rank][1] if rank in said else None for rank in range(self.size)], result

    def abort(self) -> None:
        """End all connections at once: who waits for an answer gets an error, here and on the other ranks."""
        self._is_open = False
        if self._asked:
            self._end()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def close(self) -> None:
        """Ask nothing more, and answer until the other ranks have closed theirs, too, or have ended."""
        with self._lock:
            self._is_open = False
            for end in self._asked.values():
                with suppress(OSError):  # the rank has ended
                    end.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + self._seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.abort()

    def _check(self) -> None:
        if self._error or not self._is_open:
            raise LostRankError(self._error or "The connections to other ranks were closed.")

    def _with(self, rank: int, do: Callable[[socket.socket], Result]) -> Result:
        """Do something with the connection to a rank; name the rank if it is gone."""
        try:
            return do(self._asked[rank])
        except (OSError, EOFError) as error:
            late = isinstance(error, TimeoutError)
            how = f"did not answer within {self._seconds:g} s" if late else "did not answer: it has ended"
            closed = "The connections to other ranks were closed." if not self._is_open else ""
            self._error = closed or f"Rank {self._first + rank} {how}. See what was said there. ({error})"
            raise LostRankError(self._error) from error


def _serve(end: socket.socket, answer: Answer) -> None:
    """Answer one asker until it has no more questions."""
    with suppress(OSError, EOFError):  # the asker is gone: its own error tells why
        while True:
            kind, question = _receive(end)
            try:
                outcome, said = DONE, answer(kind, question)
            except Exception as error:  # it is raised where the answer is waited for
                text = bytearray(f"{type(error).__name__}: {error}", "utf-8")
                outcome, said = FAILED, [torch.frombuffer(text, dtype=torch.uint8)]
            _send(end, outcome, said)


def _end(ends: list[socket.socket]) -> None:
    for end in ends:
        with suppress(OSError):  # it has ended already
            end.shutdown(socket.SHUT_RDWR)
        end.close()


# Messages.


def _send(end: socket.socket, kind: int, tensors: Message) -> None:
    """A message: the length of its header; the header, of kind, types and shapes; the numbers of each tensor."""
    shapes = [number for t in tensors for number in (_DTYPES.index(t.dtype), t.dim(), *t.shape)]
    header = [kind, len(tensors), *shapes]
    contents = [octets(tensor) for tensor in tensors]
    start = struct.pack(f"<q{len(header)}q", len(header), *header)
    with counted(len(start) + sum(map(len, contents)), waits=False):
        if sum(map(len, contents)) < SMALL_BYTES:
            end.sendall(start + b"".join(content.numpy().tobytes() for content in contents))
            return
        end.sendall(start)
        for content in contents:
            end.sendall(content.numpy().data)


def _new(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _receive(end: socket.socket, take: Take = _new) -> tuple[int, Message]:
    (size,) = struct.unpack("<q", _read(end, 8).numpy().tobytes())
    kind, count, *shapes = struct.unpack(f"<{size}q", _read(end, 8 * size).numpy().tobytes())
    message: Message = []
    for _ in range(count):
        (dtype, dim), shapes = shapes[:2], shapes[2:]
        shape, shapes = shapes[:dim], shapes[dim:]
        width, rows = _DTYPES[dtype].itemsize, torch.Size(shape)
        num_bytes = width * rows.numel()
        content = _read(end, num_bytes, take if num_bytes >= LARGE_BYTES else _new)
        message.append(content.view(_DTYPES[dtype]).view(rows))
    return kind, message


def _read(end: socket.socket, num_bytes: int, take: Take = _new) -> Tensor:
    out = take(num_bytes)
    view = out.numpy().data
    while len(view):
        count = end.recv_into(view)
        if not count:
            raise EOFError("The connection has ended.")
        view = view[count:]
    return out


# Connections.


def _connect(channel: Channel, seconds: float) -> tuple[dict[int, socket.socket], dict[int, socket.socket]]:
    """Connect with every other rank twice: to ask it, and to be asked. Nobody else can join. Collective."""
    address, token = _address(channel), secrets.token_bytes(_TOKEN_BYTES)
    with socket.create_server((address, 0), family=family_of(address), backlog=channel.size + 16) as listener:
        place = address.encode().ljust(_ADDRESS_BYTES) + struct.pack("<q", listener.getsockname()[1]) + token
        places = _said_by_all(channel, place)
        others = [rank for rank in range(channel.size) if rank != channel.rank]
        asked = {rank: _call(places[rank], channel.rank, seconds) for rank in others}
        askers: dict[int, socket.socket] = {}
        listener.settimeout(seconds)
        while len(askers) < len(others):
            end, _ = listener.accept()
            rank = _greeted(end, token)
            if rank in others and rank not in askers:
                askers[rank] = end
            else:
                end.close()
    return asked, askers


def _address(channel: Channel) -> str:
    """Return this rank's address: that of the interface that the user names, or that on the way to rank 0. Collective.

    Rank 0 may know itself by an address that nobody else can reach: it then takes the one that leads to another rank.
    """
    own = HERE if keeps_on_host() else of_interface() or towards(os.environ.get("MASTER_ADDR", HERE))
    known = [said.decode().strip() for said in _said_by_all(channel, own.encode().ljust(_ADDRESS_BYTES))]
    outside = [address for address in known if not ipaddress.ip_address(address.partition("%")[0]).is_loopback]
    return towards(outside[0]) if outside and own not in outside else own


def _said_by_all(channel: Channel, own: bytes) -> list[bytes]:
    """Return the bytes of each rank, which are equally many. Collective."""
    row = torch.frombuffer(bytearray(own), dtype=torch.uint8)
    return [each.numpy().tobytes() for each in channel.exchange_equal(row.expand(channel.size, -1))]


def _call(place: bytes, rank: int, seconds: float) -> socket.socket:
    address, rest = place[:_ADDRESS_BYTES].decode().strip(), place[_ADDRESS_BYTES:]
    end = socket.create_connection((address, struct.unpack("<q", rest[:8])[0]), seconds)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.sendall(rest[8:] + struct.pack("<q", rank))
    return end


def _greeted(end: socket.socket, token: bytes) -> int:
    """Return the rank that has connected here, or -1 if it is none of this run."""
    end.settimeout(SECONDS_FOR_HELLO)
    with suppress(OSError, EOFError):
        hello = _read(end, _TOKEN_BYTES + 8).numpy().tobytes()
        if secrets.compare_digest(hello[:_TOKEN_BYTES], token):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return int(struct.unpack("<q", hello[_TOKEN_BYTES:])[0])
    return -1
