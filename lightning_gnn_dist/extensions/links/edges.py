"""The edges of a type: their ends, the type that has them turned round, what they carry, and what they show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_true_or_false, check_word, shown
from lightning_gnn_dist.extensions.links.link_sampler import edges_at
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled
from lightning_gnn_dist.extensions.temporal.times import check_times
from lightning_gnn_dist.graph.convert import EDGE_IDS
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames

Reverse = EdgeType | Literal["auto"] | None
_PREFIX = "rev_"  # as PyG's ToUndirected calls the reverse of an edge type


class LinkEnds(NamedTuple):
    """Between which nodes links are.

    Attributes:
        senders: The ids in the graph of all nodes that may send.
        receivers: Those of all nodes that may receive.
        kinds: The number of the edge type of the links, and that of the one that has them turned round, if there is.
    """

    senders: range
    receivers: range
    kinds: tuple[int, ...]

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
        false = edges.new_zeros(edges.shape[-1] if edges.dim() else 0, 1) if negatives is None else negatives
        if edges.dim() != 2 or len(edges) != 2 or false.dim() != 2 or len(false) != edges.shape[1]:
            raise ValueError(
                f"{name}: edges need the shape (2, n) and negatives (n, K), got {tuple(edges.shape)} and "
                f"{tuple(false.shape)}."
            )
        for ids, most in ((edges[0], self.senders), (edges[1], self.receivers), (false, self.receivers)):
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if ids.dtype not in (torch.int32, torch.int64) or not 0 <= low <= high < len(most):
                raise ValueError(f"{name}: edges and negatives hold node ids, integers in [0, {len(most)}).")
        if not edges.shape[1]:
            raise ValueError(f"{name}: there are no edges to judge by, and their mean would be NaN: leave {name} out.")
        if not false.shape[1]:
            raise ValueError(f"{name}: negatives of shape {tuple(false.shape)} leave each edge without a rival.")


def ends_of(types: TypeNames, edge_type: EdgeType | None, reverse: EdgeType | None) -> LinkEnds:
    """The ends of the links of an edge type; in a graph without types of all links."""
    kind = edge_type or types.edge_types[0]
    kinds = [types.edge_types.index(each) for each in (kind, reverse) if each is not None]
    return LinkEnds(types.nodes_of(kind[0]), types.nodes_of(kind[2]), tuple(kinds))


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
    def named(cls, graph: Graph, edge_type: object) -> Edges:
        """Those of the type whose links are predicted. A graph with types needs one, any other has none."""
        kinds = graph.types.edge_types
        if not graph.types.have_names:
            if edge_type is not None:
                raise ValueError(f"edge_type={shown(edge_type)} is for a graph with types, and this one has none.")
            return cls(graph, kinds[0])
        if edge_type is None:
            raise ValueError(
                f"The graph has types, and links of one edge type are predicted at a time: name it, as in "
                f"edge_type={kinds[0]} (there are: {shown(list(kinds))})."
            )
        return cls(graph, _known("edge_type", edge_type, kinds))

    @property
    def edge_type(self) -> EdgeType | None:
        """Their type; None in a graph without types."""
        return self.kind if self.graph.types.have_names else None

    @property
    def ends(self) -> LinkEnds:
        """Between which nodes they are."""
        return ends_of(self.graph.types, self.kind, self.reverse)

    @cached_property
    def at(self) -> Tensor:
        """Their positions in ``indices``."""
        return self.graph.types.edges_of(self.kind)

    @cached_property
    def links(self) -> Tensor:
        """Their ends, by ids in the graph, shape ``(2, n)``."""
        return edges_at(self.graph, self.at)

    def numbers(self, *, turned: bool = False) -> Tensor:
        """A number for each, or for what it is turned round."""
        return numbers_of(self.links.flip(0) if turned else self.links, self.graph.num_nodes)

    @property
    def arrays(self) -> Mapping[str, Tensor]:
        """What they carry."""
        return self.graph.types.edge_arrays[self.kind]

    def array(self, argument: str, name: str, way_out: str = " before Graph.from_pyg(data)") -> Tensor:
        """The array that an argument names; refused if they have none of that name."""
        if name not in self.arrays:
            whose = "edges" if self.edge_type is None else f"edges of type {self.kind}"
            raise ValueError(
                f"{argument} names {shown(name)}, and {whose} carry no array of that name (they have: "
                f"{shown(sorted(self.arrays))}): set it in the data{way_out}."
            )
        return self.arrays[name]

    def without(self, array: str) -> Graph:
        """The same graph, in which they do not carry an array."""
        graph, types = self.graph, self.graph.types
        left = {name: rows for name, rows in self.arrays.items() if name != array}
        nodes = {kind: dict(arrays) for kind, arrays in types.node_arrays.items()}
        types = replace(types, node_arrays=nodes, edge_arrays={**types.edge_arrays, self.kind: left})
        found = typed_graph(graph.indptr, graph.indices, types, node_arrays=vars(graph).get("node_arrays"))
        found.path = graph.path
        return found

    def others(self) -> list[Edges]:
        """Those of other types between the same two types of nodes, in either direction, but for the reverse."""
        ends, without = (self.kind[::2], self.kind[::-2]), (self.kind, self.reverse)
        kinds = (kind for kind in self.graph.types.edge_types if kind[::2] in ends and kind not in without)
        return [Edges(self.graph, kind) for kind in kinds]

    @property
    def back(self) -> Edges | None:
        """Those of the type that has them turned round."""
        return None if self.reverse is None else Edges(self.graph, self.reverse)

    def reversed_by(self, said: object, held: Sequence[Tensor] = ()) -> Edges:
        """The same, with the edge type that has them turned round, looked for if ``"auto"`` was said.

        Args:
            said: What the user said.
            held: Links of the type that are not among the graph's edges, by ids in the graph.
        """
        is_open = isinstance(said, str) and said == "auto"
        if self.edge_type is None and not is_open and said is not None:
            raise ValueError(f"reverse={shown(said)} is for a graph with types, and this one has none.")
        if self.edge_type is None or said is None:
            return replace(self, reverse=None)
        of_held = [numbers_of(some, self.graph.num_nodes) for some in held]
        return replace(self, reverse=self._found(of_held) if is_open else self._checked(said, of_held))

    def _checked(self, said: object, held: Sequence[Tensor]) -> EdgeType:
        kind, (source, _, target) = _known("reverse", said, self.graph.types.edge_types), self.kind
        if (kind[0], kind[2]) != (target, source) or kind == self.kind:
            raise ValueError(
                f"reverse={kind} is not {self.kind} turned round: it must be another edge type, from {target!r} to "
                f"{source!r}."
            )
        turned, numbers = Edges(self.graph, kind).numbers(turned=True), torch.cat([self.numbers(), *held])
        if numbers.numel() and turned.numel() and not bool(torch.isin(turned, numbers).any()):
            raise ValueError(
                f"reverse={kind} has none of the links of {self.kind} turned round: name the type that has them, or "
                "reverse=None if there is none."
            )
        return kind

    def _found(self, held: Sequence[Tensor]) -> EdgeType | None:
        """The edge type with the name of the reverse; one that has most links turned round is refused."""
        others, found = [each for each in self.others() if each.kind[::2] == self.kind[::-2]], None
        if not others:
            return None
        name, links = self.kind[1], torch.cat([self.numbers(), *held]).unique()
        named = name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else _PREFIX + name
        for each in others:
            count = int(torch.isin(links, each.numbers(turned=True)).sum())
            if each.kind[1] == named:
                found = each.kind
            elif 2 * count > links.numel():
                raise ValueError(
                    f"{each.kind} has {count} of the {links.numel()} links of {self.kind} turned round, and would "
                    f"show a model what it is asked for: reverse={each.kind} hides held ones there, too, and "
                    "reverse=None says that they are others."
                )
        return found


def numbers_of(links: Tensor, num_nodes: int, *, undirected: bool = False) -> Tensor:
    """A number for each edge; if ``undirected``, that of both directions."""
    first, last = (links.amin(0), links.amax(0)) if undirected else links
    return first * num_nodes + last


def _known(name: str, kind: object, kinds: tuple[EdgeType, ...]) -> EdgeType:
    words = kind if isinstance(kind, list | tuple) and all(isinstance(word, str) for word in kind) else ()
    found = [known for known in kinds if known == tuple(words)]
    if not found:
        named = [known for known in kinds if known[1] == kind]
        hint = f" Its three names, {named[0]}, say which." if named else ""
        raise ValueError(f"{name} must be one of {shown(list(kinds))}, got {shown(kind)}.{hint}")
    return found[0]


def check_directions(edges: Edges, undirected: bool | None) -> None:
    """Refuse both directions of edges between two types, and what is neither True, False nor None."""
    if undirected is not None:
        check_true_or_false(undirected=undirected)
    if undirected and edges.kind[0] != edges.kind[2]:
        raise ValueError(
            f"undirected=True, but edges of {edges.kind} have both directions in no graph, for their ends are of two "
            "types: leave it out. If another edge type has the links turned round, name that one, reverse=..."
        )


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


def labelled(edges: Edges, name: str) -> Tensor:
    """Which edges have a label; refuse an array that holds none, or without which there is nothing to learn."""
    labels = edges.array("labels", name)
    check_labels(name, labels)
    has_label = is_labelled(labels)
    if not (known := labels[has_label]).numel():
        raise ValueError(f"labels ({name}): no edge has one. -1 and NaN stand for none.")
    if not known.is_floating_point() and known.dim() == 1 and bool((known == known[0]).all()):
        raise ValueError(
            f"labels ({name}): all edges that have one are of class {int(known[0])}. Number classes from 0; -1 stands "
            "for no label."
        )
    return has_label


_FEW = 0.1  # of the links of a graph that was meant to be undirected


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


def without_reverse(edges: Edges) -> tuple[int, int]:
    """How many links, each counted once and without loops, have a reverse that is none, and how many there are."""
    if edges.kind[0] != edges.kind[2]:
        return 1, 1
    links = edges.links[:, edges.links[0] != edges.links[1]]
    there, back = (numbers_of(ends, edges.graph.num_nodes).unique() for ends in (links, links.flip(0)))
    return there.numel() - int(torch.isin(there, back, assume_unique=True).sum()), there.numel()


def settled(edges: Edges, undirected: bool | None) -> bool:
    """Whether pairs of nodes are held back, both directions together; found out where ``undirected`` is None."""
    alone, total = without_reverse(edges)
    if undirected and alone:
        raise ValueError("undirected=True, but some edges have no reverse: add them, or leave undirected out.")
    if undirected is None and 0 < alone < _FEW * total:
        raise ValueError(
            f"{alone} of {total} edges have no reverse, and all others have one, so a model would mostly be shown what "
            "it is asked for: add the reverses that are missing (torch_geometric.utils.to_undirected), or give "
            "undirected=False, which takes both directions for edges of their own."
        )
    return alone == 0 if undirected is None else undirected


def both_ways(edges: Edges, undirected: bool | None) -> bool:
    """Whether each edge is there as often in both directions, with the same rows; not if that was denied."""
    if undirected is False or edges.kind[0] != edges.kind[2]:
        return False
    arrays = {name: array for name, array in edges.arrays.items() if name != EDGE_IDS}
    there, back = edges.numbers(), edges.numbers(turned=True)
    found = torch.equal(*counts_of_rows(there, back, [(array, array) for array in arrays.values()]))
    if undirected and not found:
        differs = [name for name, array in arrays.items() if not is_same(there, back, array, array)]
        if not torch.equal(*counts_of_rows(there, back, [])):
            differs.append("how often they are there")
        raise ValueError(
            f"undirected=True, but the two directions of some edge differ in {shown(differs or sorted(arrays))}: add "
            "what is missing, or leave undirected out, and each direction is asked for by itself."
        )
    return found


def check_times_of_edges(edges: Edges, time: object, labels: str | None, *, is_sure: bool) -> None:
    """Refuse edges without such times, times that are to be predicted, and edges without times that show events.

    These are those of the reverse type, and unless the user named it also of types most of whose edges turn events
    round: they would be seen always.
    """
    check_word("time", time, "edge_time")
    assert isinstance(time, str)
    if time == labels:
        raise ValueError(
            f"labels and time both name {shown(time)}, and a target shows its time: to predict when edges are there, "
            "give the labels an array of their own."
        )
    check_times(time, edges.array("time", time), "edge")
    alike = [] if edges.back is None else [edges.back]
    for other in [] if is_sure else edges.others():
        turned = other.numbers(turned=True)
        if 2 * int(torch.isin(turned, edges.numbers()).sum()) > turned.numel():
            alike.append(other)
    if blind := [each.kind for each in alike if time not in each.arrays]:
        others = f". If they are others, say what the reverse is, reverse={edges.reverse}."
        raise ValueError(
            f"Edges of {blind[0]} have no array {shown(time)}, so that events would be seen there before they happen: "
            "give them the times of the edges that they turn round, or leave the type out"
            + ("." if blind[0] == edges.reverse else others)
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
