"""The arrays of nodes of a graph that has changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.graph.changing.change import IDS, Arrays, Change, Form
from lightning_gnn_dist.graph.typed.names import below_nodes
from lightning_gnn_dist.graph.typed.types import GraphTypes

# The array of a name with room for so many more rows, which may be written to: ``(name, array, count)``.
Room = Callable[[str, Tensor, int], Tensor]


def room_in_ram(_: str, array: Tensor, count: int) -> Tensor:
    """A copy with room for more rows."""
    found = array.new_empty((len(array) + count, *array.shape[1:]))
    found[: len(array)] = array
    return found


def changed_nodes(
    types: GraphTypes, after: Form, changes: Sequence[Change], room: Room
) -> dict[str, dict[str, Tensor]]:
    """The arrays of all nodes after some changes, by type. Those that no change touches are the graph's own."""
    return {kind: _of_type(kind, types, after, changes, room) for kind in after.node_types}


def _of_type(kind: str, types: GraphTypes, after: Form, changes: Sequence[Change], room: Room) -> Arrays:
    known: Mapping[str, Tensor] = types.node_arrays.get(kind, after.node_arrays[kind])
    first = types.num_nodes.get(kind, 0)
    more, found = after.counts[kind] - first, Arrays()
    for name, array in known.items():
        touched = more or any(_touches(change, kind, name) for change in changes)
        found[name] = room(f"{below_nodes(kind)}{name}", array, more) if touched else array
    for change in changes:
        rows = change.nodes.get(kind)
        if rows is None:
            continue
        if change.kind == "extended":
            for name in known:
                found[name][first : first + change.counts[kind]] = rows[name]
            first += change.counts[kind]
        for name in known if change.kind != "extended" else ():
            if _touches(change, kind, name):
                new = rows[name] if change.kind == "updated" else torch.tensor(False)
                found[name][rows[IDS].to(torch.int64)] = new
    return found


def _touches(change: Change, kind: str, name: str) -> bool:
    """Whether a change writes to rows that are there."""
    if change.kind == "extended" or kind not in change.nodes:
        return False
    return name.endswith("_mask") if change.kind == "removed" else name in change.nodes[kind]
