"""Laws of the loader: what comes, and in which order."""

import copy
import gc
import itertools
import multiprocessing
import pickle
import statistics
import threading
import time
import traceback
import weakref
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist import NeighborSampler, WholePartSampler, communities
from lightning_gnn_dist.batches import pool
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.batches import FORKED, THREAD_NAME, Batches, Deal, GlobalBatches, Learning, OwnSeeds
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.homes.parts import Parts
from lightning_gnn_dist.homes.residency import Plan
from tests.loaders import SEEDS, Recorder, loader, same, seeds_of, threads


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
@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_batches_depend_on_no_setting_of_speed(bulk_size, num_threads):
    settings = {"bulk_size": bulk_size, "num_threads": num_threads}
    plain, tuned = loader(num_threads=0, bulk_size=1), loader(**settings)
    assert all(map(same, itertools.chain(plain, plain), itertools.chain(tuned, tuned)))
    assert all(itertools.starmap(same, zip(plain.stream(3), itertools.islice(tuned.stream(3), 9), strict=False)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_it_works_in_a_forked_process_where_an_open_iterator_does_not_go_on():
    one, context = loader(bulk_size=1), multiprocessing.get_context("fork")
    expected = seeds_of(list(one))
    one.set_epoch(0)
    iterator = iter(loader(bulk_size=1))
    next(iterator)

    def go_on() -> None:
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        there.send((str(caught.value), seeds_of(list(one)), len(threads())))

    here, there = context.Pipe()
    process = context.Process(target=go_on)
    process.start()
    try:
        assert here.poll(240) and here.recv() == (FORKED, expected, 0)
    finally:
        process.kill()
        process.join()
    assert len(list(iterator)) == 4


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


def test_what_whole_parts_share_is_not_written_into():
    one = loader(1, sampler=WholePartSampler(2), num_threads=0)
    next(iter(one)).clone().x.mul_(2)
    batch = next(iter(one))
    batch.x.mul_(2)
    with pytest.raises(RuntimeError, match=r"written into a batch of the whole part, .* batch.clone\(\)"):
        next(iter(one))


def test_there_are_no_more_buffers_than_promised(monkeypatch):
    monkeypatch.setattr(pool, "SMALL_BYTES", 1)
    monkeypatch.setattr(pool, "POOLED_BYTES", 1)
    one = loader(20, seeds=torch.arange(300), bulk_size=2, num_threads=1)
    bound = (2 + 1) * 2 + 1
    # Buffers grow, each to the largest batch that it meets, and have a new address then.
    addresses = [{batch.x.data_ptr() for batch in one} for _ in range(12)]
    assert statistics.median(map(len, addresses)) <= bound
    assert all(pool.num_free <= bound for pool in one.learning(0).source._pools.values())
    one.close()
    assert not one.learning(0).source._pools


# Laws of the loader: what runs in the background, and what is left of it.


def wait_until(it_holds):
    """Whether it comes to that, however busy the machine is."""
    deadline = time.monotonic() + 60
    while not it_holds() and time.monotonic() < deadline:
        time.sleep(0.001)
    return it_holds()


def test_an_iterator_starts_nothing_before_its_first_batch():
    sampler = Recorder()
    one = loader(sampler=sampler)
    iterator, stream = iter(one), one.stream(2)
    time.sleep(0.05)
    assert not sampler.asked
    assert not threads()
    del iterator, stream
    due = Recorder()
    next(loader(sampler=due, bulk_size=2, num_threads=0).stream(0))
    assert due.asked == [0, 1] and not threads()  # without threads, a bulk when it is due


def test_no_more_is_made_than_the_look_ahead_allows():
    sampler = Recorder()
    stream = loader(sampler=sampler, bulk_size=2).stream(0)
    for number, allowed in enumerate((6, 6, 8, 8, 10)):
        next(stream)
        assert wait_until(lambda allowed=allowed: len(sampler.asked) >= allowed)
        time.sleep(0.05)  # if more were begun, it would be seen now
        assert sorted(sampler.asked) == list(range(allowed)), number
    stream.close()


@pytest.mark.parametrize("num_threads", [0, 2])
def test_an_exception_reaches_the_consumer_with_its_traceback(num_threads):
    with pytest.raises(KeyError, match="no such neighbourhood") as caught:
        list(loader(sampler=Recorder(fails_at=3), num_threads=num_threads, bulk_size=1))
    assert "sample_bulk" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert not threads()


def drop(one):
    iterator = iter(one)
    next(iterator)
    del iterator
    gc.collect()


def fail(one):
    with suppress(ZeroDivisionError):
        for _ in one:
            raise ZeroDivisionError


def close_iterator(one):
    stream = one.stream(0)
    next(stream)
    stream.close()


def check_closed(iterator):
    with pytest.raises(RuntimeError, match="closed while it was iterated over"):
        list(iterator)


def close_loader(one):
    stream, iterator = one.stream(0), iter(one)
    next(stream), next(iterator)
    one.close()
    one.close()
    check_closed(iterator), check_closed(stream)


def close_from_another_thread(one):
    sampler = Recorder(seconds=0.01)
    slow = loader(10_000, sampler=sampler, bulk_size=1)
    closer = threading.Thread(target=lambda: wait_until(lambda: sampler.asked) and slow.close())
    closer.start()
    check_closed(slow)
    closer.join()


def close_within_a_bulk(one):
    stream = loader(num_threads=0, bulk_size=3)
    batches = iter(stream)
    next(batches)
    stream.close()
    check_closed(batches)


WAYS = [drop, fail, close_iterator, close_loader, close_from_another_thread, close_within_a_bulk]


@pytest.mark.parametrize("leave", WAYS, ids=lambda way: way.__name__)
def test_no_thread_outlives_its_iterator(leave):
    before = set(threading.enumerate())
    one = loader(sampler=Recorder(seconds=0.01), num_threads=2)
    leave(one)
    assert not threads()
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
    assert len(list(one)) == 5  # and the loader can be used again


def test_the_time_that_the_consumer_waits_is_counted(monkeypatch):
    clock, may_begin, made = [0.0], threading.Semaphore(1), []
    monkeypatch.setattr("lightning_gnn_dist.batches.batches.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    @dataclass(frozen=True)
    class SecondByOne(Recorder):
        def sample_bulk(self, graph, seeds, keys):
            may_begin.acquire()
            clock[0] += 1
            made.append(clock[0])
            return super().sample_bulk(graph, seeds, keys)

    patient = loader(sampler=SecondByOne(), bulk_size=1, num_threads=1)
    for number, _ in enumerate(patient):  # it waits for the first; the others are made while it trains
        may_begin.release()
        assert wait_until(lambda number=number: len(made) == min(number + 2, 5))
    assert patient.waited_seconds == 1
    may_begin.release(5)
    slow = loader(sampler=SecondByOne(), bulk_size=1, num_threads=0)
    assert len(list(slow)) == slow.waited_seconds == 5 and slow.waited_share == 1


# Batches of the whole graph: a function of the round, shared by ranks without overlap.


GRAPH = communities(300, 3, train_share=0.2)


def source_of(num_neighbors: list[int]) -> GraphSource:
    return GraphSource(GRAPH, NeighborSampler(num_neighbors))


@pytest.fixture(scope="module")
def whole() -> GlobalBatches:
    return GlobalBatches(source_of([3, 3]), GRAPH.split("train"), batch_size=16, seed=5)


def seeds(whole: GlobalBatches, *place: int, stop: int = 3) -> list[list[int]]:
    return seeds_of(list(whole.of_round(*place, start=0, stop=stop)))


def test_the_slices_of_all_ranks_are_the_batch(whole: GlobalBatches) -> None:
    batches = seeds(whole, 4)
    slices = [seeds(whole, 4, rank, 3) for rank in range(3)]
    assert [len(batch) for batch in batches] == [16, 16, 16]
    for index, batch in enumerate(batches):
        assert sum((own[index] for own in slices), []) == batch  # noqa: RUF017
        assert len(set(batch)) == 16


def edges(*batches: SampledData) -> set[tuple[int, int, int]]:
    """Every edge by hop and by the ids of its ends."""
    found: set[tuple[int, int, int]] = set()
    for batch in batches:
        for hop, block in enumerate(batch.blocks):
            source, target = batch.n_id[block.edge_index].tolist()
            found |= {(hop, *edge) for edge in zip(source, target, strict=True)}
    return found


def test_slices_see_what_the_whole_sees_and_with_a_fan_out_a_little_more(whole: GlobalBatches) -> None:
    everything = replace(whole, source=source_of([-1, -1]))
    for batches in (everything, whole):
        slices = edges(*(next(batches.of_round(0, rank, 4)) for rank in range(4)))
        expected = edges(next(batches.of_round(0)))
        assert slices == expected if batches is everything else slices > expected


def test_a_round_and_a_place_decide(whole: GlobalBatches) -> None:
    assert seeds(whole, 4) == seeds(whole, 4)
    everything = [tuple(batch) for round_idx in range(3) for batch in seeds(whole, round_idx)]
    assert len(set(everything)) == 9
    later = [batch.n_id.tolist() for batch in whole.of_round(4, start=2, stop=3)]
    assert later == [list(islice(whole.of_round(4), 3))[2].n_id.tolist()]


def test_a_pass_takes_no_seed_twice_and_seeds_are_uniform(whole: GlobalBatches) -> None:
    one_pass = [node for batch in seeds(whole, 0) for node in batch]
    assert len(set(one_pass)) == 48
    counts = torch.zeros(300)
    for round_idx in range(60):
        for batch in seeds(whole, round_idx, stop=6):
            counts[batch] += 1
    train = whole.seeds
    assert counts.sum() == counts[train].sum() == 60 * 6 * 16
    assert counts[train].min() > 0.75 * 96 and counts[train].max() < 1.25 * 96


def test_a_batch_larger_than_the_training_nodes_is_all_of_them(whole: GlobalBatches) -> None:
    large = GlobalBatches(whole.source, whole.seeds, 10**9, 5)
    assert [sorted(batch) for batch in seeds(large, 0, stop=2)] == [whole.seeds.tolist()] * 2


def owned(sizes: list[int], rank: int, batch_size: int = 16) -> GlobalBatches:
    """Batches of ranks that own so many training nodes, one after the other."""
    own = OwnSeeds(GRAPH.split("train").split(sizes)[rank], sum(sizes))
    return GlobalBatches(source_of([3, 3]), own, batch_size, 5, 2)


@pytest.mark.parametrize("sizes", [[60], [30, 30], [43, 0, 2, 15]])
def test_own_seeds_are_dealt_once_a_pass_and_evenly(sizes: list[int]) -> None:
    ranks, train = range(len(sizes)), GRAPH.split("train").tolist()
    assert {owned(sizes, rank).num_batches for rank in ranks} == {3} and len(train) == sum(sizes)
    orders = []
    for round_idx in (0, 3):
        of_ranks = [seeds(owned(sizes, rank), round_idx, rank, len(sizes), stop=6) for rank in ranks]
        for one_pass in (slice(3), slice(3, 6)):
            for size, batches in zip(sizes, of_ranks, strict=True):
                counts = list(map(len, batches[one_pass]))
                assert sum(counts) == size and max(counts) - min(counts) <= 1
            assert sorted(itertools.chain(*(batch for own in of_ranks for batch in own[one_pass]))) == train
        orders.append(of_ranks[0])
    assert orders[0] != orders[1]


# The training loader across super-epochs: the same batches however it is read, and nothing left running.


BATCHES, EVERY = 5, 2


def parts(*, in_background: bool = True) -> Parts:
    graph = lgd.communities(400, 4, num_features=4, train_share=0.3, seed=2)
    partition = lgd.RandomPartitioner()(graph, 4, 0)
    plan = Plan(graph, partition, lgd.Holding(lgd.Rotate()), 4, 0)
    return Parts(plan, 1, lgd.Isolated(), lgd.Coverage(), in_background=in_background)


def learning_of(part: lgd.Graph, num_batches: int = BATCHES) -> Learning:
    return Learning(GraphSource(part, lgd.NeighborSampler([3, 3])), Deal(part.split("train"), num_batches, 5))


def across(source: Parts, *, num_batches: int = BATCHES, weigh: Literal["node", "batch"] = "node") -> Batches:
    return Batches(lambda phase: learning_of(source.at(phase), num_batches), num_batches, every=EVERY, weigh=weigh)


def ids(batches: Any) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in batches]


def test_passes_and_stream_are_the_same_batches() -> None:
    by_pass, streamed = across(parts()), across(parts(in_background=False))
    passes = [batch for _ in range(6) for batch in ids(by_pass)]
    assert ids(islice(streamed.stream(0), 6 * BATCHES)) == passes
    assert ids(islice(across(parts()).stream(13), 12)) == passes[13:25]
    one, other = (across(parts()) for _ in range(2))
    one.set_epoch(4)
    assert ids(one) == passes[4 * BATCHES : 5 * BATCHES]
    assert ids(other) == passes[:BATCHES]


def test_a_checkpoint_says_where_in_a_pass_it_was_written() -> None:
    whole = across(parts())
    whole.set_epoch(3)
    expected = ids(whole)
    stopped = across(parts())
    stopped.set_epoch(3)
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    resumed = across(parts())
    resumed.load_state_dict(stopped.state_dict())
    started = iter(resumed)  # Lightning makes the iterator before it numbers the pass
    resumed.set_epoch(3)
    assert ids(started) == expected[3:]
    assert resumed.state_dict() == {"batches_done": 0}  # at the end of a pass the next one begins
    resumed.set_epoch(3)
    assert ids(resumed) == expected


def test_a_stream_goes_on_after_a_move_to_its_next_part() -> None:
    expected = ids(islice(across(parts()).stream(0), 3 * EVERY * BATCHES))
    source = parts()
    ours = across(source)
    stream = ours.stream(0)
    found = ids(islice(stream, EVERY * BATCHES))
    before = weakref.ref(source.current())
    ours.move_to(EVERY * BATCHES)
    assert source.figures["data/switches"] == 1 and torch.equal(source.current().indices, parts().at(1).indices)
    gc.collect()
    assert before() is None  # the stream does not hold it
    assert found + ids(islice(stream, 2 * EVERY * BATCHES)) == expected
    source.close()


def test_it_moves_to_no_part_without_seeds() -> None:
    source = parts(in_background=False)
    first = source.at(0).indices.clone()

    def make(phase: int) -> Learning:
        part = source.at(phase)
        if not torch.equal(part.indices, first):
            part.node_arrays["train_mask"].zero_()
        return learning_of(part)

    ours = Batches(make, BATCHES, every=EVERY)
    stream = ours.stream(0)
    list(islice(stream, EVERY * BATCHES))
    ours.move_to(EVERY * BATCHES)  # after the last round of a fit
    assert torch.equal(source.current().indices, first)
    with pytest.raises(ValueError, match="no seeds"):
        next(stream)


def test_the_next_part_is_read_in_the_background_and_another_when_it_is_asked_for() -> None:
    source = parts()
    source.at(0)
    source._next[1].result()
    readers: list[str] = []
    source.read = lambda *_: readers.append(threading.current_thread().name)  # type: ignore
    waited = source.figures["data/switch_waited_seconds"]
    source.at(1)  # is there
    assert source.figures["data/switch_waited_seconds"] > waited and source.figures["data/switches"] == 1
    source._next[1].result()
    assert len(readers) == 1 and readers[0].startswith(THREAD_NAME)  # of the one after it
    jumping, expected = parts(), parts(in_background=False).at(2)
    jumping.at(0)
    assert jumping.at(2).node_arrays["n_id"].sort().values.equal(expected.node_arrays["n_id"].sort().values)
    source.close(), jumping.close()


def test_a_failure_in_the_background_reaches_training() -> None:
    source = parts()
    source.at(0)
    source._next[1].result()
    source._boundary = None  # type: ignore[assignment]
    source.at(1)  # is there; the one after it cannot be read
    with pytest.raises(AttributeError):
        source.at(2)
    source.close()


def test_seeds_that_fill_a_pass_up_count_for_nothing() -> None:
    source = parts()
    seeds = source.at(0).split("train").numel()
    ours = across(source, num_batches=seeds + 3)
    batches = list(ours)
    assert [batch.is_filler for batch in batches] == [False] * seeds + [True] * 3
    assert not any(batch.coverage.any() for batch in batches[seeds:])
    assert copy.copy(batches[-1]).to("cpu").is_filler and pickle.loads(pickle.dumps(batches[-1])).is_filler
    source.close()


def test_batch_level_gives_all_seeds_their_mean() -> None:
    by_node, by_batch = across(parts()), across(parts(), weigh="batch")
    for node, batch in zip(by_node, by_batch, strict=True):
        mean = node.coverage[: node.batch_size].mean()
        assert torch.allclose(batch.coverage[: batch.batch_size], mean.expand(batch.batch_size))
