"""Batches of a sharded graph are those of the whole graph, and cost what the formula says."""

import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batches import GlobalBatches
from lightning_gnn_dist.batches.source import BatchSource, GraphSource, assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph, ShardedSampler, ShardedSource
from lightning_gnn_dist.wire.channel import open_channel
from lightning_gnn_dist.wire.collectives import traffic
from tests.batch_contents import check_same, contents
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.extensions.asking.test_asking import open_ends
from tests.extensions.shards.graphs import CountingGraph, drawn_of, joined, made_of, opened
from tests.graph.parted import (
    in_order_of_parts,
    in_order_of_shards,
    small_graph,
    some_partition,
    typed_graph_of_widths,
    uneven_partition,
)
from tests.graph.typed.graphs import EDGES
from tests.loaders import over
from tests.ranks import join, run_ranks, start_ranks
from tests.sage import SAGE, Ending
from tests.slow import slow
from tests.wire.test_hosts import InTraining, check_stalled

FANOUTS = [4, 3]


def sent(rank: int, world_size: int, folder: str, shards: int, sampler: ShardedSampler) -> tuple[float, float]:
    """Bytes that a rank sent for its batches, and what the formula says."""
    seeds, keys = [torch.arange(100 * rank, 100 * rank + 100) * 4], [BatchKey(rank, 0, 0)]
    with opened(rank, world_size, folder, shards) as graph:
        before = traffic.bytes_sent
        dist.barrier()  # what others ask for before this is counted would be missed
        (batch,) = made_of(graph, sampler, seeds, keys)
        graph.close()  # all have their answers, and who gave them has counted them
        spent = traffic.bytes_sent - before
    expanded = batch.n_id[: sum(batch.num_sampled_nodes[:-1])]
    others = 1 - 1 / shards  # of random nodes
    width = sum(batch[name][:1].numel() * batch[name].element_size() for name in ARRAYS)
    # As an asker 2 bytes for each node of the frontier and of the batch, for a shard has fewer than 32768, and as an
    # owner the answers to the others, who ask for as much, with a byte for each row's length: of layer-wise samplers,
    # whole rows.
    whole = int(small_graph(4000, 80_000).degrees()[expanded].sum())
    edges = sum(batch.num_sampled_edges) if isinstance(sampler, lgd.NeighborSampler) else whole
    return spent, others * (expanded.numel() * (2 + 1) + edges * 4 + batch.num_nodes * (2 + width))


ARRAYS = ("x", "y", "train_mask", "val_mask", "test_mask", "n_id")


@pytest.mark.parametrize(
    ("sampler", "shards"),
    [(lgd.NeighborSampler([10, 5]), 4), slow(lgd.NeighborSampler([10, 5]), 2), slow(lgd.LadiesSampler([200, 200]), 4)],
    ids=["one copy", "two copies", "ladies"],
)
def test_what_is_sent(tmp_path: Path, shards: int, sampler: ShardedSampler) -> None:
    graph = small_graph(4000, 80_000)
    lgd.save_shards(graph, some_partition(graph, shards), tmp_path / "shares")
    spent, formula = zip(*run_ranks(sent, 4, str(tmp_path / "shares"), shards, sampler), strict=True)
    assert abs(sum(spent) / sum(formula) - 1) < 0.1


PER_TYPE = {kind: [number, 2 - number % 2] for number, kind in enumerate(EDGES)}  # 0 for the first one


