"""Held edges and their negatives: what is refused of them, by comparing what edges carry, row by row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_arrays, check_word, shown
from lightning_gnn_dist.extensions.links.edges import Edges, check_labels, numbers_of
from lightning_gnn_dist.extensions.links.negatives import has_edges
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled, parted_by_time
from lightning_gnn_dist.extensions.temporal.times import check_times
from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.graph.convert import EDGE_IDS


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


def check_other_types(edges: Edges, name: str) -> None:
    """Refuse labels on edges of other types between the same types of nodes, which may be the same links."""
    for other in edges.others(edges.reverse):
        if name in other.arrays:
            turned = edges.reverse is None and other.kind[::2] == edges.kind[::-2]
            raise ValueError(
                f"Edges of {other.kind} lead between the same types of nodes as those of {edges.kind}, and have an "
                f"array {shown(name)}, too, in which batches could show the labels that are asked for: "
                + (f"if they are the same links turned round, say reverse={other.kind}; otherwise " if turned else "")
                + "give that array another name, or leave it out."
            )


_FEW = 0.1  # of the links of a graph that was meant to be undirected


def settled(edges: Edges, undirected: bool | None) -> bool:
    """Whether pairs of nodes are held back, both directions together; found out where ``undirected`` is None."""
    alone, total = _without_reverse(edges)
    if undirected and alone:
        raise ValueError("undirected=True, but some edges have no reverse: add them, or leave undirected out.")
    if undirected is None and 0 < alone < _FEW * total:
        raise ValueError(
            f"{alone} of {total} edges have no reverse, and all others have one, so a model would mostly be shown what "
            "it is asked for: add the reverses that are missing (torch_geometric.utils.to_undirected), or give "
            "undirected=False, which takes both directions for edges of their own."
        )
    return alone == 0 if undirected is None else undirected


def is_undirected(edges: Edges) -> bool:
    """Whether each link is there in both directions, among nodes of one type."""
    return _without_reverse(edges)[0] == 0


def both_ways(edges: Edges, undirected: bool | None) -> bool:
    """Whether each edge is there as often in both directions, with the same rows; not if that was denied."""
    if undirected is False or not edges.is_among_one_type:
        return False
    arrays = {name: array for name, array in edges.arrays.items() if name != EDGE_IDS}
    there, back = edges.numbers(), edges.numbers(turned=True)
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


def _without_reverse(edges: Edges) -> tuple[int, int]:
    """How many links, each counted once and without loops, have a reverse that is none, and how many there are."""
    if not edges.is_among_one_type:
        return 1, 1
    links = edges.links[:, edges.links[0] != edges.links[1]]
    there, back = (numbers_of(ends, edges.graph.num_nodes).unique() for ends in (links, links.flip(0)))
    return there.numel() - int(torch.isin(there, back, assume_unique=True).sum()), there.numel()


def check_times_of_edges(edges: Edges, time: object, labels: str | None) -> None:
    """Refuse edges without such times, and times that are to be predicted."""
    check_word("time", time, "edge_time")
    assert isinstance(time, str)
    if time == labels:
        raise ValueError(
            f"labels and time both name {shown(time)}, and a target shows its time: to predict when edges are there, "
            "give the labels an array of their own."
        )
    check_times(time, edges.array("time", time), "edge")


def check_reverse_times(edges: Edges, time: str, *, is_sure: bool) -> None:
    """Refuse edges without times that turn events round: they would be seen always.

    These are those of the reverse type, and unless the user named it also of types most of whose edges do.
    """
    others = [] if is_sure else edges.others(edges.reverse)
    alike = [each.kind for each in others if time not in each.arrays and _turns_round(edges, each)]
    if (back := edges.back) is not None and time not in back.arrays:
        alike.insert(0, back.kind)
    if alike:
        raise ValueError(
            f"Edges of {alike[0]} have no array {shown(time)}, so that events would be seen there before they happen: "
            "give them the times of the edges that they turn round, or leave the type out"
            + (
                "."
                if alike[0] == edges.reverse
                else f". If they are others, say what the reverse is, reverse={edges.reverse}."
            )
        )


def check_same_times(edges: Edges, time: str) -> None:
    """Refuse a reverse type that shows events at other times."""
    if (back := edges.back) is None:
        return
    if not is_same(edges.numbers(), back.numbers(turned=True), edges.arrays[time], back.arrays[time]):
        raise ValueError(
            f"Edges of {back.kind} are those of {edges.kind} turned round, and have other times ({time}): an event "
            "would be seen before it is asked for. Give both the same times."
        )


def _turns_round(edges: Edges, others: Edges) -> bool:
    """Whether most edges of a type are those of another turned round."""
    back = others.numbers(turned=True)
    return 2 * int(torch.isin(back, edges.numbers()).sum()) > back.numel()


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


_NEGATIVES_TO_CHECK = 1 << 20  # evenly spread: these take half a second, at every opening


def check_held(
    edges: Edges, held: Mapping[str, Tensor], negatives_of: Mapping[str, Tensor], *, undirected: bool
) -> None:
    """Refuse held edges that occur twice, and negatives that are edges, held or of the graph."""
    size = edges.graph.num_nodes
    numbers = {name: _numbers(of, size, undirected) for name, of in held.items()}
    for name, (there, _) in numbers.items():
        if there.unique().numel() < there.numel():
            raise ValueError(f"{name}: some edges are there twice, and would count twice: edges.unique(dim=1).")
    all_held = torch.cat([torch.cat(both) for both in numbers.values()]) if numbers else torch.zeros(0)
    if len(numbers) == 2 and bool(torch.isin(numbers["val"][0], torch.cat(numbers["test"])).any()):
        raise ValueError("val and test share edges: a model would be chosen by what it is tested on. Deal them again.")
    for name, negatives in negatives_of.items():
        places = torch.arange(0, negatives.numel(), 1 + negatives.numel() // _NEGATIVES_TO_CHECK)
        senders = held[name][0].to(torch.int64)[places // negatives.shape[1]]
        false = torch.stack([senders, negatives.flatten()[places].to(torch.int64)])
        is_edge = has_edges(edges.graph, edges.ends.in_graph(false), edges.ends.target_type.number)
        is_true = is_edge | torch.isin(_numbers(false, size, undirected)[0], all_held)
        if bool(is_true.any()):
            sender, receiver = false[:, is_true][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(is_true.sum())} of {places.numel()} negatives that were seen are edges, such as "
                f"{sender} -> {receiver}, and a model would lose by being right: draw others, or use "
                "split_edges(graph)."
            )


def check_apart(
    edges: Edges,
    held: Mapping[str, Tensor],
    arrays: Mapping[str, Mapping[str, Tensor]],
    labels: str | None,
    time: str | None,
    *,
    undirected: bool,
) -> None:
    """Refuse edges with labels or times that val and test share, and those of val that are later than some of test.

    Args:
        edges: The other edges.
        held: The held edges, by the ids in their types.
        arrays: What they carry.
        labels: The array of their labels, which tell edges of the same ends apart, if there is one.
        time: That of their times.
        undirected: Whether both directions of an edge are the same.
    """
    if held.keys() != {"val", "test"}:
        return
    apart, in_graph = [name for name in (labels, time) if name is not None], edges.ends.in_graph
    val, test = (numbers_of(in_graph(held[p]), edges.graph.num_nodes, undirected=undirected) for p in ("val", "test"))
    counts = counts_of_rows(val, test, [(arrays["val"][name], arrays["test"][name]) for name in apart])
    if shared := int(((counts[0] > 0) & (counts[1] > 0)).sum()):
        raise ValueError(
            f"val and test share edges of the same ends and {' and '.join(apart)} ({shared} of val): a model would be "
            "chosen by what it is tested on. Leave each in one of them."
        )
    if time is not None:
        latest, first = arrays["val"][time].max(), arrays["test"][time].min()
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
    edges: Edges,
    labels: str | None,
    time: str | None,
    held: Mapping[str, Tensor],
    held_arrays: Mapping[str, Mapping[str, Tensor]],
) -> None:
    """Refuse arrays of held edges that are not those of the graph's edges, and held edges without labels."""
    ours = edges.arrays
    if labels is not None:
        edges.labels(labels)
    elif time is not None:
        ours = {time: ours[time]}
    if held.keys() != held_arrays.keys():
        raise ValueError(f"There are edges for {list(held)} and held_arrays for {list(held_arrays)}.")
    for name, arrays in held_arrays.items():
        if arrays.keys() != ours.keys():
            raise ValueError(
                f"held_arrays of {name} are {shown(sorted(arrays))}, and edges of the graph carry "
                f"{shown(sorted(ours))}: batches of both must have the same."
            )
        for array, rows in arrays.items():
            like, count = ours[array], held[name].shape[1]
            if rows.shape != (count, *like.shape[1:]) or rows.dtype != like.dtype:
                raise ValueError(
                    f"held_arrays: {array} of {name} must be {like.dtype} of shape {(count, *like.shape[1:])}, as the "
                    f"graph's is, got {shown(rows)}."
                )
        if labels is not None:
            check_labels(labels, arrays[labels])
            if not bool(is_labelled(arrays[labels]).all()):
                raise ValueError(f"held_arrays: some edges of {name} have no label to be judged by: leave them out.")


