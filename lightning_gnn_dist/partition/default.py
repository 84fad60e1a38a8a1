"""What cuts a graph where no partitioner was named."""

from __future__ import annotations

import logging
import os
from functools import cache

from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.metis import WAY_TO_METIS, MetisPartitioner, is_available
from lightning_gnn_dist.partition.streaming import StreamingPartitioner
from lightning_gnn_dist.partition.supernode import SuperNodePartitioner

_log = logging.getLogger(__name__)


def default_partitioner(*, look_alike: bool = False) -> Partitioner:
    """METIS or, where it is not installed, the one of the others that cuts fewest edges.

    Args:
        look_alike: Whether parts are to look alike rather than to cut few edges: small clusters are dealt at random.
    """
    if not is_available():
        return SuperNodePartitioner(clusters=_without_metis()) if look_alike else _without_metis()
    return SuperNodePartitioner() if look_alike else MetisPartitioner()


@cache  # so that it is said once
def _without_metis() -> Partitioner:
    instead = StreamingPartitioner()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _log.warning("METIS is not installed: %r cuts graphs, and more edges of them. %s.", instead, WAY_TO_METIS)
    return instead
