"""Batches whose rows are read from files are those of the graph in RAM, whatever is held and made ahead."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import ClusterSampler, Graph, LadiesSampler, Loading, NeighborSampler, communities
from lightning_gnn_dist.batches.batches import GlobalBatches
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.extensions.larger_than_memory import files
from lightning_gnn_dist.extensions.larger_than_memory.ahead import Caches, RowCache, gather_joined
from lightning_gnn_dist.extensions.larger_than_memory.files import THREAD_NAME, DiskRows, FileSource, MergedReads
from lightning_gnn_dist.sampling.base import Sampler
from tests.batch_contents import check_same, contents
from tests.loaders import over
from tests.memory import reads_memory, resident_bytes

AHEAD = {0: 0, 1: 1, 8: 1_200_000}  # bulks: bytes
SAMPLER = NeighborSampler([4, 3])


def floats(x: Tensor) -> dict[str, Tensor]:
    return {"x": x}


def halves(x: Tensor) -> dict[str, Tensor]:
    return {"x": x.bfloat16()}


def saved(folder: Path, form: Callable[[Tensor], dict[str, Tensor]] = floats, *, edges: bool = True) -> Graph:
    graph = communities(500, 4, num_features=32)
    arrays = graph.node_arrays | form(graph.node_arrays["x"])
    arrays |= {"z": torch.randn(500, 3, 5), "chunk": torch.arange(500) // 50}
    of_edges = {"edge_weight": torch.rand(graph.num_edges), "edge_attr": torch.randn(graph.num_edges, 9)}
    Graph(graph.indptr, graph.indices, arrays, of_edges if edges else {}).save(folder / "graph")
    return Graph.open(folder / "graph")


def passes(source: BatchSource, num_threads: int) -> list[dict[str, Any]]:
    """Two loaders and corrections share what is held, and one leaves a pass unfinished."""
    seeds = torch.arange(500)
    loader = over(source, seeds, 30, seed=1, bulk_size=3, num_threads=num_threads, inputs=seeds + 7)
    other = over(source, seeds[:90], 4, seed=0, shuffle=False, num_threads=num_threads)
    whole = GlobalBatches(source, torch.arange(300), 32, 0, 3, None, True, in_background=num_threads > 0)
    unfinished = iter(loader)
    found = [*other, *(next(unfinished) for _ in range(4)), *other]
    unfinished.close()
    found += [*loader.stream(40, 75), *whole.of_round(1, 0, 2, start=1, stop=6)]
    loader.close()
    return [contents(batch) for batch in found]


AHEAD_OF = [(SAMPLER, *case) for case in ((0, 0), (8, 0), (0, 1000), (1, 40_000), (8, 40_000), (1, 80_000))]
OTHERS = [NeighborSampler([-1, -1]), LadiesSampler([32, 32]), ClusterSampler(2)]


@pytest.mark.parametrize(("sampler", "depth", "cache_bytes"), [*AHEAD_OF, *((other, 0, 10_000) for other in OTHERS)])
def test_batches_are_those_of_the_graph(tmp_path: Path, sampler: Sampler, cache_bytes: int, depth: int) -> None:
    graph = saved(tmp_path)
    rows = DiskRows.of(graph, cache_bytes)
    assert rows is not None
    source = FileSource(graph, rows, sampler, Loading(ahead_bytes=AHEAD[depth]))
    found = passes(source, num_threads=2)
    rows.close()
    check_same(found, passes(GraphSource(graph, sampler, all_labels=False), 0))
    assert 4 <= source.depth(2) <= 12 if depth == 8 else source.depth(2) == depth, source._bulk_bytes
    assert (rows.cache.hits > 0) == (cache_bytes > 0) and rows.fetched_bytes > 0
    assert rows.cache.num_bytes <= cache_bytes


@pytest.mark.parametrize(
    ("form", "widen", "all_labels"),
    [
        (floats, False, True),
        (halves, True, False),
        (halves, torch.bfloat16, False),
        pytest.param(floats, True, False, marks=pytest.mark.slow),
        pytest.param(floats, torch.bfloat16, False, marks=pytest.mark.slow),
        pytest.param(halves, False, True, marks=pytest.mark.slow),
    ],
)
def test_all_forms_of_features_are_read(
    tmp_path: Path, form: Callable[[Tensor], dict[str, Tensor]], widen: Widen, all_labels: bool
) -> None:
    graph = saved(tmp_path, form, edges=False)
    rows = DiskRows.of(graph, 5000)
    assert rows is not None
    source = FileSource(graph, rows, SAMPLER, Loading(all_labels=all_labels), widen=widen)
    expected = passes(GraphSource(graph, SAMPLER, widen=widen, all_labels=all_labels), 0)
    check_same(passes(source, 1), expected)
    rows.close()


def test_what_fits_is_read_through_the_map(tmp_path: Path) -> None:
    graph = saved(tmp_path)
    wide = 500 * 4 * (32 + 15)
    assert DiskRows.of(graph, wide) is None
    rows = DiskRows.of(graph, wide - 1)
    assert rows is not None and rows.of_nodes[0].cache.num_rows == 499
    assert rows.are_rows_of(graph) and not rows.are_rows_of(communities(500, 4))
    rows.close()


# Rows that are read from a file in few requests are those of the array.


def mapped(path: Path, array: Tensor) -> Tensor:
    """As a saved graph has arrays: behind a header, so that rows do not begin where pages do."""
    np.save(path, array.numpy())
    return torch.from_numpy(np.load(path, mmap_mode="c"))


def some_rows(count: int, among: int) -> Tensor:
    return torch.randperm(among, generator=torch.Generator().manual_seed(count))[:count].sort().values


@pytest.mark.parametrize("gap", [0, 100, 1 << 14])
@pytest.mark.parametrize("shape", [(7,), (3, 5), ()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_rows_are_those_of_the_array(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...], gap: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "GAP_BYTES", gap)
    monkeypatch.setattr(files, "REQUEST_BYTES", 1000)
    array = mapped(tmp_path / "a.npy", torch.randint(0, 100, (2000, *shape)).to(dtype))
    reads = MergedReads(array)
    several = [some_rows(count, 2000) for count in (0, 1, 2, 500, 1999, 2000)]
    for rows in (*several, torch.tensor([1999]), torch.arange(90)):
        assert reads.take(rows).equal(array[rows])
    reads.close()


def test_rows_are_read_in_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: rows of 100 bytes, gaps of at most 400, requests of at most 2000 beside the first row's offset.

    The rows stand behind a header of 128 bytes, and blocks of 4096 are read.
    """
    monkeypatch.setattr(files, "GAP_BYTES", 400)
    monkeypatch.setattr(files, "REQUEST_BYTES", 2000)
    array = mapped(tmp_path / "a.npy", torch.zeros(1000, 100, dtype=torch.uint8))
    reads = MergedReads(array)
    for rows, starts, blocks in (
        ((3, 4, 5), [0, 3], 1),
        ((0, 5, 10), [0, 3], 1),  # four rows between them
        ((0, 6, 12), [0, 1, 2, 3], 3),  # five, which is too far
        (tuple(range(50)), [0, 20, 40, 50], 1 + 2 + 1),  # bytes 128 to 2128, to 4128, to 5128
        ((0, 19, 20, 21), [0, 1, 4], 1 + 1),
        ((39,), [0, 1], 2),  # bytes 4028 to 4128
    ):
        before = reads.bytes_read
        reads.take(torch.tensor(rows))
        assert files._requests(torch.tensor(rows), 100).tolist() == starts
        assert reads.bytes_read - before == 4096 * blocks
    reads.close()


