"""What ``inspect --nodes`` prints: what exact rows of some nodes cost, beside a pass over all nodes."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.cli.inspecting.columns import in_columns
from lightning_gnn_dist.cli.values import nodes_named
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.graph_report import numbers_per_node
from lightning_gnn_dist.layers.evaluating.choice import bytes_of_batch
from lightning_gnn_dist.layers.reach import Neighbourhoods, Reach

_EDGES, _NODES, _WIDTH, _TIMES = 1 << 16, 1 << 13, 64, 3  # of what is measured, in some milliseconds


class Speed(NamedTuple):
    """What this machine takes on one core.

    Attributes:
        edge: Seconds to gather a number of a sender and add it up.
        node: Seconds to multiply and add a number in a layer's weights.
    """

    edge: float
    node: float

    @classmethod
    def measured(cls) -> Speed:
        """Measure a layer that takes means, the fastest of some tries."""
        draw = torch.Generator().manual_seed(0)
        rows, weight = torch.randn(_NODES, _WIDTH, generator=draw), torch.randn(_WIDTH, _WIDTH, generator=draw)
        senders, receivers = torch.randint(_NODES, (2, _EDGES), generator=draw)
        edge = _seconds(lambda: torch.zeros_like(rows).index_add_(0, receivers, rows[senders]))
        node = _seconds(lambda: rows @ weight)
        return cls(edge / (_EDGES * _WIDTH), node / (_NODES * _WIDTH * _WIDTH))

    def of(self, reach: Reach, width_in: int, width: int) -> float:
        """Return the seconds of a model's layers on a neighbourhood: two weights for each layer, as SAGE has."""
        widths = [width] * (len(reach.edges) - 1) + [width_in]  # the last layer first
        pairs = zip(reach.edges, reach.nodes, widths, strict=False)
        return sum(self.edge * edges * each + 2 * self.node * nodes * each * width for edges, nodes, each in pairs)


def cost_of_nodes(graph: Graph, options: argparse.Namespace) -> str:
    """Return what the rows of the nodes that are named cost, and those of all nodes of their type."""
    kind = graph.types.seed_type()
    ids = graph.types.nodes_of(kind)
    nodes = torch.tensor(nodes_named(options.nodes)).unique()
    if int(nodes.max()) >= len(ids):
        raise ValueError(f"--nodes must lie in [0, {len(ids)}), got {int(nodes.max())}.")
    some = Neighbourhoods(graph, options.layers).of(nodes + ids.start)
    count, edges = graph.num_nodes, graph.num_edges
    every = Reach([len(ids), *[count] * options.layers], [edges] * options.layers)
    speed, width_in = Speed.measured(), numbers_per_node(graph)
    seconds = [speed.of(reach, width_in, options.width) for reach in (some, every)]
    batch = bytes_of_batch(graph, 4 * options.width, some.nodes[-1], some.edges[-1])
    rows = 4 * options.width * count
    share = seconds[0] / seconds[1]
    return "\n".join(
        [
            f"Exact rows of {len(nodes):,} nodes, for layers of width {options.width}, beside a pass over all "
            f"{len(ids):,}:",
            *_table(some, every),
            f"About {seconds[0]:.2g} s on one core, {share:.1%} of the {seconds[1]:.2g} s of a pass, by a layer that "
            f"was measured here ({speed.edge * 1e9:.2g} ns for a number of an edge, {speed.node * 1e9:.2g} ns for one "
            "of a node's weights).",
            f"About {in_bytes(batch)} in one batch, and {in_bytes(rows)} for the rows of a layer of all nodes.",
            _verdict(some, count),
        ]
    )


def _table(some: Reach, every: Reach) -> list[str]:
    """Return what each layer computes, the first layer first."""
    rows = [("layer", "its nodes", "of all", "edges into them", "of all")]
    layers = list(zip(some.nodes, some.edges, every.nodes, every.edges, strict=False))
    for number, (nodes, edges, all_nodes, all_edges) in enumerate(reversed(layers)):
        shares = f"{nodes / all_nodes:.1%}", f"{edges / max(1, all_edges):.1%}"
        rows.append((str(number + 1), f"{nodes:,}", shares[0], f"{edges:,}", shares[1]))
    return in_columns(rows)


def _verdict(some: Reach, count: int) -> str:
    reached = some.nodes[-1] / count
    if reached > 0.5:
        return (
            f"They reach {reached:.0%} of all nodes, so they cost nearly a pass over all: write the rows of all nodes "
            "once, and read these from the file."
        )
    return f"They reach {some.nodes[-1]:,} nodes, {reached:.1%} of all."


def _seconds(work: Callable[[], object]) -> float:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    taken = []
    for _ in range(_TIMES):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    torch.set_num_threads(threads)
    return max(min(taken), 1e-9)
