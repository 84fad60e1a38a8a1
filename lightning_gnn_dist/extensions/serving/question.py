"""What a request may ask, and its checks: nothing of it is trusted.

    {"nodes": [3, "new:0"], "new": {"x": [[...], ...]}, "edges": [[17, "new:0"], ["new:0", 17]]}

An edge is its sender and its receiver, in the direction messages go. An integer is the id of a node of the graph, and
``"new:0"`` the first new node. In a graph with types ids are those in a type, ``new`` is by node types, ``edges`` is by
edge types, ``author__writes__paper``, and what is asked for are nodes of the type that is learned from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import LABELS
from lightning_gnn_dist.checks import Count, Positive, check_fields, shown
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import degrees_of
from lightning_gnn_dist.graph.typed.types import EdgeType, folder_of
from lightning_gnn_dist.graph.user_ids import Ids, known_ids


class IdIndex:
    """Finds the nodes that have ids one by one: it sorts once, keeps 8 bytes a node, and reads what it compares.

    Args:
        ids: The ids, that of node ``v`` at ``v``.
    """

    def __init__(self, ids: Ids) -> None:
        self._ids, self._order = ids, ids.argsort(kind="stable")

    def find(self, asked: object) -> int | None:
        """Return the node that has an id; None where none has it, or where ids are of another kind."""
        if (key := _as_key(asked, self._ids.dtype)) is None:
            return None
        at = int(self._ids.searchsorted(key, sorter=self._order))
        return int(self._order[at]) if at < len(self._order) and self._ids[self._order[at]].item() == asked else None


def _as_key(asked: object, dtype: np.dtype) -> Ids | None:
    """Return an id as one of this type, which a search then takes without a copy of all; None where it is none."""
    if type(asked) is str and dtype.kind == "U" and len(asked) <= dtype.itemsize // 4:
        return np.array(asked, dtype)
    if type(asked) is int and dtype.kind in "iu" and np.iinfo(dtype).min <= asked <= np.iinfo(dtype).max:
        return np.array(asked, dtype)
    return None


Arrays = Mapping[str, Tensor]
NEW, NUM_NODES = "new:", "num_nodes"
_OF_TRAINING = "_mask"
_KINDS = {"f": "finite numbers", "i": "integers", "b": "true or false"}


class RefusedError(ValueError):
    """A request that is not answered, and the status of HTTP that says why."""

    def __init__(self, sentence: str, status: int = 400) -> None:
        super().__init__(sentence)
        self.status = status


class NewEdges(NamedTuple):
    """The edges of one type in a request.

    Attributes:
        ends: Senders and receivers, shape (2, n): ids of the graph, or behind these the numbers of new nodes.
        arrays: What the edges carry.
    """

    ends: Tensor
    arrays: Arrays


class Question(NamedTuple):
    """A request that was checked.

    Attributes:
        nodes: The nodes that are asked for: ids of the graph, or behind these the numbers of new nodes.
        num_new: How many new nodes there are of each type. Their numbers are in the order of the types.
        new: What the new nodes of each type carry.
        edges: The edges of each type.
    """

    nodes: Tensor
    num_new: list[int]
    new: list[Arrays]
    edges: list[NewEdges]


def served(arrays: Arrays) -> dict[str, Tensor]:
    """The arrays that a model reads to predict: no labels, and no masks."""
    return {name: a for name, a in arrays.items() if name != LABELS and not name.endswith(_OF_TRAINING)}


class Form:
    """Reads requests about a graph.

    Args:
        graph: The graph.
        seed_type: The type of the nodes whose rows are asked for.
        limits: What a request may ask for.
        ids_of: The prepared graph by whose tables' ids requests name nodes. Default: they name them by numbers.
    """

    def __init__(self, graph: Graph, seed_type: str, limits: Limits, ids_of: Path | None = None) -> None:
        self._ids = {} if ids_of is None else {kind: known_ids(ids_of, kind) for kind in graph.types.node_types}
        self._places = {kind: IdIndex(ids) for kind, ids in self._ids.items()}
        self._graph, self._seed_type, self._limits = graph, seed_type, limits
        self._types = types = graph.types
        self._named = types.have_names
        self._nodes = [served(types.node_arrays[kind]) for kind in types.node_types]
        self._edges = [types.edge_arrays[kind] for kind in types.edge_types]

    def read(self, body: Any) -> Question:
        """Return what a request asks; a malformed one is refused."""
        given = _mapping("The request", body, ["type", "nodes", "new", "edges"])
        if "type" in given and not self._named:
            raise RefusedError(f"type is for a graph with types, and this one has none, {_got(given['type'])}.")
        if given.get("type", self._seed_type) != self._seed_type:
            raise RefusedError(f"type must be {shown(self._seed_type)}, which is predicted, {_got(given['type'])}.")
        num_new, new = self._new_nodes(given.get("new", {}))
        edges = self._new_edges(given.get("edges", {} if self._named else []), num_new)
        self._check_rows([of_type.ends[1] for of_type in edges])
        return Question(self._asked(given, num_new), num_new, new, edges)

    def of_first(self) -> Question:
        """Return what asks for the first node."""
        ids = self._ids.get(self._seed_type)
        return self.read({"nodes": [0] if ids is None else ids[np.arange(1)].tolist()})

    def _asked(self, given: Mapping[str, Any], num_new: list[int]) -> Tensor:
        number = self._types.node_types.index(self._seed_type)
        ends = given.get("nodes", [f"{NEW}{i}" for i in range(num_new[number])])
        _check_list("nodes", ends, self._limits.nodes)
        if not ends:
            raise RefusedError('nodes must name a node at least, such as {"nodes": [0]}, got none.')
        known = self._known(number, num_new)
        return torch.tensor([known.id_of(end, "nodes") for end in ends])

    def _new_nodes(self, given: Any) -> tuple[list[int], list[Arrays]]:
        names = list(self._types.node_types)
        by_type = _mapping("new", given, names) if self._named else {names[0]: given} if given else {}
        counts, rows = list[int](), list[Arrays]()
        for kind, arrays in zip(names, self._nodes, strict=True):
            where = f"new {kind}".strip()
            of_type = _mapping(where, by_type.get(kind, {}), [*arrays, NUM_NODES])
            count = _count(where, of_type) if of_type else 0
            rows.append(_rows(where, {name: v for name, v in of_type.items() if name != NUM_NODES}, arrays, count))
            counts.append(count)
        if sum(counts) > self._limits.new_nodes:
            raise RefusedError(f"new may have {self._limits.new_nodes} nodes, got {sum(counts)}: ask several times.")
        return counts, rows

    def _new_edges(self, given: Any, num_new: list[int]) -> list[NewEdges]:
        names = [folder_of(kind) for kind in self._types.edge_types]
        by_type = _mapping("edges", given, names) if self._named else {names[0]: given}
        found, left = list[NewEdges](), self._limits.edges
        for kind, name, arrays in zip(self._types.edge_types, names, self._edges, strict=True):
            where, of_type = f"edges {name}".strip(), by_type.get(name, [])
            if isinstance(of_type, list):
                of_type = {"pairs": of_type}
            of_type = _mapping(where, of_type, ["pairs", *arrays])
            pairs = _check_list(f"pairs of {where}" if arrays else where, of_type.get("pairs", []), left)
            left -= len(pairs)
            ends = self._ends(where, pairs, kind, num_new)
            carried = {key: value for key, value in of_type.items() if key != "pairs"}
            found.append(NewEdges(ends, _rows(where, carried, arrays, len(pairs))))
        return found

    def _check_rows(self, receivers: list[Tensor]) -> None:
        """Refuse new edges into nodes of the graph that have too many: their rows are copied to be extended."""
        old = torch.cat(receivers).unique()
        old = old[old < self._graph.num_nodes]
        found = int(degrees_of(self._graph.indptr, old).sum()) + sum(map(len, receivers))
        if found > self._limits.edges:
            raise RefusedError(
                f"edges may be {self._limits.edges} with those of the graph into the same nodes, got {found}: leave "
                "out those into nodes with many."
            )

    def _ends(self, where: str, pairs: list[Any], kind: EdgeType, num_new: list[int]) -> Tensor:
        """Return the ends of edges; one between two nodes of the graph is refused, for that is no new node's."""
        senders, receivers = (self._known(self._types.node_types.index(end), num_new) for end in kind[::2])
        found, num_old = list[tuple[int, int]](), self._types.offsets[-1]
        for pair in pairs:
            if not isinstance(pair, list) or len(pair) != 2:
                raise RefusedError(f"{where} must be pairs of a sender and a receiver, {_got(pair)}.")
            ends = senders.id_of(pair[0], where), receivers.id_of(pair[1], where)
            if max(ends) < num_old:
                raise RefusedError(f"{where} must have a new node at one end, {_got(pair)}: both are of the graph.")
            found.append(ends)
        return torch.tensor(found, dtype=torch.int64).view(-1, 2).T

    def _known(self, number: int, num_new: list[int]) -> _Known:
        """Return the nodes of a type, by its number, that a request may name."""
        first, stop = self._types.offsets[number : number + 2]
        first_new = self._types.offsets[-1] + sum(num_new[:number])
        new = {f"{NEW}{i}": first_new + i for i in range(num_new[number])}
        kind = self._types.node_types[number]
        return _Known(f" of type {kind}" if self._named else "", first, stop, new, self._places.get(kind))


