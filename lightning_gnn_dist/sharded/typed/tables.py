"""The caches of a typed graph, one for each node type, as one."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gnn_dist.batches.ahead.row_cache import RowCache


class Caches:
    """The caches of all node types, in figures."""

    def __init__(self, caches: Sequence[RowCache]) -> None:
        self._caches = caches

    @property
    def num_rows(self) -> int:
        return sum(cache.num_rows for cache in self._caches)

    @property
    def num_bytes(self) -> int:
        """Bytes of the rows that they may hold."""
        return sum(cache.num_bytes for cache in self._caches)

    @property
    def asked(self) -> int:
        return sum(cache.asked for cache in self._caches)

    @property
    def hits(self) -> int:
        return sum(cache.hits for cache in self._caches)

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the rows that were looked up and not held."""
        return sum(cache.fetched_bytes for cache in self._caches)
