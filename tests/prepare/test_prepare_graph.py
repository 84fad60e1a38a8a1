"""Preparing in pieces: the graph that memory would give, after kills and full disks too, or no graph at all."""

import os
import resource
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn_dist import Graph, prepare_graph
from lightning_gnn_dist.prepare import edges
from lightning_gnn_dist.prepare import prepare_graph as prepare_graph_module
from lightning_gnn_dist.prepare.edges import cut_nodes, deal, order_of, unpack
from lightning_gnn_dist.prepare.journal import Journal
from lightning_gnn_dist.prepare.prepare_graph import LEAST_ROOM, Portion, Preparation
from lightning_gnn_dist.wire.memory import held_bytes
from lightning_gnn_dist.wire.memory import peak_bytes as process_peak
from tests.prepare.kills import killing
from tests.ranks import run_ranks, start_ranks

NUM_NODES, NUM_EDGES = 300, 5000
TINY = 3000  # bytes: dozens of buckets, a hundred pieces
SMALL = 20_000  # bytes: a few of both
STAGES = ["copying arrays", "counting edges", "dealing edges into buckets", "sorting edges", "taking the fingerprint"]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    generator = np.random.default_rng(0)
    np.save(folder / "edge_index.npy", generator.integers(0, NUM_NODES, (2, NUM_EDGES)))
    np.save(folder / "x.npy", generator.normal(size=(NUM_NODES, 7)).astype(np.float16))
    np.save(folder / "y.npy", generator.integers(0, 5, (NUM_NODES, 1)))
    np.save(folder / "train_idx.npy", np.arange(50))
    return folder


def prepared(source: Path, out: Path, **settings: Any) -> Graph:
    prepare_graph(source, out, **settings)
    return Graph.open(out)


def from_memory(source: Path, out: Path, *, undirected: bool) -> dict[str, bytes]:
    """The graph of arrays as PyG has it; an edge that was there keeps its own array, and the first of equal ones."""
    arrays = {file.stem: torch.from_numpy(np.load(file)) for file in source.glob("*.npy")}
    if "y" in arrays:
        arrays["y"] = arrays["y"].reshape(len(arrays["y"]), -1)[:, 0]
    ends = arrays.pop("edge_index").long()
    if undirected:
        both = torch.cat([ends, ends.flip(0)], 1)
        order = torch.argsort(both[1] * NUM_NODES + both[0], stable=True)
        both = both[:, order]
        is_first = torch.cat([torch.ones(1, dtype=torch.bool), (both[:, 1:] != both[:, :-1]).any(0)])
        kept = order[is_first] % ends.shape[1]
        ends = both[:, is_first]
        arrays |= {name: array[kept] for name, array in arrays.items() if name.startswith("edge_")}
    Graph.from_pyg(Data(edge_index=ends, num_nodes=NUM_NODES, **arrays)).save(out)
    return content(out)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("memory_bytes", [TINY, 20_000, 10**9])
@pytest.mark.parametrize("undirected", [False, True])
def test_it_is_the_graph_of_memory_to_the_byte(source, tmp_path, undirected, memory_bytes) -> None:
    expected = from_memory(source, tmp_path / "expected", undirected=undirected)
    graph = prepared(source, tmp_path / "graph", undirected=undirected, memory_bytes=memory_bytes)
    assert content(tmp_path / "graph") == expected
    assert graph.path == tmp_path / "graph"
    assert not (tmp_path / ".graph.preparing").exists()


@pytest.mark.parametrize("undirected", [False, True])
def test_edges_carry_their_arrays(source: Path, tmp_path: Path, undirected: bool) -> None:
    generator = np.random.default_rng(1)
    pairs = generator.integers(0, 40, (2, NUM_EDGES))  # each several times, and both ways
    np.save(source / "edge_index.npy", pairs)
    np.save(source / "edge_weight.npy", generator.random(NUM_EDGES).astype(np.float32))
    np.save(source / "edge_attr.npy", generator.integers(0, 100, (NUM_EDGES, 3)).astype(np.int16))
    expected = from_memory(source, tmp_path / "expected", undirected=undirected)
    interrupted(source, tmp_path / "graph", "sorting edges", undirected=undirected, memory_bytes=2 * SMALL)
    prepare_graph(source, tmp_path / "graph", undirected=undirected, memory_bytes=2 * SMALL)
    assert content(tmp_path / "graph") == expected


