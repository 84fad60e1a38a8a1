"""Batches that are asked for ahead are those of the whole graph, and a fit ends cleanly, however it ends."""

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_gnn_dist import (
    Correction,
    Evaluation,
    EverySteps,
    Fetch,
    Isolated,
    LLCGStrategy,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    save_shards,
)
from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.extensions.shards.source import ShardedSource
from lightning_gnn_dist.graph.shard import Shard
from lightning_gnn_dist.wire.channel import open_channel
from tests.batch_contents import check_same, contents
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.graph.parted import in_order_of_parts, small_graph, some_partition
from tests.loaders import over
from tests.ranks import join, run_ranks, start_ranks
from tests.sage import Ending
from tests.wire.test_asking import open_ends

SAMPLER = NeighborSampler([4, 3])
DEPTHS = {0: 0, 1: 1, 8: 150_000, 32: 1 << 30}  # bulks: bytes
CACHES = {0: 0, 1: 700, 8: 4000, 32: 1 << 20}


def passes(source: BatchSource, rank: int) -> list[dict[str, Any]]:
    """Ranks have other numbers of batches, leave a pass unfinished, and make corrections and evaluate in between."""
    seeds = torch.arange(20 * rank, 20 * rank + 60)
    loader = over(source, seeds, 5 + rank, seed=rank, bulk_size=3)
    held = over(source, seeds, 2, seed=0, shuffle=False, bulk_size=3)
    whole = GlobalBatches(source, torch.arange(300), 32, 0, 3, None, True, True, lambda: True)
    size = len(loader)
    found = [*loader.between(0, size, 3 * size), *held]
    found += loader.between(size, 2 * size, 3 * size)
    pass_again = loader.between(2 * size, 3 * size)
    found += [next(pass_again) for _ in range(2 + rank)]
    found += [*held, *whole.of_round(1, rank, 4, start=1, stop=6), *whole.of_round(2, rank, 4, start=1, stop=4)]
    found += [*whole.of_round(3, rank, 4, start=1, stop=2), *whole.of_round(5, rank, 4, start=1, stop=3)]
    whole.close()
    pass_again.close()
    found += loader.between(7, 9)
    loader.close()
    held.close()
    return [contents(batch) for batch in found]


def made(rank: int, world_size: int, folder: str, depth: int) -> tuple[list[Any], int, int, int]:
    join(rank, world_size)
    channel = open_channel(world_size)
    before = threading.active_count(), open_ends()
    graph = ShardedGraph(Shard.open(folder, rank), channel, cache_bytes=CACHES[depth])
    source = ShardedSource(graph, SAMPLER, Loading(ahead_bytes=DEPTHS[depth]))
    found = passes(source, rank)
    assert world_size == 1 or (graph.cache.hits > 0) == (depth > 0)
    graph._asking.close()
    return found, source.depth(2), threading.active_count() - before[0], open_ends() - before[1]


@pytest.mark.parametrize(
    ("world_size", "depths"), [(1, [8]), (2, [0, 1, 8, 32]), pytest.param(4, [8], marks=pytest.mark.slow)]
)
def test_batches_are_those_of_the_whole_graph(tmp_path: Path, world_size: int, depths: list[int]) -> None:
    graph = small_graph(edge_arrays=True)
    partition = some_partition(graph, world_size)
    save_shards(graph, partition, tmp_path / "shares")
    source = GraphSource(in_order_of_parts(graph, partition), SAMPLER, all_labels=False)
    expected = [passes(source, rank) for rank in range(world_size)]
    for wanted in depths:
        results = run_ranks(made, world_size, str(tmp_path / "shares"), wanted)
        for theirs, (found, depth, threads, sockets) in zip(expected, results, strict=True):
            assert (threads, sockets) == (0, 0)
            assert 4 <= depth <= 12 if wanted == 8 else depth == wanted
            check_same(found, theirs)


ENDS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 4},
    "limit": {"limit_train_batches": 3, "max_epochs": 2},
    "validation": {"val_check_interval": 3, "limit_val_batches": 1.0, "max_epochs": 2},
    "stopping": {"callbacks": "stopping", "val_check_interval": 2, "limit_val_batches": 1.0},
    "passes": {"max_epochs": 3, "limit_val_batches": 1.0},
    "stopping between": {"callbacks": "stopping", "max_epochs": 9, "limit_val_batches": 1.0},
    "corrections": {"corrects": True, "callbacks": "stopping", "max_epochs": 9, "limit_val_batches": 1.0},
    "exception": {},
    "SIGTERM": {},
}


def fit(folder: str, world_size: int, how: str, options: dict[str, Any]) -> str:
    """Fit once; return what it raised."""
    options, corrects = dict(options), options.get("corrects", False)
    options.pop("corrects", None)
    data = PartitionedDataModule(
        folder,
        sampler=SAMPLER,
        batch_size=4,
        boundary=Isolated() if corrects else Fetch(),
        evaluation=Evaluation(batch_size=20),
        loading=Loading(bulk_size=2),
    )
    options = {"max_epochs": 1, "limit_val_batches": 0} | options
    if options.get("callbacks"):
        options["callbacks"] = [pl.callbacks.EarlyStopping("loss", patience=1, mode="max", min_delta=1e9)]
    strategy: Any = plain_ddp()
    if corrects:
        strategy = LLCGStrategy(EverySteps(2), correction=Correction(2), **PATIENCE)
    fitting = trainer(world_size, strategy, **options)
    try:
        fitting.fit(Ending(5, 3, how, at=4), data)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return f"{fitting.global_step} steps"


def fits(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, int, int]]:
    """What each fit says, and the threads and sockets that it leaves beyond those of the first one."""
    fit(folder, world_size, "first", {"max_steps": 2})
    before, found = (threading.active_count(), open_ends()), {}
    for how, options in ENDS.items():
        said = fit(folder, world_size, how, options)
        with suppress(AttributeError):  # Lightning leaves the handler of a fit that a signal has ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        found[how] = said, threading.active_count() - before[0], open_ends() - before[1]
    return found


@pytest.fixture(scope="module")
def shares(tmp_path_factory: pytest.TempPathFactory) -> str:
    graph, folder = small_graph(), tmp_path_factory.mktemp("graph") / "shares"
    save_shards(graph, some_partition(graph, 2), folder)
    return str(folder)


@pytest.mark.slow
def test_a_fit_leaves_nothing_however_it_ends(shares: str) -> None:
    for found in run_ranks(fits, 2, shares):
        said = {how: text for how, (text, *_) in found.items()}
        assert {how: left for how, (_, *left) in found.items()} == {how: [0, 0] for how in ENDS}
        assert (said["max_steps"], said["limit"], said["stopping"]) == ("4 steps", "6 steps", "4 steps")
        assert said["validation"].endswith("steps") and said["passes"].endswith("steps")
        assert said["stopping between"].endswith("steps") and said["corrections"].endswith("steps")
        assert said["exception"].startswith("ZeroDivisionError") and said["SIGTERM"].startswith("SIGTERMException")


def bereft(rank: int, world_size: int, folder: str) -> tuple[str, list[str]]:
    said = fit(folder, world_size, "SIGKILL", {})
    return said, [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_gnn_dist")]


def test_who_is_left_ends_too(shares: str) -> None:
    with start_ranks(bereft, 2, shares) as ranks:
        said, threads = ranks.results(may_die={1})[0]
    assert said.startswith("RuntimeError") and not threads
