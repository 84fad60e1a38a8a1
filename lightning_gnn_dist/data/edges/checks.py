"""What is refused of held links and their negatives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.data.edges.dealing import numbers_of
from lightning_gnn_dist.data.edges.leaks import counts_of_rows
from lightning_gnn_dist.data.typed.links import LinkEnds
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.negatives import has_edges

_NEGATIVES_TO_CHECK = 1 << 20  # evenly spread: these take half a second, at every opening


def check_held(
    graph: Graph,
    ends: LinkEnds,
    edges_of: Mapping[str, Tensor],
    negatives_of: Mapping[str, Tensor],
    *,
    undirected: bool,
) -> None:
    """Refuse held edges that occur twice, and negatives that are edges, held or of the graph."""
    size = graph.num_nodes
    numbers = {name: _numbers(edges, size, undirected) for name, edges in edges_of.items()}
    for name, (there, _) in numbers.items():
        if there.unique().numel() < there.numel():
            raise ValueError(f"{name}: some edges are there twice, and would count twice: edges.unique(dim=1).")
    held = torch.cat([torch.cat(both) for both in numbers.values()]) if numbers else torch.zeros(0)
    if len(numbers) == 2 and bool(torch.isin(numbers["val"][0], torch.cat(numbers["test"])).any()):
        raise ValueError("val and test share edges: a model would be chosen by what it is tested on. Deal them again.")
    kind = ends.target_type
    for name, negatives in negatives_of.items():
        places = torch.arange(0, negatives.numel(), 1 + negatives.numel() // _NEGATIVES_TO_CHECK)
        senders = edges_of[name][0].to(torch.int64)[places // negatives.shape[1]]
        false = torch.stack([senders, negatives.flatten()[places].to(torch.int64)])
        is_edge = has_edges(graph, ends.in_graph(false), kind and kind.number)
        is_true = is_edge | torch.isin(_numbers(false, size, undirected)[0], held)
        if bool(is_true.any()):
            sender, receiver = false[:, is_true][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(is_true.sum())} of {places.numel()} negatives that were seen are edges, such as "
                f"{sender} -> {receiver}, and a model would lose by being right: draw others, or use "
                "split_edges(graph)."
            )


def check_apart(
    graph: Graph,
    ends: LinkEnds,
    edges_of: Mapping[str, Tensor],
    held: Mapping[str, Mapping[str, Tensor]],
    names: Mapping[str, str | None],
    *,
    undirected: bool,
) -> None:
    """Refuse edges with labels or times that val and test share, and those of val that are later than some of test.

    Args:
        graph: The graph of the other edges.
        ends: Between which nodes the edges are.
        edges_of: The held edges, by the ids in their types.
        held: What they carry.
        names: Under ``"labels"`` and ``"time"`` the arrays that tell edges of the same ends apart, if there are any.
        undirected: Whether both directions of an edge are the same.
    """
    if edges_of.keys() != {"val", "test"}:
        return
    parts, apart = ("val", "test"), [name for name in names.values() if name is not None]
    val, test = (numbers_of(ends.in_graph(edges_of[p]), graph.num_nodes, undirected=undirected) for p in parts)
    counts = counts_of_rows(val, test, [(held["val"][name], held["test"][name]) for name in apart])
    if shared := int(((counts[0] > 0) & (counts[1] > 0)).sum()):
        raise ValueError(
            f"val and test share edges of the same ends and {' and '.join(apart)} ({shared} of val): a model would be "
            "chosen by what it is tested on. Leave each in one of them."
        )
    if (time := names["time"]) is not None:
        latest, first = held["val"][time].max(), held["test"][time].min()
        if bool(latest > first):
            raise ValueError(
                f"val has events until {time}={latest.item()}, and test from {first.item()} on: a model would be "
                "chosen by what happens after events that it is tested on. Let those of val be the earlier ones."
            )


def check_rivals(name: str, edges: Tensor, negatives: Tensor) -> None:
    """Refuse negatives of an edge that lead to its own receiver."""
    if bool((rivals_itself := (negatives == edges[1][:, None]).any(1)).any()):
        sender, receiver = edges[:, rivals_itself][:, 0].tolist()
        raise ValueError(
            f"{name}: {int(rivals_itself.sum())} of {edges.shape[1]} edges are among their own negatives (the "
            f"first is {sender} -> {receiver}): the receivers of an edge's negatives must be others than its own."
        )


def _numbers(edges: Tensor, num_nodes: int, undirected: bool) -> tuple[Tensor, Tensor]:
    """Return a number for each edge, and that of its reverse if undirected, else the same number again."""
    sender, receiver = edges.to(torch.int64)
    there = sender * num_nodes + receiver
    return there, receiver * num_nodes + sender if undirected else there
