"""Sampled edges per second on the device, beside what its memory allows; the batches are those of a CPU.

The limit is the measured bandwidth of the device's memory over 95 bytes an edge: what drawing, reading and placing one
edge moves.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from gpu_parts.common import DEVICE, NUM_NEIGHBORS, Scale, least_seconds, made_graph
from gpu_parts.rows import Rows

from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.placement import Placement
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.layer_wise import FastGCNSampler, LadiesSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

BYTES_AN_EDGE = 95
GOAL = ("at least", 1.0)  # 10 ** 9 edges per second
SAMPLERS: dict[str, Sampler] = {
    "[15, 10, 5]": NeighborSampler(NUM_NEIGHBORS),
    "with replacement": NeighborSampler(NUM_NEIGHBORS, replace=True),
    "LADIES": LadiesSampler([512, 512, 512]),
    "FastGCN": FastGCNSampler([512, 512, 512]),
}


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    plain = made_graph(scale, 1)
    graph = Graph(plain.indptr, plain.indices)
    most = f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, largest in-degree {int(graph.degrees().max()):,}"
    rows.add("the graph", most)
    limit = bandwidth(scale) / BYTES_AN_EDGE
    rows.add("what the device's memory allows", limit / 1e9, "G edges/s", note=f"{BYTES_AN_EDGE} bytes an edge")
    for name, sampler in SAMPLERS.items():
        with rows.guarded(name):
            of_sampler(rows, scale, graph, name, sampler, limit)


def bandwidth(scale: Scale) -> float:
    source = torch.ones((1 << 28) if scale == Scale() else (1 << 18), device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / least_seconds(lambda: target.copy_(source), scale.repeats)


def of_sampler(rows: Rows, scale: Scale, graph: Graph, name: str, sampler: Sampler, limit: float) -> None:
    resident, there, _ = Placement(DEVICE, "device").of(graph, sampler)
    sizes = (1, 4, 16, 64) if name == "[15, 10, 5]" else (16,)
    seeds = [permutation(graph.num_nodes, 1, i)[: scale.batch_size] for i in range(max(sizes))]
    keys = [BatchKey(0, 0, i) for i in range(max(sizes))]
    expected = sampler.sample_bulk(graph, seeds[:4], keys[:4])
    found = there.sample_bulk(resident, seeds[:4], keys[:4])
    alike = all(
        one.nodes.equal(other.nodes.cpu()) and one.indices.equal(other.indices.cpu())
        for one, other in zip(expected, found, strict=True)
    )
    edges = sum(sample.indices.numel() for sample in expected) / len(expected)
    rows.add(f"{name}: the batches of a CPU", "yes" if alike else "NO", note=f"{edges:,.0f} edges a batch")
    for k in sizes:
        seconds = least_seconds(partial(there.sample_bulk, resident, seeds[:k], keys[:k]), scale.repeats) / k
        rate, goal = edges / seconds, GOAL if name == "[15, 10, 5]" and k == 16 else None
        note = f"{1e3 * seconds:.3f} ms a batch, {rate / limit:.1%} of what the memory allows"
        rows.add(f"{name}: bulks of {k}", rate / 1e9, "G edges/s", goal=goal, note=note)
    seconds = least_seconds(partial(sampler.sample_bulk, graph, seeds[:4], keys[:4]), 1) / 4
    rows.add(f"{name}: in RAM, one thread", edges / seconds / 1e9, "G edges/s", note=f"{1e3 * seconds:.1f} ms a batch")
