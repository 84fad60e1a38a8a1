"""Laws of the loader: what comes, and in which order."""

import copy
import itertools
import multiprocessing
import statistics
from collections.abc import Callable

import pytest
import torch
from lightning.fabric.utilities.data import _set_sampler_epoch

from lightning_gnn_dist import Graph, NeighborSampler, WholePartSampler
from lightning_gnn_dist.batches import pool
from lightning_gnn_dist.batches.batches import FORKED
from tests.loaders import SEEDS, loader, same, seeds_of, threads
from tests.memory import give_back_at_once, reads_memory, resident_bytes
from tests.ranks import run_ranks


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


def test_two_iterators_do_not_disturb_each_other():
    one = loader()
    _ = list(one)
    one.set_epoch(0)
    pairs = list(zip(one, one.stream(0), strict=False))
    assert len(pairs) == 5
    assert all(itertools.starmap(same, pairs))


def in_a_fork(function: Callable[[], object]) -> object:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=lambda: there.send(function()))
    process.start()
    try:
        assert here.poll(240)
        return here.recv()
    finally:
        process.kill()
        process.join()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_it_works_in_a_forked_process():
    one = loader()
    expected = seeds_of(list(one))
    one.set_epoch(0)
    assert in_a_fork(lambda: (seeds_of(list(one)), len(threads()))) == (expected, 0)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_an_open_iterator_does_not_go_on_in_a_forked_process():
    iterator = iter(loader(bulk_size=1))
    next(iterator)

    def go_on() -> str:
        with pytest.raises(RuntimeError) as caught:
            next(iterator)
        return str(caught.value)

    assert in_a_fork(go_on) == FORKED
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


def growth(rank: int, world_size: int) -> int:
    """Bytes that four more epochs of some thirty megabytes of rows each add."""
    give_back_at_once()
    graph = Graph.from_edge_index(torch.randint(20_000, (2, 200_000)), 20_000, {"x": torch.randn(20_000, 64)})
    one = loader(100, graph=graph, seeds=torch.arange(20_000), sampler=NeighborSampler([-1]))

    def resident() -> int:
        for _ in range(4):
            for _ in one:
                pass
        return resident_bytes("RssAnon")

    resident()
    first = resident()
    return resident() - first


@reads_memory
@pytest.mark.slow
def test_memory_stays_flat_over_many_batches():
    assert run_ranks(growth, 1)[0] < 20e6  # four batches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seeds": SEEDS[:0]}, "no seeds"),
        ({"seeds": torch.tensor([1, 1])}, "node 1 is given 2 times"),
    ],
)
def test_useless_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        loader(**options)