def test_without_a_way_past_the_cache_rows_are_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array, rows = mapped(tmp_path / "a.npy", torch.randn(2000, 7)), some_rows(300, 2000)
    monkeypatch.delattr(os, "O_DIRECT")
    reads = MergedReads(array)
    assert reads.take(rows).equal(array[rows])
    reads.close()


def test_a_file_that_was_cut_short_is_named(tmp_path: Path) -> None:
    array = mapped(tmp_path / "a.npy", torch.randn(1000, 50))
    reads = MergedReads(array)
    os.truncate(tmp_path / "a.npy", 100_000)
    with pytest.raises(OSError, match=r"Row 999 of .*a.npy cannot be read: was the file changed\?"):
        reads.take(torch.tensor([0, 999]))


def test_arrays_in_ram_are_refused() -> None:
    with pytest.raises(ValueError, match="do not lie in a file"):
        MergedReads(torch.randn(1000, 50))


def openings(folder: Path) -> int:
    """How many files of a folder this process has open; others come and go with what other tests have left."""
    files = [Path(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    return sum(file.is_symlink() and folder in file.readlink().parents for file in files)


def test_nothing_is_left_open(tmp_path: Path) -> None:
    array = mapped(tmp_path / "a.npy", torch.randn(100_000, 16))
    before = openings(tmp_path)  # of the map
    reads = MergedReads(array)
    reads.take(torch.arange(0, 100_000, 2000))
    assert openings(tmp_path) == before + 1
    reads.close()
    reads.close()
    assert openings(tmp_path) == before
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    with pytest.raises(RuntimeError, match="was closed while rows of it were asked for"):
        reads.take(torch.arange(3))


# The cache holds the rows that are needed soonest, never more than it may, and changes no row.


NUM_NODES = 1000


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
    """Two types that fill the bytes in turn hold no more memory than these, and half of it for what else runs here."""
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
        assert resident_bytes("RssAnon") - before < 1.5 * num_bytes
    assert sum(len(cache._ids) for cache in caches) == num_bytes // width
