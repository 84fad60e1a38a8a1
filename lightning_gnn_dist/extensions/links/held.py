"""Held edges and their negatives: what is refused of them, and how a saved split tells of their labels and times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_arrays, shown
from lightning_gnn_dist.extensions.links.ends import LinkEnds, numbers_of
from lightning_gnn_dist.extensions.links.labels import arrays_of_edges, check_labels, checked_labels
from lightning_gnn_dist.extensions.links.leaks import counts_of_rows
from lightning_gnn_dist.extensions.links.negatives import has_edges
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of, edge_positions
from lightning_gnn_dist.graph.typed.names import EdgeType

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


def check_each_mapping(**held: object) -> None:
    """Refuse what does not hold arrays by name, for each name of a split."""
    for name, of_splits in held.items():
        if not isinstance(of_splits, Mapping) or not all(isinstance(arrays, Mapping) for arrays in of_splits.values()):
            raise TypeError(
                f'{name} must hold the arrays of each split by name, as {{"val": {{"edge_rating": ...}}}}, got '
                f"{shown(of_splits)}."
            )
        for arrays in of_splits.values():
            check_arrays(**{name: arrays})


def check_held_arrays(
    graph: Graph,
    edge_type: EdgeType | None,
    labels: str | None,
    time: str | None,
    edges: Mapping[str, Tensor],
    held: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse arrays of held edges that are not those of the graph's edges, and held edges without labels."""
    ours = arrays_of_edges(graph, edge_type)
    if labels is not None:
        checked_labels(graph, edge_type, labels)
    elif time is not None:
        ours = {time: ours[time]}
    if edges.keys() != held.keys():
        raise ValueError(f"There are edges for {list(edges)} and held_arrays for {list(held)}.")
    for name, arrays in held.items():
        if arrays.keys() != ours.keys():
            raise ValueError(
                f"held_arrays of {name} are {shown(sorted(arrays))}, and edges of the graph carry "
                f"{shown(sorted(ours))}: batches of both must have the same."
            )
        for array, rows in arrays.items():
            like, count = ours[array], edges[name].shape[1]
            if rows.shape != (count, *like.shape[1:]) or rows.dtype != like.dtype:
                raise ValueError(
                    f"held_arrays: {array} of {name} must be {like.dtype} of shape {(count, *like.shape[1:])}, as the "
                    f"graph's is, got {shown(rows)}."
                )
        if labels is not None:
            check_labels(labels, arrays[labels])
            if not bool(is_labelled(arrays[labels]).all()):
                raise ValueError(f"held_arrays: some edges of {name} have no label to be judged by: leave them out.")


def labelled_in_graph(graph: Graph, edge_type: EdgeType | None, labels: str, edges: Tensor) -> Tensor:
    """Which of some edges, by ids in the graph, have a copy there that has a label."""
    rows = edges[1].unique()
    at = edge_positions(graph.indptr, rows)
    receivers = rows.repeat_interleave(degrees_of(graph.indptr, rows))
    if edge_type is not None:
        is_of = graph.types.edge_type[at] == graph.types.edge_types.index(edge_type)
        at, receivers = at[is_of], receivers[is_of]
        places = torch.searchsorted(graph.types.edges_of(edge_type), at)
    else:
        places = at
    known = is_labelled(arrays_of_edges(graph, edge_type)[labels][places])
    there = graph.indices[at].to(torch.int64) * graph.num_nodes + receivers
    return torch.isin(edges[0] * graph.num_nodes + edges[1], there[known])


_NAMES, _HIDE = ("labels", "time"), "hide"


def names_to_save(
    names: Mapping[str, str | None], held: Mapping[str, Mapping[str, Tensor]], *, hide: bool
) -> dict[str, Tensor]:
    """The arrays that :func:`saved_names` reads: none for a split that names no array."""
    named = {key: name for key, name in names.items() if name is not None}
    arrays = {f"links/{split}/{array}": rows for split, of in held.items() for array, rows in of.items()}
    arrays |= {f"links/{key}": torch.tensor(list(name.encode()), dtype=torch.uint8) for key, name in named.items()}
    return arrays | ({f"links/{_HIDE}": torch.tensor([hide])} if named else {})


def saved_names(links: dict[str, Tensor], splits: Iterable[str], path: Path) -> dict[str, Any]:
    """Take out of a saved split's arrays what a ``LinkSplit`` is told of labels and times; nothing without these."""
    named = {key: links.pop(key) for key in _NAMES if key in links}
    if not named:
        return {}
    hide = links.pop(_HIDE, torch.empty(0))
    if any(name.dtype != torch.uint8 for name in named.values()) or hide.dtype != torch.bool or hide.numel() != 1:
        raise ValueError(f"{path} is damaged (links/{min(named)} or links/hide cannot be read). Copy or save it again.")
    held: dict[str, dict[str, Tensor]] = {split: {} for split in splits}
    for key in list(links):
        split, slash, array = key.partition("/")
        if slash and split in held:
            held[split][array] = links.pop(key)
    words = {key: bytes(name.tolist()).decode(errors="replace") for key, name in named.items()}
    return {**words, "held_arrays": held, "hide": bool(hide)}
