"""The edges of a type: their ends, the type that has them turned round, what they carry, and which have a label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_true_or_false, shown
from lightning_gnn_dist.extensions.links.targets import LABEL, TargetType, edges_at, name_of_targets
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.graph.graph import Graph, checked_graph, typed_graph
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeRanges, have_names

Reverse = EdgeType | Literal["auto"] | None
_PREFIX = "rev_"  # as PyG's ToUndirected calls the reverse of an edge type


class LinkEnds(NamedTuple):
    """Between which nodes links are.

    Attributes:
        senders: The ids in the graph of all nodes that may send.
        receivers: Those of all nodes that may receive.
        target_type: The edge type of the links.
    """

    senders: range
    receivers: range
    target_type: TargetType

    def in_graph(self, edges: Tensor) -> Tensor:
        """Edges, shape ``(2, n)``, by the ids in the graph of their ends, given by the ids in their types."""
        return edges.to(torch.int64) + torch.tensor([[self.senders.start], [self.receivers.start]])

    def in_types(self, edges: Tensor) -> Tensor:
        """Do the reverse of :meth:`in_graph`."""
        return edges - torch.tensor([[self.senders.start], [self.receivers.start]])

    def check(self, name: str, edges: Tensor, negatives: Tensor | None) -> None:
        """Refuse edges and negatives that are no ids of such nodes, by their types, or are none.

        Edges with labels have no negatives, None.
        """
        false = edges.new_empty(edges.shape[-1] if edges.dim() else 0, 1) if negatives is None else negatives
        if edges.dim() != 2 or len(edges) != 2 or false.dim() != 2 or len(false) != edges.shape[1]:
            raise ValueError(
                f"{name}: edges need the shape (2, n) and negatives (n, K), got {tuple(edges.shape)} and "
                f"{tuple(false.shape)}."
            )
        checked = [(edges[0], self.senders), (edges[1], self.receivers)]
        for ids, most in checked if negatives is None else [*checked, (false, self.receivers)]:
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if ids.dtype not in (torch.int32, torch.int64) or not 0 <= low <= high < len(most):
                raise ValueError(f"{name}: edges and negatives hold node ids, integers in [0, {len(most)}).")
        if not edges.shape[1]:
            raise ValueError(f"{name}: there are no edges to judge by, and their mean would be NaN: leave {name} out.")
        if not false.shape[1]:
            raise ValueError(f"{name}: negatives of shape {tuple(false.shape)} leave each edge without a rival.")


def ends_of(types: TypeRanges, edge_type: EdgeType | None, reverse: Reverse = None) -> LinkEnds:
    """The ends of the links of an edge type; in a graph without types of all links."""
    kind = edge_type or types.edge_types[0]
    turned = types.edge_types.index(reverse) if isinstance(reverse, tuple) else None
    target_type = TargetType(types.edge_types.index(kind), turned)
    return LinkEnds(types.nodes_of(kind[0]), types.nodes_of(kind[2]), target_type)


@dataclass(frozen=True, eq=False)
class Edges:
    """The edges of one type of a graph.

    Args:
        graph: The graph.
        kind: Their type; in a graph without types that of all edges, whose names are empty.
        reverse: The edge type that has them turned round, if there is one.
    """

    graph: Graph
    kind: EdgeType
    reverse: EdgeType | None = None

    @classmethod
    def of(cls, graph: Graph, edge_type: EdgeType | None, reverse: EdgeType | None = None) -> Edges:
        """Those of a type; None in a graph without types."""
        return cls(graph, edge_type or graph.types.edge_types[0], reverse)

    @property
    def whose(self) -> str:
        """How they are called in an error."""
        return f"edges of type {self.kind}" if have_names(self.graph.types) else "edges"

    @property
    def ends(self) -> LinkEnds:
        """Between which nodes they are."""
        return ends_of(self.graph.types, self.kind, self.reverse)

    @property
    def is_among_one_type(self) -> bool:
        """Whether they lead from nodes of a type to nodes of the same."""
        return self.kind[0] == self.kind[2]

    @cached_property
    def at(self) -> Tensor:
        """Their positions in ``indices``."""
        types = self.graph.types
        return torch.arange(self.graph.num_edges) if len(types.edge_types) == 1 else types.edges_of(self.kind)

    @cached_property
    def links(self) -> Tensor:
        """Their ends, by ids in the graph, shape ``(2, n)``."""
        return edges_of(self.graph) if len(self.graph.types.edge_types) == 1 else edges_at(self.graph, self.at)

    def some_links(self, about: int) -> Tensor:
        """The ends of about so many of them, evenly spread over the graph."""
        if len(self.graph.types.edge_types) == 1:
            return edges_at(self.graph, torch.arange(0, self.graph.num_edges, max(1, self.graph.num_edges // about)))
        return edges_at(self.graph, self.at[:: max(1, self.at.numel() // about)].contiguous())

    def numbers(self, *, turned: bool = False) -> Tensor:
        """A number for each, or for what it is turned round."""
        return numbers_of(self.links.flip(0) if turned else self.links, self.graph.num_nodes)

    @property
    def arrays(self) -> Mapping[str, Tensor]:
        """What they carry."""
        return self.graph.types.edge_arrays[self.kind]

    def array(self, argument: str, name: str) -> Tensor:
        """The array that an argument names; refused if they have none of that name."""
        if name not in self.arrays:
            raise ValueError(
                f"{argument} names {shown(name)}, and {self.whose} carry no array of that name (they have: "
                f"{shown(sorted(self.arrays))}): set it in the data before Graph.from_pyg(data)."
            )
        return self.arrays[name]

    def labels(self, name: str) -> Tensor:
        """The array ``name``; one that holds no labels is refused."""
        labels = self.array("labels", name)
        check_labels(name, labels)
        return labels

    def with_arrays(self, arrays: Mapping[str, Tensor]) -> Graph:
        """The same graph, in RAM, in which they carry these arrays and no others."""
        graph = self.graph
        if not have_names(graph.types):
            return checked_graph(graph.indptr, graph.indices, graph.node_arrays, arrays, num_senders=graph.num_senders)
        types = replace(graph.types, edge_arrays={**graph.types.edge_arrays, self.kind: arrays})
        return typed_graph(graph.indptr, graph.indices, types, node_arrays=vars(graph).get("node_arrays"))

    def without_array(self, name: str) -> Graph:
        """The same graph, in which they do not carry the array ``name``."""
        found = self.with_arrays({array: rows for array, rows in self.arrays.items() if array != name})
        found.path = self.graph.path
        return found

    def other(self, kind: EdgeType) -> Edges:
        """Those of another type."""
        return Edges(self.graph, kind)

    def others(self, *without: EdgeType | None) -> list[Edges]:
        """Those of all other types between the same two types of nodes, in either direction, but for some."""
        ends, without = (self.kind[::2], self.kind[::-2]), (self.kind, *without)
        return [self.other(kind) for kind in self.graph.types.edge_types if kind[::2] in ends and kind not in without]

    @property
    def back(self) -> Edges | None:
        """Those of the type that has them turned round."""
        return None if self.reverse is None else self.other(self.reverse)

    def reverse_of(self, said: object, held: Sequence[Tensor] = ()) -> EdgeType | None:
        """The edge type that has them turned round, looked for if ``"auto"`` was said.

        Args:
            said: What the user said.
            held: Links of the type that are not among the graph's edges, by ids in the graph.
        """
        is_open = isinstance(said, str) and said == "auto"
        if not have_names(self.graph.types):
            if not is_open and said is not None:
                raise ValueError(f"reverse={shown(said)} is for a graph with types, and this one has none.")
            return None
        if is_open or said is None:
            return self._found(held) if is_open else None
        kind, (source, _, target) = _known("reverse", said, self.graph.types.edge_types), self.kind
        if (kind[0], kind[2]) != (target, source) or kind == self.kind:
            raise ValueError(
                f"reverse={kind} is not {self.kind} turned round: it must be another edge type, from {target!r} to "
                f"{source!r}."
            )
        turned, numbers = self.other(kind).numbers(turned=True), self._with(held)
        if numbers.numel() and turned.numel() and not bool(torch.isin(turned, numbers).any()):
            raise ValueError(
                f"reverse={kind} has none of the links of {self.kind} turned round: name the type that has them, or "
                "reverse=None if there is none."
            )
        return kind

    def _with(self, held: Sequence[Tensor]) -> Tensor:
        """A number for each of them, and for held ones."""
        return torch.cat([self.numbers(), *(numbers_of(some, self.graph.num_nodes) for some in held)])

    def _found(self, held: Sequence[Tensor]) -> EdgeType | None:
        """The edge type with the name or with the links of the reverse."""
        others = [each for each in self.others() if each.kind[::2] == self.kind[::-2]]
        name = self.kind[1]
        named = name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else _PREFIX + name
        found = {each.kind for each in others if each.kind[1] == named}
        links, all_links = (self._with(some).unique() if others else None for some in ((), held))
        for each in others:
            assert links is not None and all_links is not None
            turned = each.numbers(turned=True).unique()
            if turned.numel() and (torch.equal(turned, links) or torch.equal(turned, all_links)):
                found.add(each.kind)
            elif each.kind not in found and 2 * (count := int(torch.isin(all_links, turned).sum())) > all_links.numel():
                raise ValueError(
                    f"{each.kind} has {count} of the {all_links.numel()} links of {self.kind} turned round, and would "
                    f"show a model what it is asked for: reverse={each.kind} hides held ones there, too, and "
                    "reverse=None says that they are others."
                )
        if len(found) > 1:
            raise ValueError(
                f"{shown(sorted(found))} have the links of {self.kind} turned round, and each would show a model what "
                "it is asked for: leave all but one out of the graph, or name the one to hide, reverse=..."
            )
        return found.pop() if found else None


def edges_of(graph: Graph) -> Tensor:
    """All senders and receivers: int64, shape ``(2, num_edges)``, in the order of ``graph.indices``."""
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return torch.stack([graph.indices.to(torch.int64), receivers])


def numbers_of(links: Tensor, num_nodes: int, *, undirected: bool = False) -> Tensor:
    """A number for each edge; if ``undirected``, that of both directions."""
    first, last = (links.amin(0), links.amax(0)) if undirected else links
    return first * num_nodes + last


def types_at(graph: Graph, kinds: Tensor | None, path: Path) -> tuple[EdgeType | None, EdgeType | None]:
    """The edge type of a saved split and its reverse."""
    of_graph = graph.types.edge_types
    if (kinds is None) == have_names(graph.types) or (
        kinds is not None and (kinds.shape != (2,) or not -1 <= int(kinds.min()) <= int(kinds.max()) < len(of_graph))
    ):
        raise ValueError(f"{path / 'links' / 'edge_types.npy'} must name two edge types. Copy or save it again.")
    if kinds is None:
        return None, None
    number, reverse = kinds.tolist()
    return of_graph[number], None if reverse < 0 else of_graph[reverse]


def masks_of_nodes(graph: Graph) -> list[str]:
    """The names of all masks of nodes, with types such as ``paper/train_mask``."""
    return [n.removeprefix("nodes/") for n in graph.arrays if n.startswith("nodes/") and n.endswith("_mask")]


def check_directions(edge_type: EdgeType | None, undirected: bool | None) -> None:
    """Refuse both directions of edges between two types, and what is neither True, False nor None."""
    if undirected is not None:
        check_true_or_false(undirected=undirected)
    if undirected and edge_type is not None and edge_type[0] != edge_type[2]:
        raise ValueError(
            f"undirected=True, but edges of {edge_type} have both directions in no graph, for their ends are of two "
            "types: leave it out. If another edge type has the links turned round, name that one, reverse=..."
        )


def checked_edge_type(graph: Graph, edge_type: object) -> EdgeType | None:
    """The edge type whose links are predicted. A graph with types needs one, any other has none."""
    if not have_names(graph.types):
        if edge_type is not None:
            raise ValueError(f"edge_type={shown(edge_type)} is for a graph with types, and this one has none.")
        return None
    kinds = graph.types.edge_types
    if edge_type is None:
        raise ValueError(
            f"The graph has types, and links of one edge type are predicted at a time: name it, as in "
            f"edge_type={kinds[0]} (there are: {shown(list(kinds))})."
        )
    return _known("edge_type", edge_type, kinds)


def without_edges(graph: Graph, kept: Tensor | None = None) -> Graph:
    """The graph of the edges that ``kept`` marks, a boolean for each, or of all, without the masks of its nodes."""
    kept = torch.ones(graph.num_edges, dtype=torch.bool) if kept is None else kept
    upto = torch.cat([graph.indptr[:1], kept.cumsum(0)])
    indptr, indices, types = upto[graph.indptr], graph.indices[kept], graph.types
    if not have_names(types):
        edges = {name: array[kept] for name, array in graph.edge_arrays.items()}
        return Graph(indptr, indices, _without_masks(graph.node_arrays), edges)
    at = {kind: kept[types.edges_of(kind)] for kind in types.edge_types}
    left = replace(
        types,
        num_edges=tuple(int(of_type.sum()) for of_type in at.values()),
        edge_type=types.edge_type[kept],
        node_arrays={kind: _without_masks(arrays) for kind, arrays in types.node_arrays.items()},
        edge_arrays={k: {name: a[at[k]] for name, a in arrays.items()} for k, arrays in types.edge_arrays.items()},
    )
    return typed_graph(indptr, indices, left)


def _without_masks(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: array for name, array in arrays.items() if not name.endswith("_mask")}


def _known(name: str, kind: object, kinds: tuple[EdgeType, ...]) -> EdgeType:
    words = kind if isinstance(kind, list | tuple) and all(isinstance(word, str) for word in kind) else ()
    found = [known for known in kinds if known == tuple(words)]
    if not found:
        named = [known for known in kinds if known[1] == kind]
        hint = f" Its three names, {named[0]}, say which." if named else ""
        raise ValueError(f"{name} must be one of {shown(list(kinds))}, got {shown(kind)}.{hint}")
    return found[0]


def taken_masks(edges: Edges, shares: Mapping[str, float | str]) -> tuple[Edges, dict[str, Any]]:
    """The edges without the masks that ``shares`` names arrays of; for each name of a split its share or mask."""
    named = {name: share for name, share in shares.items() if isinstance(share, str)}
    arrays, taken = edges.arrays, dict[str, Tensor]()
    for name, array in named.items():
        if array not in arrays:
            raise ValueError(
                f"{name} names {shown(array)}, and {edges.whose} carry no array of that name (they have: "
                f"{shown(sorted(arrays))}): set it in the data, a boolean per edge, or give a share such as 0.1."
            )
        if arrays[array].dtype != torch.bool or arrays[array].dim() != 1:
            raise ValueError(f"{name}: {array} must hold one boolean for each edge, got {shown(arrays[array])}.")
        taken[name] = arrays[array]
    if not named:
        return edges, dict(shares)
    left = {name: rows for name, rows in arrays.items() if name not in named.values()}
    return replace(edges, graph=edges.with_arrays(left)), taken


def check_labels(name: str, labels: Tensor) -> None:
    """Refuse infinite labels, and negative classes other than -1."""
    if labels.is_floating_point():
        if bool(labels.isinf().any()):
            raise ValueError(f"labels ({name}) hold infinity: put NaN for an edge without a label.")
    elif labels.is_complex():
        raise ValueError(f"labels ({name}) are complex: store their parts as two columns of real numbers.")
    elif labels.numel() and int(labels.min()) < -1:
        raise ValueError(
            f"labels ({name}) hold {int(labels.min())}: integers are classes, counted from 0, and -1 is no label. "
            "Store numbers to be predicted as floating point numbers, with NaN for no label."
        )


def check_classes(name: str, labels: Tensor) -> None:
    """Refuse labels without which there is nothing to learn."""
    known = labels[is_labelled(labels)]
    if not known.numel():
        raise ValueError(f"labels ({name}): no edge has one. -1 and NaN stand for none.")
    if not known.is_floating_point() and known.dim() == 1 and bool((known == known[0]).all()):
        raise ValueError(
            f"labels ({name}): all edges that have one are of class {int(known[0])}. Number classes from 0; -1 stands "
            "for no label."
        )


def check_no_negatives(*, given: bool) -> None:
    """Refuse false edges beside labels."""
    if given:
        raise ValueError("negatives are for splits without labels: false edges have none. Leave negatives out.")


def targets_carry(name: str, arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What batches say of the edges that they ask for, by the name there: their label, and what else they carry."""
    return {LABEL if array == name else name_of_targets(array): rows for array, rows in arrays.items()}
