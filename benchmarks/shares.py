"""What sampling across shares sends, against the formula, and what bulks and a cache save.

python benchmarks/shares.py                       # four ranks on this machine, a graph of 200,000 nodes
python benchmarks/shares.py --graph DIRECTORY     # a graph saved by Graph.save

For one pass of batches around the training nodes of the own share, fan-out 15 and 10, 1024 seeds: megabytes that a rank
sends and receives, and seconds a batch. With B shares, and rows that lie on other ranks with chance q (1 - 1/B for
random parts, less for METIS), a batch with n nodes, of which f are expanded, and e edges costs

    q (8 f + 4 e) + q (8 + bytes of a row) n'         bytes

where n' of its nodes are counted once a bulk. "Formula" has the q that was seen.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_gnn_dist import (
    Graph,
    MetisPartitioner,
    NeighborSampler,
    Partitioner,
    RandomPartitioner,
    communities,
    save_shares,
)
from lightning_gnn_dist.collectives import open_channel, traffic
from lightning_gnn_dist.sampling.base import BatchKey
from lightning_gnn_dist.scattered.graph import ScatteredGraph
from lightning_gnn_dist.scattered.sampling import batches
from lightning_gnn_dist.scattered.share import Share

RANKS = 4
CUTS: dict[str, Partitioner] = {"random": RandomPartitioner(), "metis": MetisPartitioner()}


def measure(rank: int, folder: str, shares: int, bulk: int, cache: int, num_batches: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    channel = open_channel(shares)
    graph = ScatteredGraph(Share.open(folder, channel.rank), channel, cache_bytes=cache)
    own = graph.share.rows.split("train") + graph.share.first_node
    order = own[torch.randperm(own.numel(), generator=torch.Generator().manual_seed(rank))]
    sampler, formula, before, start = NeighborSampler([15, 10]), 0.0, traffic.bytes_sent, time.perf_counter()
    width = sum(array[:1].numel() * array.element_size() for array in graph.share.rows.node_arrays.values())
    bounds = graph.share.bounds.nodes
    for first in range(0, num_batches, bulk):
        numbers = range(first, first + bulk)
        seeds = [order[torch.arange(i * 1024, (i + 1) * 1024) % order.numel()].unique() for i in numbers]
        made = batches(graph, sampler, seeds, [BatchKey(rank, 0, i) for i in numbers])
        for batch in made:
            expanded = sum(batch.num_sampled_nodes[:-1])
            is_remote = (torch.searchsorted(bounds, batch.n_id[:expanded], right=True) - 1 != channel.rank).float()
            formula += float(is_remote.mean()) * (8 * expanded + 4 * sum(batch.num_sampled_edges))
        union = torch.cat([batch.n_id for batch in made]).unique()
        away = int((torch.searchsorted(bounds, union, right=True) - 1 != channel.rank).sum())
        formula += away * (8 + width)
    sent = torch.tensor([traffic.bytes_sent - before, formula, time.perf_counter() - start, graph.cache.hit_rate])
    dist.all_reduce(sent)
    if rank == 0:
        megabytes, expected, seconds, hits = (sent / RANKS).tolist()
        per_batch = [f"{value / num_batches / 1e6:.2f}" for value in (megabytes, expected)]
        figures = [*per_batch, f"{megabytes / expected - 1:+.1%}", f"{hits:.0%}", f"{seconds / num_batches:.3f}"]
        Path(file).write_text(" | ".join(figures))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--graph", type=Path)
    parser.add_argument("--batches", type=int, default=16)
    options = parser.parse_args()
    graph = communities(200_000, 40, num_features=128) if options.graph is None else Graph.open(options.graph)
    # The ids of the division, so that batches say where their nodes lie.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    print("| parts | shares | bulk | cache | MB a batch | formula | off by | hits | seconds a batch |")
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for cut, partitioner in CUTS.items():
            for shares in (4, 2):
                folder = f"{scratch}/{cut}-{shares}"
                partition = partitioner(graph, shares, seed=0)
                order = partition.assignment.argsort(stable=True)
                arrays = graph.node_arrays | {"n_id": order.argsort()}
                save_shares(Graph(graph.indptr, graph.indices, arrays), partition, folder)
                for bulk, cache in ((1, 0), (8, 0), (8, 10_000_000)):
                    os.environ["MASTER_PORT"] = str(29_600 + shares * 20 + bulk + (cache > 0))
                    file = f"{scratch}/row"
                    mp.spawn(measure, (folder, shares, bulk, cache, options.batches, file), nprocs=RANKS)  # type: ignore[no-untyped-call]
                    print(f"| {cut} | {shares} | {bulk} | {cache // 10**6} MB | {Path(file).read_text()} |", flush=True)


if __name__ == "__main__":
    main()
