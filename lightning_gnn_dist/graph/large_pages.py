"""Move a graph's arrays into large pages of memory, where the system offers them.

Rows are read at random, so with ordinary pages of 4 kB most reads have to look up their page first. Linux can merge
pages that are in RAM into pages of 2 MB, 512 times fewer. It copies them, so this is done one piece at a time.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from collections import deque

from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import of_all_graphs, remembered
from lightning_gnn_dist.graph.storage.mapped import Map, all_maps, libc, maps_under

log = logging.getLogger(__name__)

PAGE_BYTES = 1 << 21
PIECE_BYTES = 1 << 25  # takes about 10 ms
COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1
BUSY = (errno.EAGAIN, errno.EBUSY)  # this piece cannot be merged now; others may

_PIECES = "pieces that are not in large pages yet"


def enlarge_pages(graph: Graph) -> int:
    """Put the next piece of the graph's arrays into large pages. Returns how many pieces are left.

    Only arrays in this process's own RAM are moved: the system keeps the pages of mapped files, and memory that
    processes share after a fork would be copied.
    """
    pieces = remembered(graph, _PIECES, lambda: deque(_pieces(graph)))
    try:
        piece = pieces.popleft()
    except IndexError:
        return 0
    if libc().madvise(piece.start, len(piece), COLLAPSE) and ctypes.get_errno() not in BUSY:
        log.debug("The system gives no more large pages: %s.", errno.errorcode.get(ctypes.get_errno()))
        pieces.clear()
    return len(pieces)


def _forget() -> None:
    for pieces in of_all_graphs(_PIECES):
        pieces.clear()


if hasattr(os, "register_at_fork"):  # the child shares the pieces that are left, so they stay where they are
    os.register_at_fork(before=_forget)


def _pieces(graph: Graph) -> list[range]:
    """The pieces of all arrays as ranges of addresses, those of the edges first."""
    large = [(tensor, pages) for tensor in graph.arrays.values() if (pages := _whole_pages(tensor))]
    maps = all_maps() if large else []
    own = [pages for tensor, pages in large if _is_own(maps_under(tensor, maps))]
    return [pages[i : i + PIECE_BYTES] for pages in own for i in range(0, len(pages), PIECE_BYTES)]


def _whole_pages(array: Tensor) -> range:
    if array.device.type != "cpu" or not array.is_contiguous():
        return range(0)
    start, end = array.data_ptr(), array.data_ptr() + array.nbytes
    return range(-(-start // PAGE_BYTES) * PAGE_BYTES, end // PAGE_BYTES * PAGE_BYTES)


def _is_own(maps: list[Map]) -> bool:
    shared = sum(found.sizes["Shared_Clean"] + found.sizes["Shared_Dirty"] for found in maps)
    return bool(maps) and shared == 0 and all(found.name in ("", "[heap]") for found in maps)
