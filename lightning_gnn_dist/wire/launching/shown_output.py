"""What ranks print, shown where this process has put something in the place of stdout or stderr, as a notebook does."""

from __future__ import annotations

import codecs
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import IO

_SECONDS_TO_SHOW = 2.0


@contextmanager
def shown_here() -> Iterator[dict[int, Connection]]:
    """Yield a pipe for each of stdout and stderr that something has replaced here, as a notebook does."""
    pipes, threads = {}, []
    for number, stream, original in ((1, sys.stdout, sys.__stdout__), (2, sys.stderr, sys.__stderr__)):
        if stream is not None and stream is not original:
            reader, pipes[number] = multiprocessing.Pipe(duplex=False)
            threads.append(threading.Thread(target=_show, args=(reader, stream), daemon=True))
            threads[-1].start()
    try:
        yield pipes
    finally:
        for writer in pipes.values():
            writer.close()
        for thread in threads:
            thread.join(_SECONDS_TO_SHOW)  # a process that a rank has started may hold the other end


def _show(reader: Connection, stream: IO[str]) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with reader:
        while octets := os.read(reader.fileno(), 1 << 16):
            with suppress(ValueError, OSError):  # a closed stream, but ranks must not wait for a full pipe
                stream.write(decoder.decode(octets))
                stream.flush()
