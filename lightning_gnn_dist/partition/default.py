"""What cuts a graph where no partitioner was named: what cuts fewest edges, of those that its size and memory allow."""

from __future__ import annotations

import logging
import os
from functools import cache

from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.partition import kaminpar, metis
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.kaminpar import WAY_TO_KAMINPAR, KaMinParPartitioner
from lightning_gnn_dist.partition.metis import WAY_TO_METIS, MetisPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner

MOST_EDGES = 20_000_000  # for METIS, where KaMinPar is installed, which cuts as few in half the time
_log = logging.getLogger(__name__)


def default_partitioner(num_edges: int, memory: int, *, look_alike: bool = False, is_told: bool = True) -> Partitioner:
    """METIS or, where that is not installed, or the graph is too large for it, KaMinPar or streaming.

    Args:
        num_edges: The stored edges of the graph.
        memory: Bytes of a host, of which half may be taken.
        look_alike: Whether parts are to look alike rather than to cut few edges: small clusters are dealt at random.
        is_told: Whether the log says why, if it is not METIS.
    """
    of_metis, of_kaminpar = num_edges * metis.BYTES_PER_EDGE, num_edges * kaminpar.BYTES_PER_EDGE
    fits, other_fits = of_metis <= memory // 2, kaminpar.is_available() and of_kaminpar <= memory // 2
    if metis.is_available() and fits and not (other_fits and num_edges > MOST_EDGES):
        return SuperNodePartitioner() if look_alike else MetisPartitioner()
    instead: Partitioner = KaMinParPartitioner() if other_fits else StreamingPartitioner()
    if is_told and os.environ.get("LOCAL_RANK", "0") == "0":
        _tell(_why_not_metis(of_metis, num_edges), repr(instead), is_streaming=not other_fits)
    return SuperNodePartitioner(clusters=instead) if look_alike else instead


def _why_not_metis(num_bytes: int, num_edges: int) -> str:
    if metis.is_available():
        return f"METIS would take about {in_bytes(num_bytes)} and long for {num_edges:,} edges"
    return f"METIS is not installed: {WAY_TO_METIS}"


@cache  # so that it is said once
def _tell(why: str, instead: str, *, is_streaming: bool) -> None:
    more, hint = ", and more edges of them" if is_streaming else "", ""
    if is_streaming and not kaminpar.is_available():
        hint = f" {WAY_TO_KAMINPAR} has one that cuts fewer."
    _log.warning("%s. %s cuts graphs%s.%s", why, instead, more, hint)