class _Known(NamedTuple):
    """The nodes of a type that a request may name.

    Attributes:
        of_type: Which type, in words.
        first: The id of the first node of the graph.
        stop: The id behind its last.
        new: The ids of the new ones by their names.
        places: The nodes of the graph by the ids of the user's tables; None where they are named by numbers.
    """

    of_type: str
    first: int
    stop: int
    new: Mapping[str, int]
    places: IdIndex | None = None

    def id_of(self, end: Any, where: str) -> int:
        """Return the id of the node that a request names."""
        place = None if self.places is None else self.places.find(end)
        if place is not None and place < self.stop - self.first:
            return self.first + place
        if self.places is None and type(end) is int and 0 <= end < self.stop - self.first:
            return self.first + end
        if type(end) is str and end in self.new:
            return self.new[end]
        to_last = f' to "{NEW}{len(self.new) - 1}"' if len(self.new) > 1 else ""
        none_new = ", as the request has no new ones" if type(end) is str and end.startswith(NEW) else ""
        new = f', or "{NEW}0"{to_last}' if self.new else none_new
        ids = f"an id from 0 to {self.stop - self.first - 1}" if self.places is None else "an id of the tables"
        raise RefusedError(f"{where} must name nodes{self.of_type} by {ids}{new}, {_got(end)}.")


