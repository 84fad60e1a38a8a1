"""Laws of the loader: what comes, in which order, and what is left running."""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import statistics
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil
import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.loader import THREAD_NAME, BatchLoader
from lightning_gnn_dist.sampling import pool
from lightning_gnn_dist.sampling.base import BatchKey, Sample
from lightning_gnn_dist.sampling.batch import SampledData
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from tests.ranks import run_ranks
from tests.sampling.reference import random_graph

GRAPH = random_graph(300, 3000, seed=1)
SEEDS = torch.arange(10, 67)


def loader(num_batches: int = 5, *, seeds: Tensor = SEEDS, sampler: object = None, **options: object) -> BatchLoader:
    sampler = NeighborSampler([3, 2]) if sampler is None else sampler
    return BatchLoader(options.pop("graph", GRAPH), sampler, seeds, num_batches, **{"seed": 0} | options)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def same(left: SampledData, right: SampledData) -> bool:
    return all(torch.equal(left[name], right[name]) for name in ("n_id", "x", "y", "edge_index", "edge_attr"))


def seeds_of(batches: Sequence[SampledData]) -> list[list[int]]:
    return [batch.n_id[: batch.batch_size].tolist() for batch in batches]


@dataclass(frozen=True)
class Recorder:
    """A sampler that remembers which batches it was asked for, and fails at one of them."""

    fails_at: int = -1
    seconds: float = 0.0
    asked: list[int] = field(default_factory=list)
    num_hops: int = 1

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        time.sleep(self.seconds)
        self.asked.extend(key.epoch * 5 + key.batch for key in keys)
        if any(key.batch == self.fails_at for key in keys):
            raise KeyError("no such neighbourhood")
        return NeighborSampler([2]).sample_bulk(graph, seeds, keys)


def test_a_pass_uses_every_seed_once_in_batches_of_nearly_equal_size():
    parts = seeds_of(list(loader(5)))
    assert sorted(itertools.chain(*parts)) == SEEDS.tolist()
    assert sorted(map(len, parts)) == [11, 11, 11, 12, 12]
    assert len(loader(5)) == 5
    assert loader(5).num_seeds == 57


def test_passes_differ_and_repeat_with_their_number():
    first = loader()
    passes = [seeds_of(list(first)) for _ in range(3)]
    assert passes[0] != passes[1] != passes[2]
    again = loader()
    again.set_epoch(2)
    assert seeds_of(list(again)) == passes[2]
    again.set_epoch(0)
    assert seeds_of(list(again)) == passes[0]
    assert seeds_of(list(again)) == passes[1]
    assert seeds_of(list(loader(seed=1))) != passes[0]


def test_without_shuffling_seeds_come_as_given_but_neighbours_are_drawn_anew():
    still = loader(shuffle=False)
    first, second = list(still), list(still)
    assert list(itertools.chain(*seeds_of(first))) == SEEDS.tolist()
    assert seeds_of(first) == seeds_of(second)
    assert not all(map(same, first, second))


def test_with_fewer_seeds_than_batches_every_batch_gets_one():
    parts = seeds_of(list(loader(7, seeds=torch.tensor([4, 8, 15]))))
    assert [len(part) for part in parts] == [1] * 7
    assert {part[0] for part in parts[:3]} == {4, 8, 15}
    assert parts[3:6] == parts[:3]


@pytest.mark.parametrize("bulk_size", [1, 2, 5, 7])
@pytest.mark.parametrize(("num_threads", "prefetch"), [(0, 1), (1, 1), (1, 3), (3, 4)])
def test_batches_depend_on_no_setting_of_speed(bulk_size, num_threads, prefetch):
    settings = {"bulk_size": bulk_size, "num_threads": num_threads, "prefetch": prefetch}
    plain, tuned = loader(num_threads=0, bulk_size=1), loader(**settings)
    assert all(map(same, itertools.chain(plain, plain), itertools.chain(tuned, tuned)))
    assert all(itertools.starmap(same, zip(plain.stream(3), itertools.islice(tuned.stream(3), 9), strict=False)))


def test_the_stream_is_the_passes_one_after_the_other():
    passes = loader()
    expected = [*passes, *passes, *passes]
    for start in (0, 4, 7):
        stream = loader().stream(start)
        assert all(map(same, itertools.islice(stream, 8), expected[start:]))
        stream.close()
    assert seeds_of(list(passes)) == seeds_of(list(itertools.islice(loader().stream(15), 5)))


def test_a_stream_leaves_the_number_of_the_next_pass_alone():
    one = loader()
    next(one.stream(12))
    assert seeds_of(list(one)) == seeds_of(list(loader()))


