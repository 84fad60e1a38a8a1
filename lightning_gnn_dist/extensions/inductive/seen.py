"""The graph to train on where held nodes must not be seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch

from lightning_gnn_dist.checks import check_choice, check_instance, shown
from lightning_gnn_dist.graph.graph import Graph

Held = Literal["val", "test"]


def inductive_graph(graph: Graph, leave_out: Sequence[Held] = get_args(Held)) -> Graph:
    """Return the graph to train on where held nodes must not be seen: without them, and without their edges.

        data = PartitionedDataModule(inductive_graph(graph), evaluation=Evaluation(on=graph))

    ``n_id`` holds each node's id in the whole graph, of a graph with types its id in its type. Nodes that no mask marks
    stay. In a graph with types the held nodes are those of the type that is learned from.

    Args:
        graph: The whole graph, with ``train_mask`` and masks of what is held.
        leave_out: The splits whose nodes are left out, ``"val"`` for ``val_mask`` and ``"test"`` for ``test_mask``.
    """
    check_instance("graph", graph, Graph, "a Graph, such as Graph.open(path)")
    if not isinstance(leave_out, list | tuple) or not leave_out:
        raise ValueError(f'leave_out must be a list such as ["val", "test"], got {shown(leave_out)}.')
    stays = torch.ones(graph.num_nodes, dtype=torch.bool)
    for name in leave_out:
        check_choice("leave_out", name, Held)
        held = graph.split(name)
        if not held.numel():
            raise ValueError(f"{name}_mask marks no node: leave {name!r} out of leave_out, or mark what is held.")
        stays[held] = False
    return graph.induced(stays.nonzero().view(-1))
