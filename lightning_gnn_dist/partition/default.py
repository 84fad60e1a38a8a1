"""What cuts a graph where no partitioner was named: METIS where it is installed and memory allows, or streaming."""

from __future__ import annotations

import logging
import os
from functools import cache

from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.partition import metis
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.metis import WAY_TO_METIS, MetisPartitioner
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner

_log = logging.getLogger(__name__)


def default_partitioner(num_edges: int, memory: int, *, look_alike: bool = False, is_told: bool = True) -> Partitioner:
    """METIS or, where that is not installed, or the graph is too large for it, streaming.

    Args:
        num_edges: The stored edges of the graph.
        memory: Bytes of a host, of which half may be taken.
        look_alike: Whether parts are to look alike rather than to cut few edges: small clusters are dealt at random.
        is_told: Whether the log says why, if it is not METIS.
    """
    of_metis = num_edges * metis.BYTES_PER_EDGE
    if metis.is_available() and of_metis <= memory // 2:
        return SuperNodePartitioner() if look_alike else MetisPartitioner()
    if is_told and os.environ.get("LOCAL_RANK", "0") == "0":
        if metis.is_available():
            _tell(f"METIS would take about {in_bytes(of_metis)} for {num_edges:,} edges")
        else:
            _tell(f"METIS is not installed: {WAY_TO_METIS}")
    streaming = StreamingPartitioner()
    return SuperNodePartitioner(clusters=streaming) if look_alike else streaming


@cache  # so that it is said once
def _tell(why: str) -> None:
    _log.warning("%s. StreamingPartitioner() takes its place, and cuts more edges.", why)
