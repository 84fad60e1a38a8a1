"""Laws of the loader: what runs in the background, and what is left of it."""

import gc
import threading
import time
import traceback
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from lightning_gnn_dist import NeighborSampler
from tests.loaders import Recorder, loader, threads


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


def test_no_more_is_made_than_the_look_ahead_allows():
    sampler = Recorder()
    stream = loader(sampler=sampler, bulk_size=2).stream(0)
    for number, allowed in enumerate((6, 6, 8, 8, 10)):
        next(stream)
        assert wait_until(lambda allowed=allowed: len(sampler.asked) >= allowed)
        time.sleep(0.05)  # if more were begun, it would be seen now
        assert sorted(sampler.asked) == list(range(allowed)), number
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
    sampler = Recorder(seconds=0.01)
    slow = loader(10_000, sampler=sampler, bulk_size=1)
    closer = threading.Thread(target=lambda: wait_until(lambda: sampler.asked) and slow.close())
    closer.start()
    with pytest.raises(RuntimeError, match="closed while it was iterated over"):
        list(slow)
    closer.join()


def close_within_a_bulk(one):
    stream = loader(num_threads=0, bulk_size=3)
    batches = iter(stream)
    next(batches)
    stream.close()
    with pytest.raises(RuntimeError, match="closed while it was iterated over"):
        next(batches)


@pytest.mark.parametrize(
    "leave",
    [
        exhaust,
        stop,
        drop,
        drop_a_cycle,
        fail,
        interrupt,
        close_iterator,
        close_loader,
        close_from_another_thread,
        close_within_a_bulk,
    ],
    ids=lambda f: f.__name__,
)
def test_no_thread_outlives_its_iterator(leave):
    before = set(threading.enumerate())
    one = loader(sampler=Recorder(seconds=0.01), num_threads=2)
    leave(one)
    assert not threads()
    assert set(threading.enumerate()) <= before  # threads of other tests may end meanwhile
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

    one = loader(sampler=Collector(), bulk_size=1)
    held = [one.stream(0)]
    next(held[0])
    assert wait_until(lambda: not threads())


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
    assert len(list(slow)) == slow.waited_seconds == 5
