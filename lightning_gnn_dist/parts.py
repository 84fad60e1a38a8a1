"""What a rank holds: its part of the graph, copied into RAM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.sampling.rng import permutation

Scope = Literal["part", "graph"]
_PURPOSE = 1 << 42  # added to the seed, so that these draws have nothing to do with others


@dataclass(frozen=True)
class ExtraNodes:
    """Random nodes of other parts that go with a part: the LLCG paper's subgraph approximation.

    They send messages and are not learned from.

    Args:
        share: How many, as a share of the nodes that ``of`` names.
        of: ``"part"`` or ``"graph"``.
        seed: Decides which; the same in every run.
    """

    share: float
    of: Scope
    seed: int

    def __post_init__(self) -> None:
        check_scope("extra_of", self.of)
        if not 0.0 <= self.share <= 1.0:
            raise ValueError(f"extra_nodes is a share, between 0 and 1, got {self.share!r}.")

    def __call__(self, partition: Partition, rank: int) -> Tensor:
        if not self.share:
            return torch.empty(0, dtype=torch.int64)
        inside = partition.assignment == rank
        outside = (~inside).nonzero().view(-1)
        base = int(inside.sum()) if self.of == "part" else inside.numel()
        count = min(round(self.share * base), outside.numel())
        return outside[permutation(outside.numel(), self.seed + _PURPOSE, rank)[:count]]


def copy_part(graph: Graph, partition: Partition, rank: int, extra: ExtraNodes) -> Graph:
    """The nodes of a part and the edges among them, with local ids. Costs memory for the part alone."""
    own = partition.nodes(rank)
    # A memory map of its own, closed after the copy: the pages it read are not held on to.
    graph = Graph.open(graph.path) if graph.path else graph
    part = graph.induced(torch.cat([own, extra(partition, rank)]))
    part.node_arrays["train_mask"][own.numel() :] = False  # a copy: the graph's own mask stays
    return part


def count_train_nodes(graph: Graph, partition: Partition | None) -> list[int]:
    """Training nodes of every part. Every rank sees the same counts, so all of them raise or none."""
    seeds = graph.split("train")
    if not seeds.numel():
        raise ValueError("train_mask marks no node: there is nothing to learn from.")
    if partition is None:
        return [seeds.numel()]
    counts: list[int] = torch.bincount(partition.assignment[seeds], minlength=partition.num_parts).tolist()
    if 0 in counts:
        raise ValueError(
            f"Part {counts.index(0)} of {len(counts)} holds none of the {seeds.numel()} training nodes, so its rank "
            'would have nothing to learn from: use fewer ranks, MetisPartitioner(balance="train") or '
            "RandomPartitioner()."
        )
    return counts


def check_fits(partition: Partition, num_parts: int, graph: Graph) -> None:
    """A ready partition must be one of this graph, with a part for every rank."""
    if partition.num_parts != num_parts or partition.assignment.numel() != graph.num_nodes:
        raise ValueError(
            f"The partition has {partition.num_parts} parts of {partition.assignment.numel()} nodes in all, but "
            f"{num_parts} ranks train on a graph of {graph.num_nodes} nodes: give a partitioner instead, "
            "or as many parts as ranks."
        )


def check_scope(name: str, scope: str) -> None:
    if scope not in get_args(Scope):
        raise ValueError(f"{name} must be one of {list(get_args(Scope))}, got {scope!r}.")
