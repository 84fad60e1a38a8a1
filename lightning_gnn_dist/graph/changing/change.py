"""What is asked of a graph that changes: nodes and edges that come, change or go."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import as_ids, check_at_least, check_list, check_plain, check_tensor, shown
from lightning_gnn_dist.graph.typed.names import EdgeType, OneType, within
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.graph.user_ids import Ids

Kind = Literal["extended", "updated", "removed"]
Arrays = dict[str, Tensor]
_USERS = "id"  # ids in the user's tables
IDS, PAIRS = "n_id", "edge_index"  # which nodes of a type, and which edges, a change is about


@dataclass(frozen=True, eq=False)
class Change:
    """One change of a graph.

    Attributes:
        kind: What becomes of the nodes and edges.
        nodes: By type, the arrays of new nodes; of others ``n_id``, their ids in the type, and the arrays that change.
        edges: By type, ``edge_index``, which counts both ends in their types, and the arrays of new edges.
        counts: How many new nodes of each type there are.
        ids: By type, the ids that the user's tables have for new nodes.
    """

    kind: Kind
    nodes: Mapping[str, Arrays]
    edges: Mapping[EdgeType, Arrays]
    counts: Mapping[str, int]
    ids: dict[str, Ids] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Form:
    """What a graph has of each type, without its rows.

    Attributes:
        counts: The number of nodes of each type.
        node_arrays: The arrays of each node type, without rows.
        edge_arrays: The arrays of each edge type, without rows.
        time: The array that edges are ordered by, see :class:`GraphTypes`.
    """

    counts: Mapping[str, int]
    node_arrays: Mapping[str, Arrays]
    edge_arrays: Mapping[EdgeType, Arrays]
    time: str | None

    @classmethod
    def of(cls, types: GraphTypes) -> Form:
        nodes = {kind: _without_rows(arrays) for kind, arrays in types.node_arrays.items()}
        edges = {kind: _without_rows(types.edge_arrays[kind]) for kind in types.edge_types}
        return cls(types.num_nodes, nodes, edges, types.time)

    @property
    def node_types(self) -> tuple[str, ...]:
        return tuple(self.counts)

    @property
    def edge_types(self) -> tuple[EdgeType, ...]:
        return tuple(self.edge_arrays)

    @property
    def has_names(self) -> bool:
        return self.node_types != OneType.node_types

    def after(self, change: Change) -> Form:
        """What the graph has once it is changed."""
        if change.kind != "extended":
            return self
        counts = dict(self.counts)
        for kind, count in change.counts.items():
            counts[kind] = counts.get(kind, 0) + count
        new_nodes = {kind: _without_rows(arrays) for kind, arrays in change.nodes.items()}
        new_edges = {kind: _without_rows(_but(arrays, PAIRS)) for kind, arrays in change.edges.items()}
        nodes, edges = {**new_nodes, **self.node_arrays}, {**new_edges, **self.edge_arrays}
        return replace(
            self,
            counts=counts,
            node_arrays={kind: nodes[kind] for kind in counts},
            edge_arrays={kind: edges[kind] for kind in dict.fromkeys([*self.edge_arrays, *change.edges])},
        )


@contextmanager
def told_of(argument: str, kind: Any) -> Iterator[None]:
    """Let refusals name the argument, and of which type what they refuse is."""
    try:
        with within(kind):
            yield
    except (ValueError, TypeError) as error:
        kind_of_error = TypeError if isinstance(error, TypeError) else ValueError
        raise kind_of_error(f"{argument}: {error}") from error


def extension(form: Form, nodes: object, edges: object, new_types: Sequence[str | EdgeType] = ()) -> Change:
    """New nodes and edges as a user gives them; masks that are left out mark none of the nodes, and labels are none."""
    found, counts, ids = dict[str, Arrays](), dict[str, int](), dict[str, Ids]()
    of_nodes = _by_type("nodes", nodes, form.has_names, OneType.node_types[0])
    links = _by_type("edges", edges, form.has_names, OneType.edge_types[0], PAIRS)
    _check_new_types(form, [*of_nodes], [*links], new_types)
    for kind, content in of_nodes.items():
        with told_of("nodes", kind):
            if _USERS in content and _USERS not in form.node_arrays.get(kind, {}):
                ids[kind] = np.asarray(content.pop(_USERS))
            arrays = _tensors(_but(content, "num_nodes"))
            counts[kind] = _count(content, arrays)
            found[kind] = _with_defaults(arrays, form.node_arrays.get(kind, {}), counts[kind])
    return Change("extended", found, {kind: _pairs(kind, content) for kind, content in links.items()}, counts, ids)


def _check_new_types(form: Form, nodes: list[Any], edges: list[Any], new_types: object) -> None:
    """Refuse types that the graph has not, unless they are said to be new: a name may be misspelt."""
    check_list("new_types", new_types, '["venue", ("paper", "appears_in", "venue")]')
    assert isinstance(new_types, list | tuple)
    is_new = [kind for kind in nodes if kind in new_types]
    for argument, kinds, known in (("nodes", nodes, form.node_types), ("edges", edges, form.edge_types)):
        for kind in kinds:
            is_between = argument == "edges" and isinstance(kind, tuple) and any(end in is_new for end in kind[::2])
            if kind not in known and kind not in new_types and not is_between:
                raise ValueError(
                    f"{argument}: there is no type {shown(kind)} (there are: {shown(list(known))}): is it misspelt? "
                    f"A new one is asked for by new_types=[{shown(kind)}]."
                )
    for kind in new_types:
        if kind in (*form.node_types, *form.edge_types) or kind not in (*nodes, *edges):
            raise ValueError(f"new_types: {shown(kind)} is there already, or nothing of it is given: leave it out.")


def update(form: Form, nodes: object) -> Change:
    """New values of arrays of some nodes, as a user gives them."""
    found = {kind: _ids(kind, rows) for kind, rows in _by_type("nodes", nodes, form.has_names, "").items()}
    return Change("updated", found, {}, {})


def removal(form: Form, nodes: object, edges: object) -> Change:
    """Nodes and edges that go, as a user gives them."""
    found = {kind: _ids(kind, rows) for kind, rows in _by_type("nodes", nodes, form.has_names, "", IDS).items()}
    links = _by_type("edges", edges, form.has_names, OneType.edge_types[0], PAIRS)
    return Change("removed", found, {kind: _pairs(kind, content) for kind, content in links.items()}, {})


def _by_type(name: str, given: object, has_names: bool, only: Any, bare: str = "") -> dict[Any, dict[str, Any]]:
    """What is given of each type; ``bare`` names the array that may stand there without its name."""
    if given is None:
        return {}
    if not has_names:
        return {only: _content(name, given, bare)}
    if not isinstance(given, Mapping):
        raise TypeError(
            f"{name} of a graph with types must be given by type, {name}={{type: ...}}, got {shown(given)}."
        )
    return {kind: _content(f"{name}[{kind!r}]", content, bare) for kind, content in given.items()}


def _content(name: str, given: object, bare: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        if wrong := [key for key in given if not isinstance(key, str)]:
            raise TypeError(f"{name} must have arrays by their names, got the name {shown(wrong[0])}.")
        return dict(given)
    if not bare:
        raise TypeError(f"{name} must be arrays by name, such as {{'x': ...}}, got {shown(given)}.")
    return {bare: given}


def _tensors(content: Mapping[str, Any]) -> Arrays:
    found = {}
    for name, value in content.items():
        array = as_ids(value) if name == IDS else value
        check_tensor(name, array, "one row for each node, or each edge")
        found[name] = array.detach().cpu().contiguous()
        check_plain(name, found[name])
    return found


def _count(content: Mapping[str, Any], arrays: Arrays) -> int:
    """The number of new nodes of a type: as it is given, or as their arrays show."""
    if (count := content.get("num_nodes")) is None:
        rows = [len(array) for array in arrays.values() if array.dim()]
        if not rows:
            raise ValueError("nothing says how many new nodes there are: give their x, or num_nodes.")
        count = rows[0]
    check_at_least(1, num_nodes=count)
    return int(count)


def _with_defaults(arrays: Arrays, known: Arrays, count: int) -> Arrays:
    """The arrays of new nodes, with masks that mark none, and labels that are none, where these are left out."""
    found = dict(arrays)
    for name, like in known.items():
        if name in found:
            continue
        if name.endswith("_mask"):
            found[name] = torch.zeros(count, dtype=torch.bool)
        elif name == "y" and (like.is_floating_point() or like.dtype in (torch.int64, torch.int32, torch.int16)):
            found[name] = torch.full((count, *like.shape[1:]), float("nan") if like.is_floating_point() else -1).to(
                like
            )
    return found


def _pairs(kind: EdgeType, content: Mapping[str, Any]) -> Arrays:
    with told_of("edges", kind):
        if content.get(PAIRS) is None:
            raise ValueError(f"there is no {PAIRS}, which says the ends of each edge, of shape (2, E).")
        found = _tensors(content)
        if not found[PAIRS].is_floating_point() and not found[PAIRS].is_complex():
            found[PAIRS] = found[PAIRS].to(torch.int64)
        return found


def _ids(kind: str, content: Mapping[str, Any]) -> Arrays:
    with told_of("nodes", kind):
        if content.get(IDS) is None:
            raise ValueError(f"there is no {IDS}, which says the ids of the nodes in their type.")
        return _tensors(content)


def _without_rows(arrays: Mapping[str, Tensor]) -> Arrays:
    return {name: array[:0] for name, array in arrays.items()}


def _but(arrays: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {each: array for each, array in arrays.items() if each != name}
