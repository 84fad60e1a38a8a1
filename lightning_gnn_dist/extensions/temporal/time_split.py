"""Splits of nodes by time: a model learns from the oldest, and is judged by later ones, as in use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_instance, check_word, is_number, shown
from lightning_gnn_dist.extensions.temporal.times import node_times
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.types import GraphTypes


def split_by_time(graph: Graph, time: str = "time", *, val: float = 0.15, test: float = 0.15) -> Graph:
    """Return the graph with masks that put the oldest nodes to training, later ones to validation, the last to testing.

    Nodes of one time stay together, in the later split of the two. Nodes without a label (-1, or NaN) are in none. Of a
    graph with types, the nodes are those of the type that :meth:`Graph.with_seeds` chose, or of the one type that has
    labels and times. Masks that they had before are replaced. The edges are those of all times: a
    :class:`TemporalSampler` shows each node what was there before it. The masks are in RAM: save the graph for ranks to
    open it by its path.

    Args:
        graph: The graph.
        time: Name of the node array that says at what time each node is a seed.
        val: Share of the labelled nodes to validate on.
        test: Share of them to test on.
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    check_word("time", time, "time")
    if not (is_number(val) and is_number(test) and 0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(
            "val and test are shares between 0 and 1 that leave nodes to train on, such as 0.15, got "
            f"{shown(val)} and {shown(test)}."
        )
    graph.check_whole()
    types = graph.types
    kind = (types.seeds or _labelled_type(types, time)) if types.have_names else types.seed_type()
    masks = _masks(types.node_arrays[kind], node_times(graph, time, kind, "time"), val, test)
    arrays = {**types.node_arrays, kind: {**types.node_arrays[kind], **masks}}
    of_edges = {name: dict(of) for name, of in types.edge_arrays.items()}
    seeds = kind if types.have_names else None
    found = replace(types, node_arrays=arrays, edge_arrays=of_edges, seeds=seeds)
    return typed_graph(graph.indptr, graph.indices, found)


def _labelled_type(types: GraphTypes, time: str) -> str:
    found = [kind for kind, arrays in types.node_arrays.items() if "y" in arrays and time in arrays]
    if not found:
        raise ValueError(
            f"time names the array {shown(time)}, and no node type with labels has it: set it in the data of the type, "
            f"as in data[{types.node_types[0]!r}], or choose a type without labels by graph.with_seeds(...)."
        )
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} node types have labels and {shown(time)} ({shown(found)}), and one is split: choose it, as "
            f"in graph.with_seeds({found[0]!r})."
        )
    return found[0]


def _masks(arrays: Mapping[str, Tensor], when: Tensor, val: float, test: float) -> dict[str, Tensor]:
    y = arrays.get("y")
    has_label = torch.ones_like(when, dtype=torch.bool) if y is None else is_labelled(y)
    parts = parted_by_time(when, has_label, val, test)
    masks = {f"{name}_mask": mask for name, mask in parts.items()}
    for name, share in (("train", 1.0), ("val", val), ("test", test)):
        if share and not bool(masks[f"{name}_mask"].any()):
            raise ValueError(
                f"No node is left for {name}: with val={val} and test={test}, {int(has_label.sum())} labelled nodes of "
                f"{when[has_label].unique().numel()} different times are too few, as those of one time stay together."
            )
    return masks


def parted_by_time(when: Tensor, chosen: Tensor, val: float, test: float) -> dict[str, Tensor]:
    """Which of those that are chosen are learned, and which are validated and tested on: the later ones."""
    in_order, count = when[chosen].sort().values, int(chosen.sum())
    begins = [in_order[count - round(share * count) :][:1] for share in (val + test, test)]
    later = [when >= begin if begin.numel() else torch.zeros_like(chosen) for begin in begins]
    return {"train": chosen & ~later[0], "val": chosen & later[0] & ~later[1], "test": chosen & later[1]}


def is_labelled(y: Tensor) -> Tensor:
    """Which rows have a label: no NaN, and not -1 alone."""
    if y.is_floating_point():
        return ~y.isnan() if y.dim() == 1 else ~y.isnan().flatten(1).any(1)
    return y >= 0 if y.dim() == 1 else (y >= 0).flatten(1).any(1)