def test_lightning_numbers_the_passes_after_it_has_made_the_iterator():
    one = loader()
    iterator = iter(one)
    _set_sampler_epoch(one, 3)
    expected = loader()
    expected.set_epoch(3)
    assert seeds_of(list(iterator)) == seeds_of(list(expected))


def test_an_iterator_starts_nothing_before_its_first_batch():
    sampler = Recorder()
    one = loader(sampler=sampler)
    iterator, stream = iter(one), one.stream(2)
    time.sleep(0.05)
    assert not sampler.asked
    assert not threads()
    del iterator, stream


def test_no_more_is_made_than_the_look_ahead_allows():
    sampler = Recorder()
    stream = loader(sampler=sampler, bulk_size=2, prefetch=2).stream(0)
    next(stream)
    time.sleep(0.2)
    assert sorted(sampler.asked) == [0, 1, 2, 3, 4, 5]
    next(stream)
    time.sleep(0.05)
    assert len(sampler.asked) == 6
    next(stream)
    time.sleep(0.2)
    assert sorted(sampler.asked) == [0, 1, 2, 3, 4, 5, 6, 7]
    stream.close()


def test_without_threads_a_bulk_is_made_when_it_is_due():
    sampler = Recorder()
    stream = loader(sampler=sampler, bulk_size=2, num_threads=0).stream(0)
    next(stream)
    assert sampler.asked == [0, 1]
    assert not threads()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_exception_reaches_the_consumer_with_its_traceback(num_threads):
    with pytest.raises(KeyError, match="no such neighbourhood") as caught:
        list(loader(sampler=Recorder(fails_at=3), num_threads=num_threads, bulk_size=1))
    assert "sample_bulk" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not threads()


def test_batches_before_the_one_that_fails_still_come():
    iterator = iter(loader(sampler=Recorder(fails_at=3), bulk_size=1))
    assert len([next(iterator) for _ in range(3)]) == 3
    with pytest.raises(KeyError):
        next(iterator)


def exhaust(one):
    list(one)


def stop(one):
    for _ in one:
        break


def drop(one):
    iterator = iter(one)
    next(iterator)
    del iterator
    gc.collect()


def drop_a_cycle(one):
    cycle = [iter(one)]
    cycle.append(cycle)
    next(cycle[0])
    del cycle
    gc.collect()


def raise_inside(one, error):
    for _ in one:
        raise error


def fail(one):
    with pytest.raises(ZeroDivisionError):
        raise_inside(one, ZeroDivisionError)


def interrupt(one):
    with pytest.raises(KeyboardInterrupt):
        raise_inside(one, KeyboardInterrupt)


def close_iterator(one):
    stream = one.stream(0)
    next(stream)
    stream.close()


def close_loader(one):
    stream, iterator = one.stream(0), iter(one)
    next(stream)
    next(iterator)
    one.close()
    one.close()
    with pytest.raises(RuntimeError, match="closed while it was iterated over"):
        list(iterator)
    with pytest.raises(RuntimeError, match="closed while it was iterated over"):
        list(stream)


def close_from_another_thread(one):
    slow = loader(sampler=Recorder(seconds=0.2), bulk_size=1)
    closer = threading.Timer(0.3, slow.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed while it was iterated over"):
        list(slow)
    closer.join()


@pytest.mark.parametrize(
    "leave",
    [exhaust, stop, drop, drop_a_cycle, fail, interrupt, close_iterator, close_loader, close_from_another_thread],
    ids=lambda f: f.__name__,
)
def test_no_thread_outlives_its_iterator(leave):
    before = threading.active_count()
    one = loader(sampler=Recorder(seconds=0.01), num_threads=2)
    leave(one)
    assert not threads()
    assert threading.active_count() == before
    assert len(list(one)) == 5  # and the loader can be used again


def test_an_iterator_may_be_collected_by_a_worker():
    one = loader(num_threads=1)

    @dataclass(frozen=True)
    class Collector:
        num_hops: int = 1

        def sample_bulk(self, graph, seeds, keys):
            if keys[0].batch >= 2:
                held.clear()
                gc.collect()
            return NeighborSampler([2]).sample_bulk(graph, seeds, keys)

    one = loader(sampler=Collector(), bulk_size=1, prefetch=3)
    held = [one.stream(0)]
    next(held[0])
    deadline = time.monotonic() + 5
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def test_two_iterators_do_not_disturb_each_other():
    one = loader()
    _ = list(one)
    one.set_epoch(0)
    pairs = list(zip(one, one.stream(0), strict=False))
    assert len(pairs) == 5
    assert all(itertools.starmap(same, pairs))


def test_the_time_that_the_consumer_waits_is_counted():
    slow = loader(sampler=Recorder(seconds=0.05), bulk_size=1, num_threads=1, prefetch=1)
    list(slow)
    assert 0.2 < slow.waited_seconds < 2.0
    patient = loader(sampler=Recorder(seconds=0.02), bulk_size=1, num_threads=1, prefetch=1)
    for _ in patient:
        time.sleep(0.06)
    assert patient.waited_seconds < 0.08


def batches_of_rank(rank: int, world_size: int) -> tuple[list[list[int]], int]:
    return seeds_of(list(loader())), len(threads())


def test_every_process_gets_the_same_batches():
    assert run_ranks(batches_of_rank, 2) == [(seeds_of(list(loader())), 0)] * 2


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_it_works_in_a_forked_process():
    one = loader()
    expected = seeds_of(list(one))
    one.set_epoch(0)
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send((seeds_of(list(one)), len(threads()))))
    process.start()
    assert here.poll(30)
    assert here.recv() == (expected, 0)
    process.join()


