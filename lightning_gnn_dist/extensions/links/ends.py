"""Links between nodes of given types: their edge type, the one that has them turned round, and ids of their ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.extensions.links.positions import TargetType, edges_at
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.shard import TypedBounds
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes

Reverse = EdgeType | Literal["auto"] | None
_PREFIX = "rev_"  # as PyG's ToUndirected calls the reverse of an edge type


class LinkEnds(NamedTuple):
    """Between which nodes links are.

    Attributes:
        senders: The ids in the graph of all nodes that may send.
        receivers: Those of all nodes that may receive.
        target_type: The edge type of the links, if the graph has types.
    """

    senders: range
    receivers: range
    target_type: TargetType | None

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


def ends_of(types: GraphTypes | TypedBounds, edge_type: EdgeType | None, reverse: Reverse = None) -> LinkEnds:
    """The ends of the links of an edge type; in a graph without types of all links."""
    if edge_type is None:
        nodes = types.nodes_of(types.node_types[0])
        return LinkEnds(nodes, nodes, None)
    number = types.edge_types.index(edge_type)
    target_type = TargetType(number, types.edge_types.index(reverse) if isinstance(reverse, tuple) else None)
    return LinkEnds(types.nodes_of(edge_type[0]), types.nodes_of(edge_type[2]), target_type)


def links_of(graph: Graph, edge_type: EdgeType | None) -> tuple[Tensor, Tensor]:
    """Positions in ``indices`` of the edges of a type, or without types of all, and their ends, shape ``(2, n)``."""
    if edge_type is None:
        return torch.arange(graph.num_edges), torch.stack(edges_of(graph))
    at = graph.types.edges_of(edge_type)
    return at, edges_at(graph, at)


def some_links_of(graph: Graph, edge_type: EdgeType | None, about: int) -> Tensor:
    """The ends of about so many edges of a type, evenly spread over the graph."""
    if edge_type is None:
        return edges_at(graph, torch.arange(0, graph.num_edges, max(1, graph.num_edges // about)))
    at = graph.types.edges_of(edge_type)
    return edges_at(graph, at[:: max(1, at.numel() // about)].contiguous())


def edges_of(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return all senders and all receivers: int64, shape ``(num_edges,)``, in the order of ``graph.indices``."""
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return graph.indices.to(torch.int64), receivers


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
    """Refuse both directions of edges between two types."""
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


def checked_reverse(
    graph: Graph, edge_type: EdgeType | None, reverse: object, held: Sequence[Tensor] = ()
) -> EdgeType | None:
    """The edge type that has the links of another turned round, looked for if ``reverse`` is ``"auto"``.

    Args:
        graph: The graph that has the edges.
        edge_type: The edge type of the links.
        reverse: What the user said.
        held: Links of the type that are not among the graph's edges, by ids in the graph.
    """
    is_open = isinstance(reverse, str) and reverse == "auto"
    if edge_type is None:
        if not is_open and reverse is not None:
            raise ValueError(f"reverse={shown(reverse)} is for a graph with types, and this one has none.")
        return None
    if is_open or reverse is None:
        return _found(graph, graph.types, edge_type, held) if is_open else None
    kind, (source, _, target) = _known("reverse", reverse, graph.types.edge_types), edge_type
    if (kind[0], kind[2]) != (target, source) or kind == edge_type:
        raise ValueError(
            f"reverse={kind} is not {edge_type} turned round: it must be another edge type, from {target!r} to "
            f"{source!r}."
        )
    _check_turned(graph, edge_type, kind, held)
    return kind


def between(types: GraphTypes, one: str, other: str, *without: EdgeType | None) -> list[EdgeType]:
    """The edge types between two types of nodes, in either direction, but for some."""
    ends = ((one, other), (other, one))
    return [kind for kind in types.edge_types if (kind[0], kind[2]) in ends and kind not in without]


def without_edges(graph: Graph, kept: Tensor) -> Graph:
    """The graph of the edges that ``kept`` marks, a boolean for each, without the masks of its nodes."""
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


def _found(graph: Graph, types: GraphTypes, edge_type: EdgeType, held: Sequence[Tensor]) -> EdgeType | None:
    """The edge type with the name or with the links of the reverse."""
    source, name, target = edge_type
    others = [kind for kind in types.edge_types if (kind[0], kind[2]) == (target, source) and kind != edge_type]
    named = name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else _PREFIX + name
    found = {kind for kind in others if kind[1] == named}
    links = numbers_of(links_of(graph, edge_type)[1], graph.num_nodes).unique() if others else torch.empty(0)
    all_links = torch.cat([links, *(numbers_of(some, graph.num_nodes) for some in held)]).unique()
    for kind in others:
        turned = numbers_of(links_of(graph, kind)[1].flip(0), graph.num_nodes).unique()
        if turned.numel() and (torch.equal(turned, links) or torch.equal(turned, all_links)):
            found.add(kind)
        elif kind not in found:
            _refuse_if_alike(edge_type, kind, all_links, turned)
    if len(found) > 1:
        raise ValueError(
            f"{shown(sorted(found))} have the links of {edge_type} turned round, and each would show a model what it "
            "is asked for: leave all but one out of the graph, or name the one to hide, reverse=..."
        )
    return found.pop() if found else None


def _check_turned(graph: Graph, edge_type: EdgeType, kind: EdgeType, held: Sequence[Tensor]) -> None:
    """Refuse a type that was named as the reverse and has none of the links."""
    links, turned = links_of(graph, edge_type)[1], links_of(graph, kind)[1].flip(0)
    numbers = torch.cat([numbers_of(some, graph.num_nodes) for some in (links, *held)])
    if numbers.numel() and turned.numel() and not bool(torch.isin(numbers_of(turned, graph.num_nodes), numbers).any()):
        raise ValueError(
            f"reverse={kind} has none of the links of {edge_type} turned round: name the type that has them, or "
            "reverse=None if there is none."
        )


def _refuse_if_alike(edge_type: EdgeType, kind: EdgeType, links: Tensor, turned: Tensor) -> None:
    """Refuse to guess about an edge type that has most of the links turned round, and not all."""
    count = int(torch.isin(links, turned).sum())
    if 2 * count > links.numel():
        raise ValueError(
            f"{kind} has {count} of the {links.numel()} links of {edge_type} turned round, and would show a model what "
            f"it is asked for: reverse={kind} hides held ones there, too, and reverse=None says that they are others."
        )
