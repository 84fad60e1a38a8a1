"""Which reads of features a GPU serves that holds some rows: those that are expected to be read most, and others.

    python benchmarks/memory_plan.py my_graph --batch-size 128 1024        # a saved graph: half a minute, no GPU

Draws 128 training batches for each size, and prints the share of their rows that is held, for tenths of all rows: those
that the memory plan holds, those of nodes that send most edges, and those that these batches did read most, which no
static choice can pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batches import slice_of
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.placement import expected_reads, most_read
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

NUM_BATCHES, BULK_SIZE = 128, 4
SHARES = (0.1, 0.2, 0.5)


def drawn_reads(graph: Graph, sampler: NeighborSampler, batch_size: int) -> Tensor:
    """How many of the batches hold each node."""
    reads = torch.zeros(graph.num_nodes, dtype=torch.float64)
    seeds = graph.split("train")
    in_pass = -(-len(seeds) // batch_size)
    for first in range(0, NUM_BATCHES, BULK_SIZE):
        keys = [BatchKey(0, *divmod(number, in_pass)) for number in range(first, first + BULK_SIZE)]
        orders = {key.epoch: permutation(len(seeds), 0, key.epoch) for key in keys}
        asked = [seeds[orders[key.epoch][slice_of(len(seeds), in_pass, key.batch)]] for key in keys]
        nodes = torch.cat([sample.nodes for sample in sampler.sample_bulk(graph, asked, keys)])
        reads += torch.bincount(nodes, minlength=graph.num_nodes)
    return reads


def lines(graph: Graph, sampler: NeighborSampler, batch_size: int) -> Iterator[str]:
    drawn = drawn_reads(graph, sampler, batch_size)
    choices = {
        "plan": expected_reads(graph, sampler, batch_size),
        "degrees": torch.bincount(graph.indices.to(torch.int64), minlength=graph.num_nodes).to(torch.float64),
        "at best": drawn,
    }
    for share in SHARES:
        room = int(share * graph.num_nodes)
        held = {name: most_read(reads, graph.types, (1,), room)[0] for name, reads in choices.items()}
        found = ", ".join(f"{name} {drawn[ids].sum() / drawn.sum():.1%}" for name, ids in held.items())
        yield f"batches of {batch_size}, {share:.0%} of the rows held: {found}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", help="the directory of a saved graph without types")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1024])
    parser.add_argument("--fanout", type=int, nargs="+", default=[15, 10])
    options = parser.parse_args()
    graph = Graph.open(options.graph)
    for batch_size in options.batch_size:
        for line in lines(graph, NeighborSampler(options.fanout), batch_size):
            print(line, flush=True)


if __name__ == "__main__":
    main()
