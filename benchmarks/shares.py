"""What sampling across shards sends, against the formula, and what bulks and a cache save.

python benchmarks/shares.py                       # four ranks on this machine, a graph of 200,000 nodes
python benchmarks/shares.py --graph DIRECTORY     # a graph saved by Graph.save
python benchmarks/shares.py --kinds ladies        # or neighbors, corrections, layers, caches

For one pass of batches of 1024 seeds: megabytes that a rank sends and receives, turns (how often it asks the others),
and seconds a batch. With B shards, and rows that lie on other ranks with chance q (1 - 1/B for random parts, less for
METIS), a batch with n nodes, of which f are expanded, and e edges costs

    q (5 f + 4 e) + q (4 + bytes of a row) n'         bytes

where n' of its nodes are counted once a bulk; in shards of less than 32,768 nodes ids take 2 bytes, not 4. "Formula"
has the q that was seen, and no cache.

neighbors      around training nodes of the own shard, fan-out 15 and 10
ladies         as the first with about 2048 nodes a layer: f are counted once a bulk, and e are all edges of their rows
corrections    slices of 256 of a batch around training nodes of the whole graph, fan-out 15 and 10, as in LLCG

And for all nodes by two layers of GraphSAGE with hidden size 64 (predict_by_layer): nodes of a rank's halo, megabytes
that it sends, and seconds. The formula: for each node of the halo 16 and the rows, of every array and the inner layer.

caches         two METIS parts, fan-out 15 and 10, bulks of four: the share of the other part's rows that a cache holds
               when a bulk needs them. It has room for a tenth, a quarter or half of them, and keeps what is needed
               soonest (as here; up to eight bulks are known), what came last (LRU), or what most edges come from, which
               it is given before the start.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Graph,
    LadiesSampler,
    Loading,
    MetisPartitioner,
    NeighborSampler,
    RandomPartitioner,
    communities,
    save_shards,
)
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.ahead import MOST_KNOWN, Caches, RowCache
from lightning_gnn_dist.extensions.passes.prediction import Prediction
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.questions import Message, Question
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph, ShardedSampler, ShardedSource
from lightning_gnn_dist.layers.layer_pass import Work
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.wire.addresses import held_port
from lightning_gnn_dist.wire.channel import CPU, open_channel
from lightning_gnn_dist.wire.collectives import traffic

RANKS = 4
CUTS: dict[str, Partitioner] = {"random": RandomPartitioner(), "METIS": MetisPartitioner()}
NEIGHBORS, LADIES = NeighborSampler([15, 10]), LadiesSampler([2048, 2048])
KINDS: dict[str, tuple[ShardedSampler, int, list[tuple[int, int]]]] = {  # seeds; bulks and caches
    "neighbors": (NEIGHBORS, 1024, [(1, 0), (8, 0), (8, 10_000_000)]),
    "ladies": (LADIES, 1024, [(1, 0), (8, 0)]),
    "corrections": (NEIGHBORS, 256, [(1, 0), (4, 0)]),
}


class Expected:
    """Adds up what the formula says of bulks."""

    def __init__(self, graph: ShardedGraph, degrees: Tensor) -> None:
        self._bounds, self._rank, self._degrees = graph.shard.bounds.nodes, graph.shard.index, degrees
        arrays = graph.shard.rows.node_arrays.values()
        self._width = sum(array[:1].numel() * array.element_size() for array in arrays)
        self.bytes = 0.0

    def add(self, made: Sequence[SampledData], sampler: ShardedSampler) -> None:
        self.bytes += self._away(_distinct([batch.n_id for batch in made])).numel() * (4 + self._width)
        if isinstance(sampler, LadiesSampler):
            for hop in range(sampler.num_hops):
                frontier = [batch.n_id.split(batch.num_sampled_nodes)[hop] for batch in made]
                away = self._away(_distinct(frontier))
                self.bytes += 5 * away.numel() + 4 * int(self._degrees[away].sum())
            return
        for batch in made:
            expanded = batch.n_id[: sum(batch.num_sampled_nodes[:-1])]
            shard = self._away(expanded).numel() / expanded.numel()
            self.bytes += shard * (5 * expanded.numel() + 4 * sum(batch.num_sampled_edges))

    def _away(self, ids: Tensor) -> Tensor:
        return ids[torch.searchsorted(self._bounds, ids, right=True) - 1 != self._rank]


def _distinct(vectors: list[Tensor]) -> Tensor:
    return torch.cat(vectors).unique()


class CountingGraph(ShardedGraph):
    """Knows how often it asked the other ranks something."""

    turns = 0

    def ask(self, questions: list[Question]) -> list[list[Message]]:
        self.turns += 1
        return super().ask(questions)


def measure(rank: int, folder: str, shards: int, kind: str, bulk: int, cache: int, num_batches: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    sampler, size, _ = KINDS[kind]
    channel = open_channel(shards)
    graph = CountingGraph(Shard.open(folder, channel.rank), channel, cache_bytes=cache)
    own = graph.shard.rows.split("train") + graph.shard.first_node
    if kind == "corrections":
        own = graph.split("train")
    order = own[torch.randperm(own.numel(), generator=torch.Generator().manual_seed(rank))]
    expected = Expected(graph, torch.from_numpy(np.load(f"{folder}/degrees.npy")))
    before, turns, seconds = traffic.bytes_sent, graph.turns, 0.0
    bulks = (range(first, first + bulk) for first in range(0, num_batches, bulk))
    asked = (
        (
            [order[torch.arange(i * size, (i + 1) * size) % order.numel()].unique() for i in numbers],
            [BatchKey(rank, 0, i) for i in numbers],
            None,
        )
        for numbers in bulks
    )
    made = ShardedSource(graph, sampler, Loading()).make_in_turn(asked)
    start = time.perf_counter()
    for _, batches in made:
        seconds += time.perf_counter() - start
        expected.add(list(batches), sampler)
        start = time.perf_counter()
    turns_a_batch = (graph.turns - turns) / num_batches
    graph.close()
    seen = torch.tensor(
        [traffic.bytes_sent - before, expected.bytes, seconds, graph.cache.hits / max(1, graph.cache.asked)]
    )
    dist.all_reduce(seen)
    if rank == 0:
        sent, formula, seconds, hits = (seen / RANKS).tolist()
        per_batch = [f"{value / num_batches / 1e6:.2f}" for value in (sent, formula)]
        off = f"{100 * (sent / formula - 1):+.1f} %"
        figures = [*per_batch, off, f"{100 * hits:.0f} %", f"{turns_a_batch:.1f}", f"{seconds / num_batches:.3f}"]
        Path(file).write_text(" | ".join(figures))
    dist.destroy_process_group()


class Layered(pl.LightningModule):
    """Two layers of GraphSAGE, hidden size 64."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.first, self.last = SAGEConv(num_features, 64), SAGEConv(64, 40)

    def layers(self) -> list[Callable[[Any], Tensor]]:
        def one(conv: torch.nn.Module, batch: Any) -> Tensor:
            (block,) = batch.blocks
            rows: Tensor = conv((batch.x, batch.x[: block.num_dst]), block.adj)
            return rows

        return [lambda batch: one(self.first, batch).relu(), lambda batch: one(self.last, batch)]