def seeds_of(rank: int, world_size: int, nodes: range) -> list[Tensor]:
    """One batch more than ranks before it; the last rank of several asks for nothing."""
    generator = torch.Generator().manual_seed(10 + rank)
    size = 0 if rank and rank == world_size - 1 else min(len(nodes) // 3, 200)
    return [torch.randperm(len(nodes), generator=generator)[: size and size + i] + nodes.start for i in range(rank + 1)]


def keys_of(rank: int, bulk: int, count: int) -> list[BatchKey]:
    return [BatchKey(7 + rank, bulk, i) for i in range(count)]


def drawn(
    rank: int, world_size: int, folders: list[str], num_shards: int, sampler: ShardedSampler, cache: int
) -> list[Any]:
    """Of each graph the contents of the batches of two bulks, and how many rows were held."""
    found = []
    with joined(rank, world_size):
        for folder in folders:
            channel = open_channel(num_shards)
            graph = CountingGraph(Shard.open(folder, channel.rank), channel, cache_bytes=cache)
            seeds = seeds_of(rank, world_size, graph.types.nodes_of(graph.types.seed_type()))
            bulks = [drawn_of(graph, sampler, seeds, keys_of(rank, bulk, len(seeds))) for bulk in range(2)]
            made = graph.answered(graph.fill(bulks[0], bulks[1:], all_labels=rank == 0))
            made += graph.answered(graph.fill(bulks[1], all_labels=rank == 0))
            assert graph.turns == 2 * (sampler.num_hops + 1)  # the rows of all types at once
            graph.close()
            found.append(([contents(batch) for batch in made], graph.cache.hits))
    return found


def compare(
    pairs: list[tuple[lgd.Graph, lgd.Graph, lgd.Partition]],
    sampler: ShardedSampler,
    cache: int,
    folder: Path,
    world_size: int = 0,
) -> None:
    """Compare batches of graphs in shards with those of the same graphs whole, numbered as the shards number them."""
    num_shards = pairs[0][2].num_parts
    world_size = world_size or num_shards
    for number, (graph, _, partition) in enumerate(pairs):
        lgd.save_shards(graph, partition, folder / str(number))
    names = [str(folder / str(number)) for number in range(len(pairs))]
    results = run_ranks(drawn, world_size, names, num_shards, sampler, cache)
    for number, (_, whole, _) in enumerate(pairs):
        nodes = whole.types.nodes_of(whole.types.seed_type())
        for rank, of_rank in enumerate(results):
            found, hits = of_rank[number]
            assert (hits > 0) == (cache > 0 and rank < world_size - 1)
            seeds, expected = seeds_of(rank, world_size, nodes), []
            for bulk in range(2):
                samples = sampler.sample_bulk(whole, seeds, keys_of(rank, bulk, len(seeds)))
                expected += [assemble(whole, sample, all_labels=rank == 0) for sample in samples]
            check_same(found, map(contents, expected))


WEIGHED = {"weight": "edge_weight"}
CASES: dict[str, tuple[int, int, ShardedSampler, bool, int]] = {  # ranks, shards, sampler, edge arrays, cache
    "one copy": (4, 4, lgd.NeighborSampler(FANOUTS), False, 0),
    "cache": (3, 3, lgd.NeighborSampler([-1, 2, 1]), True, 2000),
    "alone": (1, 1, lgd.NeighborSampler(FANOUTS), True, 0),
    "weights": (4, 4, lgd.NeighborSampler(FANOUTS, **WEIGHED), True, 0),
    "ladies": (4, 4, lgd.LadiesSampler([60, 40]), False, 0),
    "ladies alone": (1, 1, lgd.LadiesSampler([90, 60]), False, 0),
    "two copies": (4, 2, lgd.NeighborSampler(FANOUTS, replace=True), True, 0),
    "ladies twice": (4, 2, lgd.LadiesSampler([60, 40], normalize=True, **WEIGHED), True, 0),
}
SLOW = ("two copies", "ladies twice")


@pytest.mark.parametrize("case", [slow(case) if case in SLOW else case for case in CASES])
def test_batches_are_those_of_the_whole_graph(tmp_path: Path, case: str) -> None:
    world_size, shards, sampler, edge_arrays, cache = CASES[case]
    graph = small_graph(edge_arrays=edge_arrays)
    partition = some_partition(graph, shards)
    compare([(graph, in_order_of_parts(graph, partition), partition)], sampler, cache, tmp_path, world_size)


def pair_of(graph: lgd.Graph, num_parts: int) -> tuple[lgd.Graph, lgd.Graph, lgd.Partition]:
    """The graph, which nodes of its largest type are learned from, as shards number it too, and its parts."""
    graph = graph.with_seeds(max(graph.types.node_types, key=lambda kind: graph.types.num_nodes[kind]))
    partition = uneven_partition(graph, num_parts)
    return graph, in_order_of_shards(graph, partition), partition


@pytest.mark.parametrize(
    ("world_size", "sampler", "cache"),
    [
        slow(4, lgd.NeighborSampler([3, 2]), 0),
        slow(2, lgd.NeighborSampler([-1, 2, 1]), 100_000),
        (3, lgd.NeighborSampler(PER_TYPE), 100_000),
        (1, lgd.NeighborSampler([-1, 1]), 0),
        slow(3, lgd.NeighborSampler([2, 3], replace=True), 0),
    ],
    ids=["four", "all neighbours", "per type", "alone", "replace"],
)
def test_batches_of_types_are_too(tmp_path: Path, world_size: int, sampler: lgd.NeighborSampler, cache: int) -> None:
    compare([pair_of(typed_graph_of_widths(seed), world_size) for seed in (0, 2)], sampler, cache, tmp_path)


def odd_graph(num_types: int) -> lgd.Graph:
    """So many edge types between two node types, of which one has few nodes; numbers of 8 and of 16 bits."""
    data, generator = HeteroData(), torch.Generator().manual_seed(0)
    data["a"].x = torch.randint(-99, 99, (40, 3), dtype=torch.int8, generator=generator)
    data["b"].x = torch.randn(2, 5, generator=generator).bfloat16()
    for number in range(num_types):
        ends = ("a", f"r{number}", "b") if number % 2 else ("b", f"r{number}", "a")
        sizes = [40 if end == "a" else 2 for end in ends[::2]]
        data[ends].edge_index = torch.stack([torch.randint(size, (9,), generator=generator) for size in sizes])
    return lgd.Graph.from_pyg(data)


def without_edges() -> lgd.Graph:
    data = HeteroData()
    data["a"].x, data["b"].num_nodes = torch.randn(30, 3), 4
    data["a", "to", "b"].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return lgd.Graph.from_pyg(data)


@pytest.mark.slow
def test_odd_graphs(tmp_path: Path) -> None:
    graphs = [odd_graph(1), odd_graph(2), odd_graph(300), without_edges()]
    compare([pair_of(graph, 3) for graph in graphs], lgd.NeighborSampler([3, 2]), 0, tmp_path)


def corrected(rank: int, world_size: int, folder: str, sampler: ShardedSampler) -> list[Any]:
    """For bulks of one and of four: batches of a round, turns, and bytes sent."""
    found: list[Any] = []
    with joined(rank, world_size):
        for bulk_size in (1, 4):
            graph = CountingGraph(Shard.open(folder, rank), open_channel(world_size))
            whole = GlobalBatches(ShardedSource(graph, sampler, lgd.Loading()), graph.split("train"), 32, 0, bulk_size)
            before = traffic.bytes_sent
            made = [contents(batch) for batch in whole.of_round(3, rank, world_size, start=2, stop=8)]
            graph.close()
            found.append((made, graph.turns, traffic.bytes_sent - before))
    return found


@pytest.mark.parametrize(
    "sampler", [lgd.NeighborSampler(FANOUTS), lgd.LadiesSampler([30, 30])], ids=["neighbor", "ladies"]
)
def test_corrections_are_made_in_bulks(tmp_path: Path, sampler: ShardedSampler) -> None:
    graph = small_graph()
    lgd.save_shards(graph, some_partition(graph, 2), tmp_path / "shares")
    for (one, turns, spent), (four, fewer, less) in run_ranks(corrected, 2, str(tmp_path / "shares"), sampler):
        assert len(one) == 6
        check_same(four, one)
        # The first bulk goes through three exchanges, a second one through two more, each other one through one.
        assert (turns, fewer) == (9, 5) and less < spent


# Batches that are asked for ahead are those of the whole graph, and a fit ends cleanly, however it ends.


SAMPLER = lgd.NeighborSampler([4, 3])
DEPTHS = {0: 0, 1: 1, 8: 150_000, 32: 1 << 30}  # bulks: bytes
CACHES = {0: 0, 1: 700, 8: 4000, 32: 1 << 20}


def passes(source: BatchSource, rank: int) -> list[dict[str, Any]]:
    """Ranks have other numbers of batches, leave a pass unfinished, and make corrections and evaluate in between."""
    seeds = torch.arange(20 * rank, 20 * rank + 60)
    loader = over(source, seeds, 5 + rank, seed=rank, bulk_size=3)
    held = over(source, seeds, 2, seed=0, shuffle=False, bulk_size=3)
    whole = GlobalBatches(source, torch.arange(300), 32, 0, 3, None, True, True)
    size = len(loader)
    found = [*loader.stream(0, size), *held, *loader.stream(size, 2 * size)]
    pass_again = loader.stream(2 * size, 3 * size)
    found += [next(pass_again) for _ in range(2 + rank)]
    found += [*held, *whole.of_round(1, rank, 4, start=1, stop=6), *whole.of_round(2, rank, 4, start=1, stop=4)]
    found += [*whole.of_round(3, rank, 4, start=1, stop=2), *whole.of_round(5, rank, 4, start=1, stop=3)]
    pass_again.close()
    found += loader.stream(7, 9)
    loader.close()
    held.close()
    return [contents(batch) for batch in found]


def made(rank: int, world_size: int, folder: str, depth: int) -> tuple[list[Any], int, int, int]:
    join(rank, world_size)
    channel = open_channel(world_size)
    before = threading.active_count(), open_ends()
    graph = ShardedGraph(Shard.open(folder, rank), channel, cache_bytes=CACHES[depth])
    source = ShardedSource(graph, SAMPLER, lgd.Loading(ahead_bytes=DEPTHS[depth]))
    found = passes(source, rank)
    assert world_size == 1 or (graph.cache.hits > 0) == (depth > 0)
    graph._asking.close()
    return found, source.depth(2), threading.active_count() - before[0], open_ends() - before[1]


@pytest.mark.parametrize(("world_size", "depths"), [(1, [8]), (2, [0, 8]), slow(2, [1, 32]), slow(4, [8])])
def test_batches_that_are_asked_for_ahead_are_too(tmp_path: Path, world_size: int, depths: list[int]) -> None:
    graph = small_graph(edge_arrays=True)
    partition = some_partition(graph, world_size)
    lgd.save_shards(graph, partition, tmp_path / "shares")
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
    data = lgd.PartitionedDataModule(
        folder,
        sampler=SAMPLER,
        batch_size=4,
        boundary=lgd.Isolated() if corrects else lgd.Fetch(),
        evaluation=lgd.Evaluation(batch_size=20),
        loading=lgd.Loading(bulk_size=2),
    )
    options = {"max_epochs": 1, "limit_val_batches": 0} | options
    if options.get("callbacks"):
        options["callbacks"] = [pl.callbacks.EarlyStopping("loss", patience=1, mode="max", min_delta=1e9)]
    strategy: Any = plain_ddp()
    if corrects:
        strategy = lgd.LLCGStrategy(lgd.EverySteps(2), correction=lgd.Correction(2), **PATIENCE)
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
    lgd.save_shards(graph, some_partition(graph, 2), folder)
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


# A rank that stands still while others wait for nodes of its shard is named by them.


class OnShards(InTraining, SAGE):
    pass


def on_shards(rank: int, world_size: int, launch: lgd.Launch, folder: Path) -> None:
    data = lgd.PartitionedDataModule(folder, sampler=lgd.NeighborSampler([3, 3]), batch_size=16)
    strategy = lgd.GrappaStrategy(launch=launch)
    trainer(world_size, strategy, max_epochs=2, limit_val_batches=0).fit(OnShards(12, 4), data)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named(tmp_path: Path) -> None:
    graph = lgd.communities(600, 4, num_features=12, seed=3)
    lgd.save_shards(graph, some_partition(graph, 3), tmp_path / "shards")
    check_stalled(on_shards, tmp_path / "shards")
