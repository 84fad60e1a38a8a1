"""The cache holds the rows that are needed soonest, never more than it may, and changes no row."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.larger_than_memory.joined_rows import gather_joined
from lightning_gnn_dist.extensions.larger_than_memory.row_cache import Caches, RowCache
from tests.memory import reads_memory, resident_bytes

NUM_NODES, NUM_BULKS = 1000, 40


def some_bulks() -> list[Tensor]:
    """Sets of nodes of which a few are in many, as in graphs with hubs."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.rand(150, generator=generator).pow(2) * NUM_NODES for _ in range(NUM_BULKS)]
    return [draw.long().unique() for draw in draws]


def held_by_belady(num_rows: int, known: int) -> list[int]:
    """By hand: the hits in each bulk, where ids of smaller number win between equal next uses."""
    bulks, held, fetched, hits = some_bulks(), set[int](), set[int](), []
    for number, bulk in enumerate(bulks):
        coming = [set(ids.tolist()) for ids in bulks[number : number + known + 1]]

        def next_use(node: int, coming: list[set[int]] = coming) -> tuple[int, int]:
            return next((at for at, ids in enumerate(coming) if node in ids), len(coming)), node

        held = set(sorted(held | fetched, key=next_use)[:num_rows])
        hits.append(len(held & coming[0]))
        fetched = set(bulk.tolist()) - held
    return hits


@pytest.mark.parametrize("known", [0, 1, 8, NUM_BULKS])
@pytest.mark.parametrize("num_rows", [1, 100, 250, 500, 1000])
def test_it_holds_what_is_needed_soonest(num_rows: int, known: int) -> None:
    x = torch.randn(NUM_NODES, 3, generator=torch.Generator().manual_seed(1))
    arrays, none = {"x": x, "y": torch.arange(NUM_NODES)}, {"x": x[:0], "y": torch.arange(0)}
    cache = RowCache(none, num_rows, lambda ids: NUM_NODES - ids)
    bulks, hits, alone = some_bulks(), [], Caches([cache], cache.num_rows * cache.bytes_per_row)
    for number, bulk in enumerate(bulks):
        before = cache.hits
        alone.settle([bulks[number : number + known + 1]])
        places, missing = cache.look_up(bulk)
        fetched = {name: array[missing] for name, array in arrays.items()}
        cache.offer(missing, fetched)
        hits.append(cache.hits - before)
        for name, array in arrays.items():
            assert gather_joined(none[name], cache.rows[name], fetched[name], places).equal(array[bulk])
    assert hits == held_by_belady(num_rows, known)
    assert cache.rows["x"].shape == (num_rows, 3) and cache.asked == sum(map(len, bulks))


def test_without_room_everything_is_fetched() -> None:
    cache = RowCache({"x": torch.empty(0, 2)}, 0)
    for bulk in some_bulks():
        Caches([cache], 0).settle([[bulk]])
        places, missing = cache.look_up(bulk)
        cache.offer(missing, {"x": missing.view(-1, 1).expand(-1, 2).float()})
        assert missing[places].equal(bulk)
    assert cache.hits == 0


def bulks_of_types() -> list[list[Tensor]]:
    """For each type the ids of each bulk. At first the wide type is in none, and then in more and more."""
    generator = torch.Generator().manual_seed(2)
    most: list[Callable[[int], int]] = [lambda at: 6 * at, lambda at: 260 - 6 * at, lambda at: 20]
    return [
        [(torch.rand(count(number), generator=generator).pow(3) * NUM_NODES).long().unique() for number in range(40)]
        for count in most
    ]


def held_of_all(num_bytes: int, sizes: list[int], known: int) -> list[list[int]]:
    """By hand: the hits of each type in each bulk. Rows of all types stand in one line, the soonest first."""
    bulks, hits = bulks_of_types(), [list[int]() for _ in sizes]
    held, fetched = set[tuple[int, int]](), set[tuple[int, int]]()
    for number in range(40):
        coming = [
            {(kind, node) for kind in range(len(sizes)) for node in bulks[kind][at].tolist()}
            for at in range(number, min(number + known + 1, 40))
        ]

        def next_use(row: tuple[int, int], coming: list[set[tuple[int, int]]] = coming) -> tuple[int, int]:
            uses = (at for at, rows in enumerate(coming) if row in rows)
            return next(uses, len(coming)), len(sizes) * row[1] + row[0]

        line = sorted(held | fetched, key=next_use)
        total = sum(sizes[kind] for kind, _ in line)
        while total > num_bytes:
            total -= sizes[line.pop()[0]]
        held = set(line)
        for kind, seen in enumerate(hits):
            seen.append(sum(row[0] == kind for row in held & coming[0]))
        fetched = coming[0] - held
    return hits


@pytest.mark.parametrize("known", [0, 3])
@pytest.mark.parametrize("num_bytes", [10_000, 100_000, 1_000_000])
def test_rows_of_all_types_share_the_bytes(num_bytes: int, known: int) -> None:
    """Rows of 1,400, 36 and 0 bytes: float16, float32, and of a type without arrays, which is not held."""
    generator = torch.Generator().manual_seed(1)
    arrays = [
        {"x": torch.randn(NUM_NODES, 700, generator=generator).half()},
        {"x": torch.randint(-99, 99, (NUM_NODES, 8), dtype=torch.int8), "z": torch.randn(NUM_NODES, 7)},
    ]
    sizes, bulks = [1400, 36], bulks_of_types()
    caches = [
        RowCache({name: array[:0] for name, array in of.items()}, num_bytes // size, lambda ids, k=kind: -2 * ids - k)
        for kind, (of, size) in enumerate(zip(arrays, sizes, strict=True))
    ]
    caches.append(RowCache({}, 0))
    joint, hits = Caches(caches, num_bytes), [list[int]() for _ in arrays]
    for number in range(40):
        joint.settle([of_type[number : number + known + 1] for of_type in bulks])
        for kind, (of, cache) in enumerate(zip(arrays, caches, strict=False)):
            before, bulk = cache.hits, bulks[kind][number]
            places, missing = cache.look_up(bulk)
            fetched = {name: array[missing] for name, array in of.items()}
            cache.offer(missing, fetched)
            hits[kind].append(cache.hits - before)
            for name, array in of.items():
                assert gather_joined(array[:0], cache.rows[name], fetched[name], places).equal(array[bulk])
        assert sum(len(cache._ids) * size for cache, size in zip(caches, sizes, strict=False)) <= num_bytes
    assert hits == held_of_all(num_bytes, sizes, known)
    assert any(hits[0][20:]) or num_bytes < 100_000


@reads_memory
def test_memory_goes_from_one_type_to_another() -> None:
    """Two types that fill the bytes in turn never hold more memory than these, and some pages."""
    num_bytes, width = 64 << 20, 4096
    caches = [RowCache({"x": torch.empty(0, width, dtype=torch.uint8)}, num_bytes // width) for _ in range(2)]
    joint = Caches(caches, num_bytes)
    before = resident_bytes("RssAnon")
    for number in range(6):
        ids = [torch.arange(count) + 20_000 * number for count in ((12_000, 10), (10, 12_000))[number % 2]]
        joint.settle([[of] for of in ids])
        for cache, of in zip(caches, ids, strict=True):
            cache.offer(cache.look_up(of)[1], {"x": torch.zeros(1, dtype=torch.uint8).expand(len(of), width)})
        joint.settle([[of] for of in ids])
        assert resident_bytes("RssAnon") - before < num_bytes + (8 << 20)
    assert sum(len(cache._ids) for cache in caches) == num_bytes // width
