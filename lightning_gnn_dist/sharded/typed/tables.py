"""The arrays of one node type, or edge type, of which each rank has the rows of its shard."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from lightning_gnn_dist.batches.ahead.row_cache import RowCache, Rows
from lightning_gnn_dist.batches.pool import gather_joined
from lightning_gnn_dist.sharded.remote_graph import Found, Sought, sought_among


class Table:
    """Rows by their ids in the type: own ones, those in a cache, and those that are fetched.

    Args:
        own: The own rows of every array, by name.
        first: The id of the first own one.
        num_own: How many there are.
        cache: Holds rows of other ranks, and fetches them.
    """

    def __init__(self, own: Rows, first: int, num_own: int, cache: RowCache) -> None:
        self.own, self.cache = own, cache
        self._first, self._num_own = first, num_own

    def seek(self, ids: Tensor) -> Sought:
        """Return what is to be known of some rows before they are fetched. Nobody is asked."""
        return sought_among(ids, self._first, self._num_own)

    def find(self, wanted: Sought, coming: Sequence[Tensor] = ()) -> Found:
        """Fetch the rows that others own, each once; ``coming`` are the ``distinct`` of what will be sought next."""
        at, fetched = self.cache.look_up(wanted.distinct, coming)
        wanted.places[wanted.is_other] = self._num_own + at[wanted.inverse]
        return Found(wanted.places, self.own, self.cache.rows, fetched)

    def take(self, ids: Tensor) -> Rows:
        """Return the rows of all arrays for some ids, in their order, past the cache."""
        wanted = self.seek(ids)
        wanted.places[wanted.is_other] = self._num_own + wanted.inverse
        fetched = self.cache.fetch(wanted.distinct)
        return {name: gather_joined(own, own[:0], fetched[name], wanted.places) for name, own in self.own.items()}


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