_NAMES, _HIDE = ("labels", "time"), "hide"


def names_to_save(names: Mapping[str, str | None], held: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The arrays that :func:`saved_names` reads: none for a split that names no array."""
    named = {key: name for key, name in names.items() if name is not None}
    arrays = {f"links/{split}/{array}": rows for split, of in held.items() for array, rows in of.items()}
    arrays |= {f"links/{key}": torch.tensor(list(name.encode()), dtype=torch.uint8) for key, name in named.items()}
    return arrays | ({f"links/{_HIDE}": torch.tensor([True])} if named else {})


def saved_names(links: dict[str, Tensor], splits: Iterable[str], path: Path) -> dict[str, Any]:
    """Take out of a saved split's arrays what a ``LinkSplit`` is told of labels and times; nothing without these."""
    named = {key: links.pop(key) for key in _NAMES if key in links}
    if not named:
        return {}
    hide = links.pop(_HIDE, torch.empty(0))
    if hide.dtype == torch.bool and hide.numel() == 1 and not bool(hide):
        raise ValueError(f"{path} shows edges that are asked for. {way_out('split_edges.hide')} Split the graph again.")
    if any(name.dtype != torch.uint8 for name in named.values()) or hide.dtype != torch.bool or hide.numel() != 1:
        raise ValueError(f"{path} is damaged (links/{min(named)} or links/hide cannot be read). Copy or save it again.")
    held: dict[str, dict[str, Tensor]] = {split: {} for split in splits}
    for key in list(links):
        split, slash, array = key.partition("/")
        if slash and split in held:
            held[split][array] = links.pop(key)
    words = {key: bytes(name.tolist()).decode(errors="replace") for key, name in named.items()}
    return {**words, "held_arrays": held}
