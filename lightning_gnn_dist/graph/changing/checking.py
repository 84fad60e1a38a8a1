"""Refuses changes that do not fit the graph that they are asked of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_ids, shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.changing.change import IDS, PAIRS, Arrays, Change, Form, told_of
from lightning_gnn_dist.graph.typed.names import EdgeType, check_names

_WEIGHTS = ("edge_weight", "edge_attr")  # what models read of edges


def check_change(form: Form, change: Change) -> None:
    """Refuse a change that names what is not there, or lacks what the graph has.

    Args:
        form: What the graph has before it.
        change: What is asked.
    """
    if not change.nodes and not change.edges:
        raise ValueError("Nothing changes: give nodes=, edges= or both.")
    if any(PAIRS not in content for content in change.edges.values()) or any(
        kind not in change.counts if change.kind == "extended" else IDS not in content
        for kind, content in change.nodes.items()
    ):
        raise ValueError(f"A change lacks {PAIRS} or {IDS}, or the numbers of its nodes. Copy the graph again.")
    after = form.after(change)
    convert.check_num_nodes(sum(after.counts.values()))
    if after.has_names:
        check_names(after.node_types, after.edge_types)
    _CHECKS[change.kind](form, after, change)


def _check_extension(form: Form, after: Form, change: Change) -> None:
    for kind, arrays in change.nodes.items():
        with told_of("nodes", kind):
            convert.check_rows("node", arrays, change.counts[kind])
            first = form.counts.get(kind, 0)
            _check_known(arrays, form.node_arrays.get(kind), "node")
            _check_values(arrays, torch.arange(first, first + change.counts[kind]))
            convert.check_time(arrays, form.time, "node")
    for edge_type, content in change.edges.items():
        with told_of("edges", edge_type):
            _check_pairs(edge_type, content[PAIRS], after)
            arrays = {name: array for name, array in content.items() if name != PAIRS}
            convert.check_rows("edge", arrays, content[PAIRS].shape[1])
            _check_known(arrays, form.edge_arrays.get(edge_type), "edge")
            for name in _WEIGHTS:
                if name in arrays:
                    convert.check_finite(arrays[name], name=name, row="edge")
            convert.check_time(arrays, form.time, "edge")


def _check_values(arrays: Arrays, ids: Tensor) -> None:
    """Refuse arrays of some nodes that training could not use."""
    is_target = "y" in arrays and arrays["y"].is_floating_point()
    convert.check_masks(arrays)
    convert.check_arrays({n: a for n, a in arrays.items() if n == "y"}, check_features=False, float_labels=is_target)
    for name in ("x", "x_scale"):
        if name in arrays and bool((bad := ~arrays[name].isfinite().reshape(len(ids), -1).all(1)).any()):
            raise ValueError(f"{name} of node {int(ids[bad][0])} holds NaN or infinity: give finite numbers.")


def check_labels(changes: Sequence[Change], before: Form, nodes: Mapping[str, Arrays]) -> None:
    """Refuse a node that a mask marks, and that is without a label once changes have come to it or its mask.

    Args:
        changes: The changes.
        before: What the graph had before them.
        nodes: The arrays of all nodes after them, by type.
    """
    for kind, arrays in nodes.items():
        if (y := arrays.get("y")) is None:
            continue
        ids = [change.nodes[kind][IDS].to(torch.int64) for change in changes if IDS in change.nodes.get(kind, {})]
        touched = torch.cat([torch.arange(before.counts.get(kind, 0), len(y)), *ids]).unique()
        labels = y[touched]
        without = convert.is_unlabelled(labels) if y.is_floating_point() else (labels < 0) & (labels.dim() == 1)
        names = convert.MASKS if y.is_floating_point() else ("train_mask",)
        for name in names:
            if name in arrays and bool((bad := arrays[name][touched] & without).any()):
                raise ValueError(
                    f"{name} marks node {int(touched[bad][0])}{f' of type {kind!r}' if kind else ''}, which has no "
                    f"label (y is {shown(y[touched[bad][0]].tolist())}): give it one, or take it out of {name}."
                )


def _check_known(arrays: Arrays, known: Arrays | None, row: str) -> None:
    """Refuse arrays that are not those of their type, of the same form; a new type may have any."""
    if known is None:
        convert.check_each_name(arrays, allowed=())
        return
    if missing := [name for name in known if name not in arrays]:
        raise ValueError(f"new {row}s have no {missing[0]}, which the others have: give a row for each of them.")
    _check_alike(arrays, known, row)


def _check_alike(arrays: Arrays, known: Arrays, row: str) -> None:
    for name, array in arrays.items():
        if name not in known:
            raise ValueError(
                f"the {row}s in the graph have no {name:.60} (they have: {shown(list(known))}): leave it out."
            )
        if array.dtype != known[name].dtype or array.shape[1:] != known[name].shape[1:]:
            raise ValueError(
                f"{name} holds {array.dtype} in rows of shape {tuple(array.shape[1:])}, and in the graph "
                f"{known[name].dtype} in rows of shape {tuple(known[name].shape[1:])}: make both in the same way."
            )


def _check_pairs(edge_type: EdgeType, pairs: Tensor, form: Form) -> None:
    convert.check_pairs(pairs)
    for end, kind, ids in zip(("sender", "receiver"), edge_type[::2], pairs, strict=True):
        _check_range(f"{PAIRS} names the {end}", ids, form.counts[kind], kind)


def _check_range(what: str, ids: Tensor, count: int, kind: str) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        bad = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        of_type = f" of type {kind!r}" if kind else ""
        raise ValueError(f"{what} {bad}, but there are {count} nodes{of_type}: ids lie in [0, {count}).")


def _check_nodes(form: Form, nodes: Mapping[str, Arrays]) -> None:
    for kind, content in nodes.items():
        if kind not in form.counts:
            raise ValueError(f"nodes: there is no node type {shown(kind)} (there are: {shown(list(form.node_types))}).")
        with told_of("nodes", kind):
            check_ids(IDS, content[IDS])
            if not content[IDS].numel():
                raise ValueError(f"{IDS} is empty: name the nodes that change, or leave them out.")
            _check_range(f"{IDS} names the node", content[IDS], form.counts[kind], kind)
            convert.check_once(IDS, content[IDS].numel(), content[IDS].unique().numel())


def _check_update(form: Form, _: Form, change: Change) -> None:
    _check_nodes(form, change.nodes)
    for kind, content in change.nodes.items():
        with told_of("nodes", kind):
            arrays, known = {name: array for name, array in content.items() if name != IDS}, form.node_arrays[kind]
            if not arrays:
                raise ValueError("no array changes: give one beside n_id, such as x or y.")
            _check_alike(arrays, known, "node")
            convert.check_rows("node", arrays, content[IDS].numel())
            _check_values(arrays, content[IDS])
            _check_scale(arrays, known)
            if form.time in arrays and _orders_edges(form, kind):
                raise ValueError(
                    f"{form.time} of these nodes orders their edges, and stays: remove the nodes, and add others."
                )


def _check_scale(arrays: Arrays, known: Arrays) -> None:
    """Refuse integers without their scales, or scales without their integers."""
    for name in known:
        scale = f"{name}{convert.SUFFIX}"
        if scale in known and (name in arrays) != (scale in arrays):
            raise ValueError(f"{name} and {scale} belong together: give both, as quantize_rows(x) makes them.")


def _orders_edges(form: Form, kind: str) -> bool:
    """Whether edges come in the order of what nodes of this type say of the time."""
    return any(
        kind == source and form.time not in form.edge_arrays[source, name, target]
        for source, name, target in form.edge_types
    )


def _check_removal(form: Form, _: Form, change: Change) -> None:
    _check_nodes(form, change.nodes)
    for kind, content in change.nodes.items():
        _refuse_more("nodes", kind, content, IDS)
    for edge_type, content in change.edges.items():
        if edge_type not in form.edge_arrays:
            raise ValueError(
                f"edges: there is no edge type {shown(edge_type)} (there are: {shown(list(form.edge_types))})."
            )
        _refuse_more("edges", edge_type, content, PAIRS)
        with told_of("edges", edge_type):
            _check_pairs(edge_type, content[PAIRS], form)


def _refuse_more(argument: str, kind: Any, content: Arrays, only: str) -> None:
    with told_of(argument, kind):
        if more := [name for name in content if name != only]:
            raise ValueError(f"{more} say nothing about what is removed: give {only} alone.")


_CHECKS = {"extended": _check_extension, "updated": _check_update, "removed": _check_removal}
