"""Batches whose rows lie elsewhere, on other ranks or in files: bulks are drawn some way ahead of their rows.

seeds of the coming bulks -> what they draw -> the rows of the first of them, those that others need again are kept
samples of a bulk -> the rows that they need, each once -> one request for all types -> batches with their arrays

Where other ranks are asked, an exchange asks for the rows of a bulk, the last hop of the next one, the hop before of
the one after, and so on: a bulk goes through an exchange for each hop and one for its rows, and takes one on average.

A cache holds rows by Belady's rule: those that are needed last go first.

    next use of a row = the first of the coming bulks that has it      (draws are keyed: they are known ahead)

L. A. Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 1966. Rows that no
known bulk needs are kept by how many edges come from them. Rows of all types share the same bytes.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count, takewhile
from math import prod
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import LABELS, PoolOf, SampledData, bytes_of, store_of_seeds
from lightning_gnn_dist.batches.pool import ROWS_AHEAD, Pool, Widen, bits_of, check_rows, gather_rows, room_for
from lightning_gnn_dist.batches.source import (
    BatchSource,
    BulkSeeds,
    Content,
    Inputs,
    MadeBulk,
    Stream,
    Taken,
    handed_out,
    made_of,
)
from lightning_gnn_dist.engine.apart import by_types
from lightning_gnn_dist.engine.compiling import compiled
from lightning_gnn_dist.engine.intrinsics import LINE, copy_bytes, prefetch
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.engine.sample import Apart, BatchKey, Sample, of_one_type
from lightning_gnn_dist.extensions.asking.turns import Inquiry, Steps, take_turn, together
from lightning_gnn_dist.graph.rows import bytes_per_row
from lightning_gnn_dist.graph.storage.mapped import DO_NOT_NEED, libc
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames
from lightning_gnn_dist.homes.settings import Loading

Arrays = dict[str, Tensor]
_MOST = (1 << 32) - 1  # edges that are counted


class RowCache:
    """Holds rows of some nodes of a type. It changes what is sent, never what is computed.

    Args:
        arrays: Arrays with rows like those to hold, by name.
        num_rows: How many rows it may hold at most. Their memory is taken as they come.
        count: Returns how likely each of some ids is to be needed at all, such as how many edges come from it.

    Attributes:
        rows: What is held, by slot: the first ones are filled.
        asked: How many rows were looked up.
        hits: How many of these were held.
    """

    def __init__(self, arrays: Arrays, num_rows: int, count: Callable[[Tensor], Tensor] = torch.zeros_like) -> None:
        self.num_rows, self._count = num_rows, count
        self.rows = {name: array.new_empty((num_rows, *array.shape[1:])) for name, array in arrays.items()}
        nothing = torch.empty(0, dtype=torch.int64)
        self._ids, self._slots, self._counts = nothing, nothing, nothing
        self._last: tuple[Tensor, Tensor, Arrays] = nothing, nothing, {}
        self.bytes_per_row, self.asked, self.hits = bytes_per_row(arrays), 0, 0

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the rows that were looked up and not held."""
        return self.bytes_per_row * (self.asked - self.hits)

    def look_up(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the rows of some ids are, and which are to be fetched: these stand below the held ones.

        What is held stays as it is until :meth:`Caches.settle` is called. Before it, :meth:`offer` is given what was
        fetched.

        Args:
            ids: Distinct ids, increasing.
        """
        if not self.num_rows:
            self.asked += len(ids)
            return torch.arange(len(ids)), ids
        places = places_of(ids, self._ids)
        is_held = places >= 0
        places[is_held] = self._slots[places[is_held]]
        rest = ids[~is_held]
        places[~is_held] = torch.arange(len(rest)) + self.num_rows
        self.asked, self.hits = self.asked + len(ids), self.hits + len(ids) - len(rest)
        return places, rest

    def offer(self, ids: Tensor, rows: Arrays) -> None:
        """Take what was fetched, by name: :meth:`Caches.settle` chooses what is held of it."""
        if self.num_rows:
            self._last = ids, self._count(ids), rows

    def haste(self, coming: Sequence[Tensor]) -> Tensor:
        """Return how soon each row is needed that is held, and that was fetched last: the sooner the more."""
        fetched, new, _ = self._last
        counts = torch.cat([self._counts, new])
        uses = torch.full_like(counts, len(coming))
        for number in range(len(coming) - 1, -1, -1):
            for ids, of in zip((self._ids, fetched), uses.split([len(self._ids), len(fetched)]), strict=True):
                places = places_of(coming[number], ids)
                of[places[places >= 0]] = number
        return counts.clamp(max=_MOST) - uses * (_MOST + 1)

    def keep(self, is_kept: Tensor) -> None:
        """Hold those rows alone, of what is held and was fetched last, that are marked."""
        fetched, counts, rows = self._last
        old, new = is_kept.split([len(self._ids), len(fetched)])
        slots, admitted, before = self._slots[old], new.nonzero().view(-1), len(self._ids)
        num_held = len(slots) + len(admitted)
        is_free, is_beyond = torch.ones(num_held, dtype=torch.bool), slots >= num_held
        is_free[slots[~is_beyond]] = False
        nearer, taken = is_free.nonzero().view(-1).split([int(is_beyond.sum()), len(admitted)])
        with torch.inference_mode():  # as tables may be of an evaluation, and another thread writes to them
            for name, table in self.rows.items():
                table[nearer] = table[slots[is_beyond]]
                if rows:
                    table[taken] = rows[name][admitted]
                let_go_of_memory(table[num_held:before])
        slots[is_beyond] = nearer
        order = merge_order(self._ids[old], fetched[new])
        self._ids = torch.cat([self._ids[old], fetched[new]])[order]
        self._counts = torch.cat([self._counts[old], counts[new]])[order]
        self._slots = torch.cat([slots, taken])[order]
        self._last = fetched[:0], counts[:0], {}


class Caches:
    """The caches of all node types, whose rows share so many bytes: those that are needed soonest stay.

    Args:
        caches: One for each type.
        num_bytes: What all rows may take; a row without arrays counts as a byte.
    """

    def __init__(self, caches: Sequence[RowCache], num_bytes: int) -> None:
        self._caches, self.num_bytes = caches, num_bytes

    @property
    def has_room(self) -> bool:
        return any(cache.num_rows for cache in self._caches)

    @property
    def asked(self) -> int:
        return sum(cache.asked for cache in self._caches)

    @property
    def hits(self) -> int:
        return sum(cache.hits for cache in self._caches)

    @property
    def fetched_bytes(self) -> int:
        """Bytes of the rows that were looked up and not held."""
        return sum(cache.fetched_bytes for cache in self._caches)

    def settle(self, coming: Sequence[Sequence[Tensor]]) -> None:
        """Choose what to hold, of what is held and was fetched last, now that the next uses of both are known.

        Args:
            coming: For each type the ids that the next bulk looks up, and those after it, as far as they are known.
        """
        if not self.has_room:
            return
        hastes = [cache.haste(ids) for cache, ids in zip(self._caches, coming, strict=True)]
        lengths, haste = list(map(len, hastes)), torch.cat(hastes)
        sizes = torch.tensor([max(1, cache.bytes_per_row) for cache in self._caches])
        is_kept = torch.ones_like(haste, dtype=torch.bool)
        is_kept[_needed_last(haste, sizes.repeat_interleave(torch.tensor(lengths)), self.num_bytes)] = False
        for cache, of_type in zip(self._caches, is_kept.split(lengths), strict=True):
            cache.keep(of_type)


def _needed_last(haste: Tensor, sizes: Tensor, num_bytes: int) -> Tensor:
    """Return the places of those rows for which so many bytes have no room; each row has a size."""
    surplus = int(sizes.sum()) - num_bytes
    if surplus <= 0:
        return torch.empty(0, dtype=torch.int64)
    most = min(-(-surplus // int(sizes.min())), len(haste))
    last = torch.from_numpy(np.argpartition(haste.numpy(), min(most, len(haste) - 1))[:most])
    last = last[haste[last].argsort(stable=True)]
    freed = sizes[last].cumsum(0)
    return last[: int(torch.searchsorted(freed, surplus)) + 1]


def places_of(ids: Tensor, among: Tensor) -> Tensor:
    """Return the place of each of some ids among others, which increase; -1 where it is not there."""
    if not len(among):
        return torch.full_like(ids, -1)
    at = torch.searchsorted(among, ids).clamp_(max=len(among) - 1)
    return torch.where(among[at] == ids, at, -1)


def merge_order(left: Tensor, right: Tensor) -> Tensor:
    """Return the order in which two increasing vectors of ids, one after the other, are increasing."""
    at = torch.searchsorted(left, right) + torch.arange(len(right))
    is_left = torch.ones(len(left) + len(right), dtype=torch.bool)
    is_left[at] = False
    order = is_left.cumsum(0) - 1
    order[at] = torch.arange(len(right)) + len(left)
    return order


def let_go_of_memory(array: Tensor) -> None:
    """Give the system back the whole pages of an array in RAM that is written anew before it is read."""
    first, last = array.data_ptr(), array.data_ptr() + array.nbytes
    start, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, last // mmap.PAGESIZE * mmap.PAGESIZE
    if start < end:
        libc().madvise(start, end - start, DO_NOT_NEED)


_U = np.uint64
Types = TypeVar("Types", bound=TypeNames)


class WantedRows(NamedTuple):
    """Rows of a type that are needed.

    Attributes:
        places: The places of those that are here, among these.
        is_other: Which of them are elsewhere.
        distinct: The ids of those, each once, increasing.
        inverse: Where each of those stands in ``distinct``.
    """

    places: Tensor
    is_other: Tensor
    distinct: Tensor
    inverse: Tensor


class Table:
    """Rows of a type by their ids in it.

    Args:
        arrays: The arrays by name. Of one that the cache has too, the first ``num_own`` rows are used, and others are
            elsewhere. Of one that it does not have, all rows are here.
        first: The id of the first row that is here.
        num_own: How many are here.
        cache: Holds rows that are elsewhere.
        fetch: Asks for the rows of some increasing ids, by name.
    """

    def __init__(
        self, arrays: Arrays, first: int, num_own: int, cache: RowCache, fetch: Callable[[Tensor], Steps[Arrays]]
    ) -> None:
        self.own, self.cache, self.fetch = arrays, cache, fetch
        self._first, self._num_own = first, num_own

    def seek(self, ids: Tensor) -> WantedRows:
        """Return what is to be known of some rows before they are fetched. Nobody is asked."""
        places = ids - self._first
        is_other = (places < 0) | (places >= self._num_own)
        return WantedRows(places, is_other, *ids[is_other].unique(return_inverse=True))

    def rows_of_batches(
        self,
        wanted: WantedRows,
        ids: Sequence[Tensor],
        num_labels: Sequence[int | None],
        pool_of: PoolOf,
    ) -> Steps[list[Taken]]:
        """Fetch the rows that are elsewhere, each once, and return those of each batch.

        Args:
            wanted: What is known of the rows of all batches.
            ids: The ids of the rows of each batch.
            num_labels: How many rows of labels each batch has. With None it has all.
            pool_of: Returns the pool that lends memory for the array of a name, or None.
        """
        at, missing = self.cache.look_up(wanted.distinct)
        fetched = yield from self.fetch(missing)
        self.cache.offer(missing, fetched)
        wanted.places[wanted.is_other] = self._num_own + at[wanted.inverse]
        places = wanted.places.split(list(map(len, ids)))
        return [Taken(self._gathered(fetched, *of, pool_of)) for of in zip(places, ids, num_labels, strict=True)]

    def _gathered(
        self, fetched: Arrays, places: Tensor, ids: Tensor, num_labels: int | None, pool_of: PoolOf
    ) -> Arrays:
        rows = {}
        for name, array in self.own.items():
            upto = num_labels if name == LABELS else None
            if name in fetched:
                own, held = array[: self._num_own], self.cache.rows[name]
                rows[name] = gather_joined(own, held, fetched[name], places[:upto], pool_of(name))
            else:
                rows[name] = gather_rows(array, ids[:upto], pool_of(name))
        return rows


class Bulk(NamedTuple):
    """Batches that are drawn, without their arrays.

    Attributes:
        samples: What was drawn, for each batch.
        apart: The same by types; a graph without types counts as one of one type.
        nodes: The rows of each node type that all of them need.
    """

    samples: list[Sample]
    apart: list[Apart]
    nodes: list[WantedRows]


class Tables(Generic[Types]):
    """The arrays of all types of a graph, some rows of which lie elsewhere.

    Args:
        types: The types; a graph without types counts as one of one type.
        of_nodes: The arrays of each node type.
        of_edges: Those of each edge type that has some, by its number. None of their rows is held.
        cache_bytes: What the caches of all node types may hold together.

    Attributes:
        cache: What is held of rows that are elsewhere.
        making: Held by the thread that makes a bulk from the cache.
    """

    def __init__(
        self, types: Types, of_nodes: Sequence[Table], of_edges: dict[int, Table], cache_bytes: int = 0
    ) -> None:
        self.types, self.of_nodes, self.of_edges = types, of_nodes, of_edges
        self.cache, self.making = Caches([table.cache for table in of_nodes], cache_bytes), Lock()

    @property
    def fetched_bytes(self) -> int:
        """The bytes that were fetched so far."""
        return self.cache.fetched_bytes

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: what was fetched, how many rows were asked for, and how many of these were held."""
        asked, hits = self.cache.asked, self.cache.hits
        if not asked:
            return {}
        cache = {"data/cache_asked": float(asked), "data/cache_hits": float(hits), "data/cache_hit_rate": hits / asked}
        return {"data/fetched_bytes": float(self.fetched_bytes)} | cache

    def take_apart(self, sample: Sample) -> Apart:
        """Return a batch by types, with the ids of edges in their types."""
        return take_apart_of_shards(self.types, sample)

    def ask(self, questions: list[Any]) -> Sequence[Any]:
        """Answer what drawing and filling bulks ask, in one exchange. Of files nobody is asked."""
        return []

    def seek(self, samples: list[Sample]) -> Bulk:
        """Return what is to be known of the rows of a bulk. Nobody is asked."""
        apart = [self.take_apart(sample) for sample in samples]
        nodes = [
            table.seek(torch.cat([of_batch.nodes[number] for of_batch in apart]))
            for number, table in enumerate(self.of_nodes)
        ]
        return Bulk(samples, apart, nodes)

    def fill(
        self,
        bulk: Bulk,
        coming: Sequence[Bulk] = (),
        pool_of: PoolOf = lambda _: None,
        *,
        widen: Widen = True,
        all_labels: bool = True,
    ) -> Steps[list[SampledData]]:
        """Return the batches of a bulk with their arrays, in one turn. The next bulks say what will be needed again.

        The rows of all types are asked for at once.
        """
        with self.making:  # what the cache holds stays until the bulk has it
            known = zip(*(each.nodes for each in (bulk, *coming)), strict=True)
            self.cache.settle([[wanted.distinct for wanted in of_type] for of_type in known])
            nodes, edges = yield from together(
                [together(self._nodes(bulk, pool_of, all_labels)), together(self._edges(bulk, pool_of))]
            )
        of_edges = dict(zip(self.of_edges, edges, strict=True))
        made = []
        for i, (sample, apart) in enumerate(zip(bulk.samples, bulk.apart, strict=True)):
            edge_rows = [of_edges[kind][i] if kind in of_edges else Taken({}) for kind in range(len(apart.rows))]
            content = Content.by_types(self.types, apart, sample, [of_type[i] for of_type in nodes], edge_rows)
            made.append(made_of(content, widen=widen, all_labels=all_labels))
        return made

    def _nodes(self, bulk: Bulk, pool_of: PoolOf, all_labels: bool) -> list[Steps[list[Taken]]]:
        """Fetch the rows of each node type."""
        return [
            table.rows_of_batches(
                wanted,
                [apart.nodes[number] for apart in bulk.apart],
                [None if all_labels else apart.num_sampled[number][0] for apart in bulk.apart],
                _pools_of(pool_of, self.types.node_types[number]),
            )
            for number, (table, wanted) in enumerate(zip(self.of_nodes, bulk.nodes, strict=True))
        ]

    def _edges(self, bulk: Bulk, pool_of: PoolOf) -> list[Steps[list[Taken]]]:
        """Fetch the rows of each edge type that has arrays."""
        of_types = {number: [apart.rows[number].edge_ids for apart in bulk.apart] for number in self.of_edges}
        return [
            self.of_edges[number].rows_of_batches(
                self.of_edges[number].seek(torch.cat(ids)),
                ids,
                [None] * len(ids),
                _pools_of(pool_of, self.types.edge_types[number]),
            )
            for number, ids in of_types.items()
        ]


def _pools_of(pool_of: PoolOf, kind: str | EdgeType) -> PoolOf:
    """Return the pools of the arrays of a type."""
    return lambda name: pool_of(f"{kind} {name}")


@compiled
def gather_of_three(first: Array, second: Array, third: Array, rows: Array, out: Array, width: int) -> None:
    """Copy ``rows`` of three arrays that stand below each other to ``out``, all uint8; a row has ``width`` bytes."""
    last, ahead = len(rows) - 1, min(width, 8 * LINE)
    split, end = len(first), len(first) + len(second)
    for i in range(len(rows)):
        coming, row = rows[_U(min(i + ROWS_AHEAD, last))] * width, rows[_U(i)] * width
        for offset in range(0, ahead, LINE):
            if coming < split:
                prefetch(first, coming + offset)
            elif coming < end:
                prefetch(second, coming - split + offset)
            else:
                prefetch(third, coming - end + offset)
        if row < split:
            copy_bytes(out, i * width, first, row, width)
        elif row < end:
            copy_bytes(out, i * width, second, row - split, width)
        else:
            copy_bytes(out, i * width, third, row - end, width)


def gather_joined(array: Tensor, held: Tensor, others: Tensor, rows: Tensor, pool: Pool | None = None) -> Tensor:
    """Rows of three arrays as if they stood below each other, copied as :func:`gather_rows` does."""
    shape = (rows.numel(), *array.shape[1:])
    num_bytes = prod(shape) * array.dtype.itemsize
    if not num_bytes:
        return array.new_empty(shape)
    check_rows(rows, len(array) + len(held) + len(others))
    first, second, third = (bits_of(source, torch.uint8) for source in (array, held, others))
    out = room_for(num_bytes, pool)
    gather_of_three(first, second, third, rows.numpy(), out.numpy(), num_bytes // rows.numel())
    return out.view(array.dtype).view(shape)


def take_apart_of_shards(types: TypeNames, sample: Sample) -> Apart:
    """Do as :func:`take_apart` for a sample of a graph in shards, whose ``edge_ids`` count in the edges' types."""
    if len(types.node_types) == len(types.edge_types) == 1:
        return of_one_type(sample)
    apart = by_types(types, sample)
    if apart is None:
        raise ValueError(
            "A rank has an edge whose ends are of other types than its type says: its shard was changed after it was "
            "opened. Copy the shards again."
        )
    return apart


MOST_KNOWN = 8  # bulks whose draws are known when rows are chosen for the cache
MOST_AHEAD = 32  # bulks, where they are so small that any number would fit


Draw = Callable[[Sequence[Tensor], Sequence[BatchKey]], Steps[list[Sample]]]
Drawing = tuple[Inquiry[Bulk], Inputs | None]


class AheadSource(BatchSource):
    """Makes batches bulk after bulk, in one thread, and knows what the next bulks draw when it asks for rows.

    Args:
        tables: The rows that lie elsewhere, and who answers what drawing batches and fetching their rows asks.
        draw: Draws the batches of a bulk, by their seeds and keys.
        loading: How batches are made.
        stream: Brings batches to a device. With None they stay in RAM.
        widen: Which narrow types become float32. Default: all.
    """

    is_remote = True

    def __init__(
        self, tables: Tables[Any], draw: Draw, loading: Loading, *, stream: Stream | None = None, widen: Widen = True
    ) -> None:
        super().__init__(stream)
        self._tables, self._draw, self._loading, self._widen = tables, draw, loading, widen
        self._bulk_bytes = 0

    def depth(self, prefetch: int) -> int:
        """Return how many bulks of the largest size so far fit into ``ahead_bytes``, one at least; 0 for no bytes."""
        if not self._loading.ahead_bytes:
            return 0
        return min(max(1, self._loading.ahead_bytes // max(1, self._bulk_bytes)), MOST_AHEAD if self._bulk_bytes else 1)

    def make(
        self, seeds: Sequence[Tensor], keys: Sequence[BatchKey], inputs: Inputs | None = None
    ) -> Iterator[SampledData]:
        return next(self.make_in_turn(iter([(seeds, keys, inputs)])))[1]

    def make_in_turn(self, bulks: Iterator[BulkSeeds]) -> Iterator[MadeBulk]:
        """Make one bulk after the other; the next ones are drawn beside it.

        Of these there are as many as a bulk is drawn in exchanges, and with a cache some more, so that it knows what is
        needed soonest, in no more memory than it takes. The first bulk is drawn alone, so that it comes soon.
        """
        line, beside = deque[Drawing](), 0
        for made in count(1):
            known = min(made + beside, MOST_KNOWN) if self._tables.cache.has_room else 1
            self._admit(line, bulks, 3, known, beside)
            if not line:
                return
            turns = self._draw_first(line)
            if made == 1 and self._loading.ahead_bytes:
                beside = turns
                self._admit(line, bulks, 1, known, beside)
            work, inputs = line.popleft()
            others = [other for other, _ in line]
            yield len(work.result.samples), handed_out(partial(self._made, work.result, inputs, others), self._stream)

    def _drawn(self, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[Bulk]:
        return self._tables.seek((yield from self._draw(seeds, keys)))

    def _draw_first(self, line: deque[Drawing]) -> int:
        """Draw all of the first bulk, and more of the next ones; return in how many exchanges."""
        turns = 0
        while not line[0][0].is_done:
            take_turn([work for work, _ in line], self._tables.ask)
            turns += 1
        return turns

    def _admit(self, line: deque[Drawing], bulks: Iterator[BulkSeeds], count: int, known: int, beside: int) -> None:
        """Begin some bulks more, as long as there are not so many to be known and, beside them, to be drawn."""
        for _ in range(count):
            if len(line) >= known + beside or (len(line) >= 2 + beside and not self._have_room(line)):
                return
            asked = next(bulks, None)
            if asked is None:
                return
            line.append((Inquiry(self._drawn(*asked[:2])), asked[2]))

    def _have_room(self, line: deque[Drawing]) -> bool:
        """Return whether draws take less memory than the cache."""
        held = sum(bytes_of_draw(sample) for work, _ in line if work.is_done for sample in work.result.samples)
        return held < self._tables.cache.num_bytes

    def _made(self, bulk: Bulk, inputs: Inputs | None, others: Sequence[Inquiry[Bulk]]) -> list[SampledData]:
        coming = [work.result for work in takewhile(lambda work: work.is_done, others)]
        how: dict[str, Any] = {"widen": self._widen, "all_labels": self._loading.all_labels}
        filling = Inquiry(self._tables.fill(bulk, coming, self._pool_of, **how))
        while not filling.is_done:
            take_turn([filling, *others], self._tables.ask)
        made = filling.result
        for batch, given in zip(made, inputs or (), strict=inputs is not None):
            store_of_seeds(batch).input_id = given
        self._bulk_bytes = max(self._bulk_bytes, sum(map(bytes_of, made)))
        return made


def bytes_of_draw(sample: Sample) -> int:
    """Return the bytes of what was drawn for a batch."""
    tensors = sample.nodes, sample.indptr, sample.indices, sample.edge_ids, *sample.extra.values()
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)