def _mapping(where: str, given: Any, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(given, dict):
        raise RefusedError(f"{where} must be an object with {shown(list(known))}, {_got(given)}.")
    if unknown := [name for name in given if name not in known]:
        raise RefusedError(f"{where} may have {shown(list(known))}, {_got(unknown[0])}.")
    return given


def _check_list(where: str, given: Any, most: int) -> list[Any]:
    if not isinstance(given, list):
        raise RefusedError(f"{where} must be a list, {_got(given)}.")
    if len(given) > most:
        raise RefusedError(f"{where} may have {most} entries, got {len(given)}: ask several times.")
    return given


def _count(where: str, of_type: Mapping[str, Any]) -> int:
    """How many new nodes of a type there are: as many as it has rows of any array."""
    found = dict[str, int]()
    for name, value in of_type.items():
        if name == NUM_NODES and (type(value) is not int or value < 0):
            raise RefusedError(f"{name} of {where} must be a count, {_got(value)}.")
        if name != NUM_NODES and not isinstance(value, list):
            raise RefusedError(f"{name} of {where} must be a list with a row for each node, {_got(value)}.")
        found[name] = value if name == NUM_NODES else len(value)
    if len(set(found.values())) > 1:
        raise RefusedError(f"{where} must have as many rows of each array, got {shown(found)}.")
    return next(iter(found.values()))


def _rows(where: str, given: Mapping[str, Any], arrays: Arrays, count: int) -> Arrays:
    """The arrays of new nodes or edges, each with a row for each of them, as the graph's own are."""
    if count and (missing := [name for name in arrays if name not in given]):
        raise RefusedError(f"{where} must have {shown(missing[0])}, as the graph has it: give a row for each.")
    return {
        name: _like(f"{name} of {where}", given[name], array, count) if count else array[:0]
        for name, array in arrays.items()
    }


def _like(where: str, given: Any, array: Tensor, count: int) -> Tensor:
    """Numbers of a request as rows like those of an array."""
    wanted = "f" if array.is_floating_point() else "b" if array.dtype == torch.bool else "i"
    try:
        found = np.array(given)
    except (ValueError, OverflowError):
        found = np.empty(0, np.object_)
    fits = found.dtype.kind in {"f": "fiu", "i": "i", "b": "b"}[wanted]
    shape = count, *array.shape[1:]
    if found.shape != shape or not fits:
        of_shape = f" of shape {list(found.shape)}" if found.dtype.kind in "fiub" else ""
        raise RefusedError(f"{where} must be {_KINDS[wanted]} of shape {list(shape)}, {_got(given)}{of_shape}.")
    rows = torch.from_numpy(found).to(array.dtype)
    is_kept = rows.isfinite().all() if wanted == "f" else (rows.to(torch.int64) == torch.from_numpy(found)).all()
    if not bool(is_kept):
        raise RefusedError(f"{where} must be {_KINDS[wanted]} that {array.dtype} can hold, {_got(given)}.")
    return rows


def _got(value: Any) -> str:
    return f"got {shown(value)}"


@dataclass(frozen=True)
class Limits:
    """What a server does at most.

    Args:
        nodes: Nodes whose rows a request may ask for.
        new_nodes: New nodes that a request may bring.
        edges: Edges that it may bring, with those of the graph into the same nodes of the graph.
        bytes: How large its body may be.
        seconds: How long it may take to come, and then to be answered.
        waiting: How many requests may wait.
    """

    nodes: Count = 1000
    new_nodes: Count = 1000
    edges: Count = 100_000
    bytes: Count = 1 << 20
    seconds: Positive = 5.0
    waiting: Count = 256

    def __post_init__(self) -> None:
        check_fields(self)


def shards_are_not_served(shards: Path) -> ValueError:
    """Return the refusal of shards by a server, which reads rows of all nodes on its host."""
    return ValueError(
        f"A server reads the whole graph, and {shards} holds shards: name what they were divided from, "
        "--data.graph=my_graph, of which it maps the files; or write all rows once with predict --output, "
        "which takes shards."
    )