def peak_bytes(source: Path, out: Path, memory_bytes: int) -> int:
    tracemalloc.start()
    try:
        prepare_graph(source, out, undirected=True, memory_bytes=memory_bytes)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("num_carried", [0, 1, pytest.param(9, marks=pytest.mark.slow)])
def test_memory_stays_within_the_budget(tmp_path: Path, num_carried: int) -> None:
    (tmp_path / "source").mkdir()
    generator = np.random.default_rng(0)
    np.save(tmp_path / "source" / "edge_index.npy", generator.integers(0, 1000, (2, 100_000)))  # 1.6 MB
    np.save(tmp_path / "source" / "x.npy", generator.random((1000, 1000)))  # 8 MB
    if num_carried:
        np.save(tmp_path / "source" / "edge_attr.npy", generator.random((100_000, num_carried)))
    budget = 400_000
    prepare_graph(tmp_path / "source", tmp_path / "warm", undirected=True, memory_bytes=budget)
    # The least of two: now and then Python enlarges a table of its own, by megabytes.
    peak = min(peak_bytes(tmp_path / "source", tmp_path / f"graph{run}", budget) for run in range(2))
    assert peak < budget + 24 * 1000 + 200_000  # of Python itself


@pytest.mark.parametrize(("memory_bytes", "room"), [(2 * 10**9, 5 * 10**8), (16 * 10**8, LEAST_ROOM), (SMALL, SMALL)])
def test_what_the_process_holds_is_taken_off(source, tmp_path, memory_bytes, room, monkeypatch) -> None:
    monkeypatch.setattr(prepare_graph_module, "held_bytes", lambda: 15 * 10**8)
    assert Preparation(source, tmp_path / "graph", memory_bytes=memory_bytes).room == room
    shard = type("Shard", (Portion,), {"is_whole": False})()  # ranks read in pieces that are alike
    assert Preparation(source, tmp_path / "graph", shard, memory_bytes=memory_bytes).room == memory_bytes


def test_too_little_memory_is_told_with_what_the_process_holds(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prepare_graph_module, "held_bytes", lambda: 1000)
    monkeypatch.setattr(prepare_graph_module, "LEAST_ROOM", 0)
    with pytest.raises(ValueError, match=r"memory_bytes=100 are too few. .* holds 1,000 bytes: add them\.$"):
        prepare_graph(source, tmp_path / "graph", memory_bytes=1100)
    prepare_graph(source, tmp_path / "graph", memory_bytes=50_000)  # goes on with what is done
    assert content(tmp_path / "graph") == from_memory(source, tmp_path / "expected", undirected=False)


def peak_beside(rank: int, world_size: int, folder: Path) -> int:
    prepare_graph(folder / "little", folder / "warm")
    held = held_bytes() or 0
    prepare_graph(folder / "source", folder / "graph", undirected=True, memory_bytes=held + MORE)
    return (process_peak() or 0) - held


MORE = 300 << 20


