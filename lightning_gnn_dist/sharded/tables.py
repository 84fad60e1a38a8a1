"""Rows of arrays of which each rank has those of its shard: own ones, those in a cache, and those that are fetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from lightning_gnn_dist.batches.ahead.row_cache import RowCache, Rows
from lightning_gnn_dist.batches.pool import gather_joined
from lightning_gnn_dist.sampling.turns import Steps


class Sought(NamedTuple):
    """Rows of the whole graph that are needed.

    Attributes:
        places: The places of the own ones among the own rows.
        is_other: Which of them others own.
        distinct: The ids of those, each once, increasing.
        inverse: Where each of those stands in ``distinct``.
    """

    places: Tensor
    is_other: Tensor
    distinct: Tensor
    inverse: Tensor


class Found(NamedTuple):
    """Where rows of the whole graph are: below each other, the own rows, those held in the cache, and those fetched.

    Attributes:
        places: The place of each row.
        own: The own rows of every array, by name.
        held: The rows in the cache.
        fetched: The rows that were fetched.
    """

    places: Tensor
    own: dict[str, Tensor]
    held: dict[str, Tensor]
    fetched: dict[str, Tensor]


class Table:
    """Rows by their ids in the type: own ones, those in a cache, and those that are fetched.

    Args:
        own: The own rows of every array, by name.
        first: The id of the first own one.
        num_own: How many there are.
        cache: Holds rows of other ranks.
        fetch: Asks other ranks for the rows of every array for some increasing ids.
    """

    def __init__(
        self, own: Rows, first: int, num_own: int, cache: RowCache, fetch: Callable[[Tensor], Steps[Rows]]
    ) -> None:
        self.own, self.cache, self.fetch = own, cache, fetch
        self._first, self._num_own = first, num_own

    def seek(self, ids: Tensor) -> Sought:
        """Return what is to be known of some rows before they are fetched. Nobody is asked."""
        return sought_among(ids, self._first, self._num_own)

    def find(self, wanted: Sought, coming: Sequence[Tensor] = ()) -> Steps[Found]:
        """Fetch the rows that others own, each once; ``coming`` are the ``distinct`` of what will be sought next."""
        at, missing = self.cache.look_up(wanted.distinct, coming)
        fetched = yield from self.fetch(missing)
        self.cache.offer(missing, fetched)
        wanted.places[wanted.is_other] = self._num_own + at[wanted.inverse]
        return Found(wanted.places, self.own, self.cache.rows, fetched)

    def take(self, ids: Tensor) -> Steps[Rows]:
        """Return the rows of all arrays for some ids, in their order, past the cache."""
        wanted = self.seek(ids)
        wanted.places[wanted.is_other] = self._num_own + wanted.inverse
        fetched = yield from self.fetch(wanted.distinct)
        return {name: gather_joined(own, own[:0], fetched[name], wanted.places) for name, own in self.own.items()}


class Caches:
    """The caches of all node types, as one."""

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


def sought_among(ids: Tensor, first: int, num_own: int) -> Sought:
    """Return what is to be known of rows, of which so many are own ones, from an id on, before they are fetched."""
    places = ids - first
    is_other = (places < 0) | (places >= num_own)
    return Sought(places, is_other, *ids[is_other].unique(return_inverse=True))
