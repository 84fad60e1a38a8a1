"""The graph to train on where held nodes must not be seen, and what is judged on another graph than that."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.boundary.boundary import Isolated
from lightning_gnn_dist.checks import check_choice, check_instance, shown
from lightning_gnn_dist.data.task import NodeTask
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import GraphTypes, TypeNames
from lightning_gnn_dist.homes.access import check_typed, chosen_seed_type, folder_of, graph_of, with_seeds_of
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.run import RunContext
from lightning_gnn_dist.partition.random import RandomPartitioner

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


def task_elsewhere(given: Graph | Data | HeteroData | str | Path, running: RunContext, types: TypeNames) -> NodeTask:
    """Return what is judged on another graph.

    Args:
        given: The graph.
        running: The run.
        types: The types of the graph that is trained on, or of its shards.
    """
    settings = running.settings
    if folder_of(given, "on") is not None:
        raise ValueError(
            f"Evaluation(on={shown(given)}) must be a graph that every host has, and this folder "
            "holds shards: give the data module these shards as its graph, and trainer.test(model, that) or predict."
        )
    graph = graph_of(given)
    check_alike("Evaluation(on=...)", types, graph.types)
    kind = chosen_seed_type(types, None, "this one")
    graph = graph if kind is None else with_seeds_of(graph, kind)
    check_typed(graph.types, settings)
    home = LocalGraph(graph, running, RandomPartitioner(), Holding(), Isolated(), None)
    task = NodeTask(home)
    task.check(graph)
    return task


def check_alike(says: str, trained: TypeNames, judged: TypeNames) -> None:
    """Refuse a graph that a model has no weights for, as it has other types, or features of other widths.

    Args:
        says: Who gives the graph that is judged.
        trained: The types of the graph that is trained on, or of its shards.
        judged: Those of the other.
    """
    known, found = (_names(types) for types in (trained, judged))
    for names, others, has_not in ((found, known, "is trained on"), (known, found, "is judged")):
        if more := [name for name in names if name not in others]:
            raise ValueError(
                f"{says}: the graph that {has_not} has not the types {shown(more)} of the other, and a model has "
                "weights for those that it was trained on: give a graph with the same types, or train on one that has "
                "all of them."
            )
    if found != known:
        raise ValueError(f"{says} has the types {shown(found)}, and the other graph {shown(known)}: order them alike.")
    if isinstance(trained, GraphTypes) and isinstance(judged, GraphTypes):
        _check_widths(says, trained, judged)


def _names(types: TypeNames) -> list[object]:
    return [*types.node_types, *types.edge_types] if types.have_names else []


def _check_widths(says: str, trained: GraphTypes, judged: GraphTypes) -> None:
    for kind, arrays in trained.node_arrays.items():
        of_type = f" of {kind}" if kind else ""
        if (x := arrays.get("x")) is None:
            continue
        other = judged.node_arrays[kind].get("x")
        if other is None:
            raise ValueError(f"{says} has no x{of_type}, which the graph that is trained on has: add it.")
        if other.shape[1:] != x.shape[1:]:
            raise ValueError(
                f"x{of_type} has the shape {tuple(other.shape)} in {says} and {tuple(x.shape)} in the "
                "graph that is trained on: make both features in the same way."
            )


class AnotherGraph:
    """What a data module asks for another graph than its own."""

    task = staticmethod(task_elsewhere)
    check_alike = staticmethod(check_alike)