@pytest.mark.slow
def test_the_process_stays_within_its_memory(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for name, count in (("little", 1000), ("source", 5_000_000)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "edge_index.npy", draw.integers(0, 1000, (2, count), np.int32))
        np.save(tmp_path / name / "edge_weight.npy", draw.random(count, np.float32))
    (peak,) = run_ranks(peak_beside, 1, tmp_path)
    assert 0 < peak < MORE * 1.1


def prepare_and_die(rank: int, world_size: int, source: Path, out: Path, stage: str, calls: int) -> None:
    prepare_graph(source, out, undirected=True, memory_bytes=SMALL, on_progress=killing(stage, calls))


@pytest.mark.parametrize(
    ("stage", "calls"), [*((stage, 1) for stage in STAGES), pytest.param("sorting edges", 3, marks=pytest.mark.slow)]
)
def test_after_a_kill_it_goes_on_with_that_stage(source: Path, tmp_path: Path, stage: str, calls: int) -> None:
    out, folder = tmp_path / "graph", tmp_path / ".graph.preparing"
    with start_ranks(prepare_and_die, 1, source, out, stage, calls) as ranks:
        assert ranks.results(may_die={0}) == [None]
    assert not out.exists()
    for half in (folder, folder / "graph"):
        with pytest.raises(FileNotFoundError, match="not a saved graph"):
            Graph.open(half)
    told: list[tuple[str, float]] = []
    prepare_graph(source, out, undirected=True, memory_bytes=SMALL, on_progress=lambda *now: told.append(now))
    assert content(out) == from_memory(source, tmp_path / "expected", undirected=True)
    first = "dealing edges into buckets" if stage == "sorting edges" else stage  # buckets go as they are sorted
    assert told[0][0] == first  # what came before was not done again
    assert not folder.exists()


def prepare_on_a_small_disk(rank: int, world_size: int, source: Path, out: Path, limit: int) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        prepare_graph(source, out, undirected=True, memory_bytes=50_000)
    except OSError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return "it fitted"


@pytest.mark.parametrize("limit", [100, 4000, 30_000])
def test_a_full_disk_leaves_no_graph_and_loses_nothing(source: Path, tmp_path: Path, limit: int) -> None:
    out = tmp_path / "graph"
    with start_ranks(prepare_on_a_small_disk, 1, source, out, limit) as ranks:
        (said,) = ranks.results()
    assert "is full, or a file may not grow" in said and "repeat the command to go on" in said
    assert not out.exists()
    prepare_graph(source, out, undirected=True, memory_bytes=50_000)
    assert content(out) == from_memory(source, tmp_path / "expected", undirected=True)


def interrupted(source: Path, out: Path, stage: str, **settings: object) -> None:
    def stop(name: str, share: float) -> None:
        if name == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Preparation(source, out, **settings).run(stop)  # type: ignore[arg-type]


def test_too_little_memory_is_told_and_nothing_lost(source: Path, tmp_path: Path) -> None:
    def exhausted(name: str, share: float) -> None:
        if name == "sorting edges":
            raise MemoryError("Unable to allocate 1.00 GiB.")

    with pytest.raises(MemoryError, match=r"1.00 GiB. Sorting was given 50,000 bytes, .* repeat the command with less"):
        prepare_graph(source, tmp_path / "graph", undirected=True, memory_bytes=50_000, on_progress=exhausted)
    prepare_graph(source, tmp_path / "graph", undirected=True, memory_bytes=SMALL)
    assert content(tmp_path / "graph") == from_memory(source, tmp_path / "expected", undirected=True)


def test_other_settings_do_not_go_on_with_it(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "graph", "sorting edges", memory_bytes=TINY)
    with pytest.raises(ValueError, match=r"unfinished work with undirected = False, not True: .* or delete the folder"):
        prepare_graph(source, tmp_path / "graph", undirected=True, memory_bytes=TINY)


def test_files_that_changed_are_noticed(source: Path, tmp_path: Path) -> None:
    interrupted(source, tmp_path / "graph", "sorting edges", memory_bytes=TINY)
    np.save(source / "y.npy", np.zeros(NUM_NODES, np.int64))
    os.utime(source / "y.npy", ns=(0, 0))  # writes within a tick of the system's clock look alike
    with pytest.raises(ValueError, match="unfinished work with files"):
        prepare_graph(source, tmp_path / "graph", memory_bytes=TINY)


@pytest.mark.parametrize("stage", STAGES[2:4])
def test_it_may_go_on_with_less_memory(source: Path, tmp_path: Path, stage: str) -> None:
    interrupted(source, tmp_path / "graph", stage, memory_bytes=20_000, undirected=True)
    prepare_graph(source, tmp_path / "graph", undirected=True, memory_bytes=TINY)
    assert content(tmp_path / "graph") == from_memory(source, tmp_path / "expected", undirected=True)


def test_a_bucket_that_lost_bytes_is_not_sorted(source: Path, tmp_path: Path) -> None:
    def truncate(stage: str, share: float) -> None:
        bucket = tmp_path / ".graph.preparing" / "edges" / "buckets" / "7"
        if stage == "sorting edges" and bucket.exists():
            os.truncate(bucket, bucket.stat().st_size - 8)

    with pytest.raises(ValueError, match=r"7 has .* bytes, and .* were written: repeat the command"):
        prepare_graph(source, tmp_path / "graph", memory_bytes=TINY, on_progress=truncate)
    assert not (tmp_path / "graph").exists()


def test_two_do_not_work_in_one_folder(source: Path, tmp_path: Path) -> None:
    def again(name: str, share: float) -> None:
        prepare_graph(source, tmp_path / "graph")

    with pytest.raises(BlockingIOError, match="Another process works in"):
        prepare_graph(source, tmp_path / "graph", on_progress=again)


def test_what_a_graph_must_not_hold_is_refused(source: Path, tmp_path: Path) -> None:
    x = np.ones((NUM_NODES, 7), np.float32)
    x[222, 3] = np.nan
    np.save(source / "x.npy", x)
    with pytest.raises(ValueError, match="the first at node 222"):
        prepare_graph(source, tmp_path / "graph", memory_bytes=TINY)
    np.save(source / "x.npy", np.ones((NUM_NODES, 7)))
    np.save(source / "y.npy", np.zeros(NUM_NODES - 1, np.int64))
    with pytest.raises(ValueError, match=r"y has shape \(299,\), but the graph has 300 nodes"):
        prepare_graph(source, tmp_path / "third")


def test_a_graph_without_edges(source: Path, tmp_path: Path) -> None:
    np.save(source / "edge_index.npy", np.zeros((2, 0), np.int64))
    graph = prepared(source, tmp_path / "graph", undirected=True)
    assert (graph.num_nodes, graph.num_edges) == (NUM_NODES, 0)
    np.save(tmp_path / "none.npy", np.zeros((2, 0), np.int64))
    with pytest.raises(ValueError, match="does not say how many nodes"):
        prepare_graph(tmp_path / "none.npy", tmp_path / "second")


# Ranges of nodes that fit into memory; keys that are the edges again, also with ids beyond 32 bits.


DEGREES = np.random.default_rng(0).integers(0, 30, 1000)


def test_large_lists_have_larger_buckets_rather_than_countless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edges, "KEYS_PER_BUCKET", 10)
    monkeypatch.setattr(edges, "MAX_BUCKETS", 20)
    assert 20 <= len(cut_nodes(DEGREES, 10**9, 0, 1 << 40)) <= 25