def test_a_memory_mapped_graph_gives_the_same_batches(tmp_path):
    GRAPH.save(tmp_path / "graph")
    assert all(map(same, loader(), loader(graph=Graph.open(tmp_path / "graph"))))


def test_a_part_gives_global_ids():
    part = GRAPH.induced(torch.arange(100, 200))
    batches = list(loader(seeds=torch.arange(50), graph=part))
    assert sorted(itertools.chain(*seeds_of(batches))) == list(range(100, 150))


def test_whole_parts_share_what_they_can_and_nothing_else():
    one = loader(1, sampler=WholePartSampler(2))
    first = next(iter(one))
    kept = copy.copy(first)
    first.x, first.y, first.edge_index = first.x * 2, None, first.edge_index[:, :1]
    first.extra = 1
    second = next(iter(one))
    assert same(second, kept)
    assert "extra" not in second
    assert second.x.data_ptr() == kept.x.data_ptr()
    assert second.blocks[0].adj is kept.blocks[0].adj
    assert second.num_nodes == 300
    assert sorted(second.n_id[: second.batch_size].tolist()) == SEEDS.tolist()


def test_kept_batches_never_change(monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 1)
    monkeypatch.setattr(pool, "POOLED_BYTES", 1)
    one = loader(bulk_size=1)
    kept = [(batch, batch.x[:3], batch.x.clone()) for batch in one]
    for _ in range(3):
        for batch in one:
            batch.x.fill_(-1.0)
    assert all(batch.x.equal(copied) and rows.equal(copied[:3]) for batch, rows, copied in kept)


def test_there_are_no_more_buffers_than_promised(monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 1)
    monkeypatch.setattr(pool, "POOLED_BYTES", 1)
    one = loader(20, seeds=torch.arange(300), bulk_size=2, num_threads=2, prefetch=2)
    bound = (2 + 1) * 2 + 1
    # Buffers grow, each to the largest batch that it meets, and have a new address then.
    addresses = [{batch.x.data_ptr() for batch in one} for _ in range(12)]
    assert statistics.median(map(len, addresses)) <= bound
    assert all(pool.num_free <= bound for pool in one._pools.values())
    one.close()
    assert not one._pools


def test_memory_stays_flat_over_many_batches():
    graph = Graph.from_edge_index(torch.randint(20_000, (2, 200_000)), 20_000, {"x": torch.randn(20_000, 64)})
    one = loader(10, graph=graph, seeds=torch.arange(20_000), sampler=NeighborSampler([-1]))
    process = psutil.Process()

    def resident() -> int:
        for _ in range(4):
            for _ in one:
                pass
        return process.memory_info().rss

    resident()
    first = resident()
    assert resident() - first < 20e6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_batches": 0}, r"num_batches must be an integer of at least 1, got 0"),
        ({"num_batches": 2.5}, r"got 2\.5"),
        ({"bulk_size": 0}, "bulk_size"),
        ({"num_threads": -1}, "num_threads"),
        ({"prefetch": 0}, "prefetch"),
        ({"num_threads": 3, "prefetch": 2}, "prefetch must be an integer of at least 3, got 2"),
        ({"seeds": SEEDS[:0]}, "no seeds"),
        ({"seeds": torch.tensor([1, 1])}, "node 1 is given 2 times"),
        ({"seeds": torch.tensor([300])}, r"\[0, 300\)"),
        ({"seeds": torch.ones(300, dtype=torch.bool)}, "Turn a mask into ids"),
    ],
)
def test_useless_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loader(**options)


def test_a_sampler_is_needed():
    with pytest.raises(TypeError, match=r"like NeighborSampler\(\[15, 10\]\), got \[3, 2\]"):
        loader(sampler=[3, 2])


def test_a_stream_begins_at_a_batch():
    with pytest.raises(ValueError, match="batch 0 or later, got -1"):
        loader().stream(-1)
