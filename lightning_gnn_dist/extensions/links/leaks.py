"""Compares what edges carry, row by row: both directions of an edge, copies of labels, times that tell of events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_word, shown
from lightning_gnn_dist.extensions.links.ends import between, links_of, numbers_of
from lightning_gnn_dist.extensions.links.labels import array_of_edges, arrays_of_edges
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled, parted_by_time
from lightning_gnn_dist.extensions.temporal.times import check_times
from lightning_gnn_dist.graph.convert import EDGE_IDS
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType


def numbered_rows(array: Tensor) -> Tensor:
    """A number for each row, the same for equal ones. NaN equals NaN."""
    rows = array.flatten(1) if array.dim() > 1 else array[:, None]
    if rows.is_floating_point():
        rows = torch.cat([rows.nan_to_num(0.0), rows.isnan().to(rows.dtype)], 1)
    numbers: Tensor = rows.unique(dim=0, return_inverse=True)[1]
    return numbers


def counts_of_rows(there: Tensor, back: Tensor, arrays: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """How often each edge occurs among some, and among others.

    Args:
        there: A number for each edge of the first.
        back: A number for each of the others.
        arrays: What the first carry and what the others carry. Edges are equal if their numbers and all of it are.

    Returns:
        A count for each distinct edge among the first, and one among the others.
    """
    kinds = torch.cat([there, back]).unique(return_inverse=True)[1]
    for array, other in arrays if kinds.numel() else ():
        kinds = (kinds * kinds.numel() + numbered_rows(torch.cat([array, other]))).unique(return_inverse=True)[1]
    first, others = kinds.split([there.numel(), back.numel()])
    count = int(kinds.max()) + 1 if kinds.numel() else 0
    return torch.bincount(first, minlength=count), torch.bincount(others, minlength=count)


def is_same(there: Tensor, back: Tensor, array: Tensor, other: Tensor) -> bool:
    """Whether edges with these numbers carry the same rows as those with other numbers, in any order and number."""
    first, others = counts_of_rows(there, back, [(array, other)])
    return torch.equal(first > 0, others > 0)


def check_other_types(graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None, name: str) -> None:
    """Refuse labels on edges of other types between the same types of nodes, which may be the same links."""
    if edge_type is None:
        return
    for kind in between(graph.types, edge_type[0], edge_type[2], edge_type, reverse):
        if name in arrays_of_edges(graph, kind):
            turned = reverse is None and (kind[0], kind[2]) == (edge_type[2], edge_type[0])
            raise ValueError(
                f"Edges of {kind} lead between the same types of nodes as those of {edge_type}, and have an array "
                f"{shown(name)}, too, in which batches could show the labels that are asked for: "
                + (f"if they are the same links turned round, say reverse={kind}; otherwise " if turned else "")
                + "give that array another name, or leave it out."
            )


def check_no_copies(graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None, name: str) -> None:
    """Refuse other arrays that hold the labels, where the edges that are asked for carry messages.

    Rows without a label may differ: held edges have none in the graph, and a copy may tell theirs.
    """
    labels = arrays_of_edges(graph, edge_type)[name]
    known = is_labelled(labels).nonzero().view(-1)
    if not known.numel():
        return
    ours = labels[known].reshape(len(known), -1)
    copies = [
        array
        for array, rows in arrays_of_edges(graph, edge_type).items()
        if array != name and _is_as_wide(rows, labels) and _same(rows[known].reshape(ours.shape), ours)
    ]
    if reverse is not None:
        links = links_of(graph, edge_type)[1][:, known]
        copies += [f"{array} of {reverse}" for array in _copies_turned_round(graph, reverse, name, links, ours)]
    if copies:
        raise ValueError(
            f"hide=False shows edges that are asked for, and their {shown(copies)} are their labels: leave these "
            "arrays out of the data."
        )


def _copies_turned_round(graph: Graph, reverse: EdgeType, name: str, links: Tensor, labels: Tensor) -> list[str]:
    """The arrays of the reverse type that have every label at an edge that turns its own round."""
    back, size = links_of(graph, reverse)[1].flip(0), graph.num_nodes
    pairs = numbers_of(torch.cat([links, back], 1), size).unique(return_inverse=True)[1]
    found = []
    for array, rows in arrays_of_edges(graph, reverse).items():
        if array == name or not _is_as_wide(rows, labels):  # batches leave out the one of that name
            continue
        values = numbered_rows(torch.cat([labels.double(), rows.reshape(len(rows), -1).double()]))
        keys = pairs * len(values) + values
        if bool(torch.isin(keys[: len(labels)], keys[len(labels) :]).all()):
            found.append(array)
    return found


def _is_as_wide(rows: Tensor, labels: Tensor) -> bool:
    """Whether rows have as many numbers each; ``(n,)`` and ``(n, 1)`` have."""
    return not rows.is_complex() and rows[:1].numel() == labels[:1].numel()


def _same(rows: Tensor, labels: Tensor) -> bool:
    return bool(((rows == labels) | (rows.isnan() & labels.isnan())).all())


_FEW = 0.1  # of the links of a graph that was meant to be undirected


def settled(graph: Graph, edge_type: EdgeType | None, undirected: bool | None) -> bool:
    """Whether pairs of nodes are held back, both directions together; found out where ``undirected`` is None."""
    alone, total = _without_reverse(graph, edge_type)
    if undirected and alone:
        raise ValueError("undirected=True, but some edges have no reverse: add them, or leave undirected out.")
    if undirected is None and 0 < alone < _FEW * total:
        raise ValueError(
            f"{alone} of {total} edges have no reverse, and all others have one, so a model would mostly be shown what "
            "it is asked for: add the reverses that are missing (torch_geometric.utils.to_undirected), or give "
            "undirected=False, which takes both directions for edges of their own."
        )
    return alone == 0 if undirected is None else undirected


def is_undirected(graph: Graph, edge_type: EdgeType | None) -> bool:
    """Whether each link is there in both directions, among nodes of one type."""
    return _without_reverse(graph, edge_type)[0] == 0


def both_ways(graph: Graph, edge_type: EdgeType | None, undirected: bool | None) -> bool:
    """Whether each edge is there as often in both directions, with the same rows; not if that was denied."""
    if undirected is False or (edge_type is not None and edge_type[0] != edge_type[2]):
        return False
    arrays = {name: array for name, array in arrays_of_edges(graph, edge_type).items() if name != EDGE_IDS}
    links = links_of(graph, edge_type)[1]
    there, back = (numbers_of(ends, graph.num_nodes) for ends in (links, links.flip(0)))
    if torch.equal(*counts_of_rows(there, back, [(array, array) for array in arrays.values()])):
        return True
    if undirected:
        differs = [name for name, array in arrays.items() if not is_same(there, back, array, array)]
        if not torch.equal(*counts_of_rows(there, back, [])):
            differs.append("how often they are there")
        raise ValueError(
            f"undirected=True, but the two directions of some edge differ in {shown(differs or sorted(arrays))}: add "
            "what is missing, or leave undirected out, and each direction is asked for by itself."
        )
    return False


def _without_reverse(graph: Graph, edge_type: EdgeType | None) -> tuple[int, int]:
    """How many links, each counted once and without loops, have a reverse that is none, and how many there are."""
    if edge_type is not None and edge_type[0] != edge_type[2]:
        return 1, 1
    links = links_of(graph, edge_type)[1]
    links = links[:, links[0] != links[1]]
    there, back = (numbers_of(ends, graph.num_nodes).unique() for ends in (links, links.flip(0)))
    return there.numel() - int(torch.isin(there, back, assume_unique=True).sum()), there.numel()


def check_times_of_edges(
    graph: Graph, edge_type: EdgeType | None, time: object, labels: str | None, *, hide: bool
) -> None:
    """Refuse edges without such times, and times that are to be predicted."""
    check_word("time", time, "edge_time")
    assert isinstance(time, str)
    if time == labels:
        raise ValueError(
            f"labels and time both name {shown(time)}, and a target shows its time: to predict when edges are there, "
            "give the labels an array of their own."
        )
    check_times(time, array_of_edges(graph, edge_type, "time", time), "edge")
    if not hide:
        raise ValueError(
            "hide=False is for splits without time: with time an event is not seen before it has happened, and "
            "afterwards it is."
        )


def check_reverse_times(
    graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None, time: str, *, is_sure: bool
) -> None:
    """Refuse edges without times that turn events round: they would be seen always.

    These are those of the reverse type, and unless the user named it also of types most of whose edges do.
    """
    if edge_type is None:
        return
    others = [] if is_sure else between(graph.types, edge_type[0], edge_type[2], edge_type, reverse)
    timeless = [kind for kind in others if time not in arrays_of_edges(graph, kind)]
    alike = [kind for kind in timeless if _turns_round(graph, edge_type, kind)]
    if reverse is not None and time not in arrays_of_edges(graph, reverse):
        alike.insert(0, reverse)
    if alike:
        raise ValueError(
            f"Edges of {alike[0]} have no array {shown(time)}, so that events would be seen there before they happen: "
            "give them the times of the edges that they turn round, or leave the type out"
            + ("." if alike[0] == reverse else f". If they are others, say what the reverse is, reverse={reverse}.")
        )


def check_same_times(graph: Graph, edge_type: EdgeType | None, reverse: EdgeType, time: str) -> None:
    """Refuse a reverse type that shows events at other times."""
    links, turned = links_of(graph, edge_type)[1], links_of(graph, reverse)[1].flip(0)
    numbers = [numbers_of(ends, graph.num_nodes) for ends in (links, turned)]
    times = [arrays_of_edges(graph, kind)[time] for kind in (edge_type, reverse)]
    if not is_same(*numbers, *times):
        raise ValueError(
            f"Edges of {reverse} are those of {edge_type} turned round, and have other times ({time}): an event would "
            "be seen before it is asked for. Give both the same times."
        )


def _turns_round(graph: Graph, edge_type: EdgeType, kind: EdgeType) -> bool:
    """Whether most edges of a type are those of another turned round."""
    links, turned = links_of(graph, edge_type)[1], links_of(graph, kind)[1].flip(0)
    there, back = (numbers_of(ends, graph.num_nodes) for ends in (links, turned))
    return 2 * int(torch.isin(back, there).sum()) > back.numel()


def by_time(when: Tensor, chosen: Tensor, shares: Mapping[str, float]) -> dict[str, Tensor]:
    """The positions of the events of each split, of those that are chosen."""
    found = parted_by_time(when, chosen, shares["val"], shares["test"])
    count, is_left = int(chosen.sum()), bool(found.pop("train").any())
    for name, share in shares.items():
        if share and not bool(found[name].any()):
            raise ValueError(f"No event is left for {name}: {name}={share} of {count} is none, or all are of one time.")
    if not is_left:
        raise ValueError(f"val and test would hold all {count} events, and none is left to train on: give less.")
    return {name: mask.nonzero().view(-1) for name, mask in found.items() if bool(mask.any())}
