"""The training loader across super-epochs: the same batches however it is read, and nothing left running."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from itertools import islice
from typing import Any, Literal

import pytest
import torch

from lightning_gnn_dist import (
    Coverage,
    Graph,
    Holding,
    Isolated,
    NeighborSampler,
    RandomPartitioner,
    Rotate,
    communities,
)
from lightning_gnn_dist.batches.batches import THREAD_NAME, Batches, Deal, Learning
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.homes.parts import PartReader, PartSwitcher

BATCHES, EVERY = 5, 2


def parts(*, in_background: bool = True) -> PartSwitcher:
    graph = communities(400, 4, num_features=4, train_share=0.3, seed=2)
    partition = RandomPartitioner()(graph, 4, 0)
    reader = PartReader(graph, partition, Holding(Rotate()), 1, 4, 0, Isolated(), Coverage())
    return PartSwitcher(reader, in_background=in_background)


def learning_of(part: Graph, num_batches: int = BATCHES) -> Learning:
    return Learning(GraphSource(part, NeighborSampler([3, 3])), Deal(part.split("train"), num_batches, 5))


def loader(source: PartSwitcher, *, num_batches: int = BATCHES, weigh: Literal["node", "batch"] = "node") -> Batches:
    return Batches(lambda phase: learning_of(source.at(phase), num_batches), num_batches, every=EVERY, weigh=weigh)


def ids(batches: Any) -> list[list[int]]:
    return [batch.n_id.tolist() for batch in batches]


def test_passes_and_stream_are_the_same_batches() -> None:
    by_pass, streamed = loader(parts()), loader(parts(in_background=False))
    passes = [batch for _ in range(6) for batch in ids(by_pass)]
    assert ids(islice(streamed.stream(0), 6 * BATCHES)) == passes
    assert ids(islice(loader(parts()).stream(13), 12)) == passes[13:25]
    one, other = (loader(parts()) for _ in range(2))
    one.set_epoch(4)
    assert ids(one) == passes[4 * BATCHES : 5 * BATCHES]
    assert ids(other) == passes[:BATCHES]


def test_a_checkpoint_says_where_in_a_pass_it_was_written() -> None:
    whole = loader(parts())
    whole.set_epoch(3)
    expected = ids(whole)
    stopped = loader(parts())
    stopped.set_epoch(3)
    iterator = iter(stopped)
    for _ in range(3):
        next(iterator)
    resumed = loader(parts())
    resumed.load_state_dict(stopped.state_dict())
    started = iter(resumed)  # Lightning makes the iterator before it numbers the pass
    resumed.set_epoch(3)
    assert ids(started) == expected[3:]
    assert resumed.state_dict() == {"batches_done": 0}  # at the end of a pass the next one begins
    resumed.set_epoch(3)
    assert ids(resumed) == expected


def test_a_stream_goes_on_after_a_move_to_its_next_part() -> None:
    expected = ids(islice(loader(parts()).stream(0), 3 * EVERY * BATCHES))
    source = parts()
    ours = loader(source)
    stream = ours.stream(0)
    found = ids(islice(stream, EVERY * BATCHES))
    before = weakref.ref(source.current())
    ours.move_to(EVERY * BATCHES)
    assert source.switches == 1 and torch.equal(source.current().indices, parts().at(1).indices)
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


def test_the_next_part_is_read_in_the_background() -> None:
    source = parts()
    source.at(0)
    assert source._next is not None
    source._next[1].result()
    readers: list[str] = []
    object.__setattr__(source._reader, "read", lambda *_: readers.append(threading.current_thread().name))
    waited = source.waited_seconds
    source.at(1)  # is there
    assert source.waited_seconds > waited and source.switches == 1
    source._next[1].result()
    assert len(readers) == 1 and readers[0].startswith(THREAD_NAME)  # of the one after it
    source.close()


def test_a_jump_reads_what_was_not_foreseen() -> None:
    expected = parts(in_background=False).at(2)
    source = parts()
    source.at(0)
    assert torch.equal(source.at(2).node_arrays["n_id"].sort().values, expected.node_arrays["n_id"].sort().values)
    source.close()


def test_a_failure_in_the_background_reaches_training() -> None:
    source = parts()
    source.at(0)
    assert source._next is not None
    source._next[1].result()
    object.__setattr__(source._reader, "partition", None)
    source.at(1)  # is there; the one after it cannot be read
    with pytest.raises(AttributeError):
        source.at(2)
    source.close()


def test_nothing_is_left_running() -> None:
    source = parts()
    ours = loader(source)
    next(iter(ours))
    ours.close()
    source.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def test_seeds_that_fill_a_pass_up_count_for_nothing() -> None:
    source = parts()
    seeds = source.at(0).split("train").numel()
    ours = loader(source, num_batches=seeds + 3)
    batches = list(ours)
    assert [batch.is_filler for batch in batches] == [False] * seeds + [True] * 3
    assert not any(batch.coverage.any() for batch in batches[seeds:])
    assert copy.copy(batches[-1]).to("cpu").is_filler and pickle.loads(pickle.dumps(batches[-1])).is_filler
    source.close()


def test_batch_level_gives_all_seeds_their_mean() -> None:
    by_node, by_batch = loader(parts()), loader(parts(), weigh="batch")
    for node, batch in zip(by_node, by_batch, strict=True):
        mean = node.coverage[: node.batch_size].mean()
        assert torch.allclose(batch.coverage[: batch.batch_size], mean.expand(batch.batch_size))