def test_too_little_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Node \d+ has 29 edges, which take 464 bytes to sort: memory_bytes=463"):
        cut_nodes(DEGREES, 463, 0, 1 << 40)
    with pytest.raises(ValueError, match="memory_bytes=16 are too few for 70,000 edges"):
        cut_nodes(np.ones(70_000, np.int64), 16, 0, 1 << 40)


BOUNDS = np.array([0, 30, 31, 100])
BUCKET_OF = np.repeat(np.arange(3, dtype=np.uint16), np.diff(BOUNDS))


@pytest.mark.parametrize("flag", [0, 1])
@pytest.mark.parametrize("bits", [7, 40, 55])
def test_edges_come_back_from_their_buckets(bits: int, flag: int) -> None:
    generator = np.random.default_rng(0)
    sender, receiver = generator.integers(0, 1 << bits, 500), generator.integers(0, 100, 500)
    keys, edges = np.empty(500, np.uint64), np.empty(500 * flag, np.int64)
    start = deal(sender, receiver, False, BUCKET_OF, BOUNDS[:-1], bits + flag, flag, keys, edges)
    assert start.tolist() == [0, *np.cumsum(np.bincount(BUCKET_OF[receiver])).tolist()]
    found = []
    for bucket in range(3):
        order = np.sort(keys[start[bucket] : start[bucket + 1]])
        senders, degrees = np.empty(order.size, np.int64), np.zeros(BOUNDS[bucket + 1] - BOUNDS[bucket], np.int64)
        assert unpack(order, bits + flag, flag, False, senders, degrees, np.empty(0, np.int64)) == order.size
        found += zip(np.repeat(np.arange(*BOUNDS[bucket : bucket + 2]), degrees), senders, strict=True)
    assert found == sorted(zip(receiver, sender, strict=True))
    assert sorted(edges.tolist()) == list(range(500 * flag))


@pytest.mark.parametrize("text", ["", '{"inputs": {}', '{"inputs": {}}'])
def test_a_damaged_journal_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state.json is damaged .*Delete .* to begin anew"):
        Journal(tmp_path, {})


@pytest.mark.parametrize("bits", [3, 40, 60])
def test_keys_are_put_in_order_and_equal_ones_stay_in_theirs(bits: int) -> None:
    keys = np.random.default_rng(0).integers(0, 1 << bits, 500).astype(np.uint64)
    assert (order_of(keys, bits) == np.argsort(keys, kind="stable")).all()
    assert order_of(keys[:0], bits).size == 0 and order_of(keys[:1], bits).tolist() == [0]
