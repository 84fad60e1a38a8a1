"""What ``inspect --device`` prints: what of a graph lies on a GPU, and what training batches read there."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from lightning_gnn_dist.batches.ahead.forecast import drawn_bulks
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.placing.expected_reads import Reads, expected_reads, most_read
from lightning_gnn_dist.batches.placing.memory_plan import MemoryPlan, PlanFigures, Sizes
from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

_MOST_BATCHES = 128  # that are drawn, some seconds' work


def placed_on_device(graph: Graph, options: argparse.Namespace) -> str:
    """Return the plan of one process for each size of memory, with what batches that are drawn read."""
    seeds, sampler = graph.split("train"), NeighborSampler(options.fanout)
    if not len(seeds):
        raise ValueError(f"{options.graph} has no training nodes: --device draws batches around them.")
    drawn = torch.zeros(graph.num_nodes, dtype=torch.float64)
    count = 0
    for samples in drawn_bulks(graph, sampler, seeds, options.batch_size, Loading().bulk_size, _MOST_BATCHES):
        drawn += torch.bincount(torch.cat([sample.nodes for sample in samples]), minlength=graph.num_nodes)
        count += len(samples)
    fanout = ", ".join(map(str, options.fanout))
    title = f"On a GPU, of one process, with batches of {options.batch_size} and fan-out {fanout} ({count} drawn):"
    expected = expected_reads(graph, sampler, options.batch_size).of_nodes
    return "\n".join([title, *_lines(graph, expected, Reads(drawn, count), options)])


def _lines(graph: Graph, expected: torch.Tensor, drawn: Reads, options: argparse.Namespace) -> Iterator[str]:
    sizes = Sizes.of(graph)
    for room in options.device:
        plan = MemoryPlan.within(room, sizes, draws=not have_names(graph.types))
        held = most_read(expected, graph.types, sizes.widths, plan.row_bytes)
        yield f"  {in_bytes(room)}: {PlanFigures.of(plan, graph.types, held, drawn)}"