@torch.inference_mode()
def predict(rank: int, folder: str, file: str) -> None:
    """All nodes by two layers, each rank those of its shard."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=300))
    shard = Shard.open(folder, rank)
    senders = shard.rows.indices.unique().long()
    own = shard.first_node, shard.first_node + shard.rows.num_nodes
    halo = int(((senders < own[0]) | (senders >= own[1])).sum())
    widths = [array[:1].numel() * array.element_size() for array in shard.rows.node_arrays.values()]
    model = Layered(shard.rows.node_arrays["x"].shape[1])
    before, start = traffic.bytes_sent, time.perf_counter()
    work = Work(CPU, None, True, 1 << 30)
    Prediction(model, Path(folder), None, work, lambda batch, rows: None, "").step(torch.zeros(1))
    formula = halo * (2 * 8 + sum([*widths, 4 * 64]))
    seen = torch.tensor([traffic.bytes_sent - before, formula, time.perf_counter() - start, halo])
    dist.all_reduce(seen)
    if rank == 0:
        sent, expected, seconds, nodes = (seen / RANKS).tolist()
        figures = [f"{nodes:,.0f}", f"{sent / 1e6:.1f}", f"{expected / 1e6:.1f}", f"{seconds:.1f}"]
        Path(file).write_text(" | ".join(figures))
    dist.destroy_process_group()


def divide(graph: Graph, partitioner: Partitioner, shards: int, folder: str) -> None:
    """With the ids of the division, so that batches say where their nodes lie."""
    partition = partitioner(graph, shards, seed=0)
    order = partition.assignment.argsort(stable=True)
    arrays = graph.node_arrays | {"n_id": order.argsort()}
    save_shards(Graph(graph.indptr, graph.indices, arrays), partition, folder)
    np.save(f"{folder}/degrees.npy", graph.degrees()[order].numpy())


def compare_caches(graph: Graph, num_batches: int) -> None:
    """Print the hits of the cache, of LRU and of a choice for good."""
    is_own = MetisPartitioner()(graph, 2, seed=0).assignment == 0
    own, num_others = graph.split("train"), int((~is_own).sum())
    own, bulks = own[is_own[own]], []
    for first in range(0, num_batches, 4):
        places = [torch.arange(i * 1024, (i + 1) * 1024) % len(own) for i in range(first, first + 4)]
        keys = [BatchKey(0, 0, i) for i in range(first, first + 4)]
        samples = NEIGHBORS.sample_bulk(graph, [own[at].unique() for at in places], keys)
        nodes = _distinct([sample.nodes for sample in samples])
        bulks.append(nodes[~is_own[nodes]])
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    edges = torch.bincount(graph.indices[is_own[receiver]].long(), minlength=graph.num_nodes).masked_fill_(is_own, 0)
    print("| room | needed soonest | LRU | most edges |\n|---|---|---|---|")
    for share in (0.1, 0.25, 0.5):
        room = int(share * num_others)
        asked = sum(map(len, bulks))
        found = of_soonest(bulks, edges, room), of_latest(bulks, room), of_most(bulks, edges, room)
        soonest, latest, most = (f"{hits / asked:.0%}" for hits in found)
        print(f"| {share:.0%} | {soonest} | {latest} | {most} |")


def of_soonest(bulks: list[Tensor], edges: Tensor, room: int) -> int:
    """The rows that are held by the cache of a fit, which knows the bulks that come."""
    cache = RowCache({}, room, edges.__getitem__)
    caches = Caches([cache], room)
    for number, bulk in enumerate(bulks):
        caches.settle([bulks[number : number + MOST_KNOWN]])
        _, missing = cache.look_up(bulk)
        cache.offer(missing, {})
    return cache.hits


def of_most(bulks: list[Tensor], edges: Tensor, room: int) -> int:
    """The rows that are held if those with most edges are held for good."""
    most = torch.zeros(len(edges), dtype=torch.bool)
    most[edges.argsort(descending=True)[:room]] = True
    return sum(int(most[bulk].sum()) for bulk in bulks)


def of_latest(bulks: list[Tensor], room: int) -> int:
    """The rows that are held if those are that came last."""
    held, hits = torch.empty(0, dtype=torch.int64), 0
    for bulk in bulks:
        is_old = torch.isin(held, bulk)
        hits += int(is_old.sum())
        held = torch.cat([bulk, held[~is_old]])[:room]
    return hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--graph", type=Path)
    parser.add_argument("--batches", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS, "layers", "caches"], default=[*KINDS, "layers"])
    options = parser.parse_args()
    graph = communities(200_000, 40, num_features=128) if options.graph is None else Graph.open(options.graph)
    if "caches" in options.kinds:
        compare_caches(graph, options.batches)
    if options.kinds == ["caches"]:
        return
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        folders = {(cut, shards): f"{scratch}/{cut}-{shards}" for cut in CUTS for shards in (4, 2)}
        for (cut, shards), folder in folders.items():
            divide(graph, CUTS[cut], shards, folder)
        print("| batches | parts | shards | bulk | cache | MB a batch | formula | off by | hits | turns | seconds |")
        print("|---|---|---|---|---|---|---|---|---|---|---|")
        for (cut, shards), folder in folders.items():
            for kind in filter(KINDS.__contains__, options.kinds):
                for bulk, cache in KINDS[kind][2]:
                    figures = on_ranks(measure, folder, shards, kind, bulk, cache, options.batches, f"{scratch}/row")
                    print(f"| {kind} | {cut} | {shards} | {bulk} | {cache // 10**6} MB | {figures} |", flush=True)
        if "layers" in options.kinds:
            print("\n| layers | halo, nodes | MB | formula | seconds |\n|---|---|---|---|---|")
            for cut in CUTS:
                figures = on_ranks(predict, folders[cut, 4], f"{scratch}/row")
                print(f"| {cut} | {figures} |", flush=True)


def on_ranks(function: Callable[..., None], *arguments: Any) -> str:
    """Run it on all ranks; return what it wrote to the file that is its last argument."""
    with held_port() as port:
        os.environ["MASTER_PORT"] = str(port)
        mp.spawn(function, arguments, nprocs=RANKS)  # type: ignore[no-untyped-call]
    return Path(arguments[-1]).read_text()


if __name__ == "__main__":
    main()
