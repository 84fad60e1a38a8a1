"""Edges held back to evaluate link prediction, the false edges that they compete with, and the remaining graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_arrays,
    check_at_least_if_given,
    check_instance,
    check_path,
    check_seed,
    check_true_or_false,
    check_word,
    is_number,
    shown,
)
from lightning_gnn_dist.extensions.links import leaks
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.edges import (
    Edges,
    Reverse,
    check_directions,
    check_no_negatives,
    checked_edge_type,
    masks_of_nodes,
    taken_masks,
    types_at,
)
from lightning_gnn_dist.extensions.links.held_back import EdgesToSplit
from lightning_gnn_dist.extensions.links.negatives import has_edges
from lightning_gnn_dist.extensions.temporal.times import as_integers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names

_EDGES_TO_CHECK = 1000  # evenly spread over the graph


@dataclass(frozen=True, eq=False)
class LinkSplit:
    """A graph of training edges, and edges to evaluate on: true and false ones, or edges with labels.

    :func:`split_edges` makes one from a graph. If your data set has its own split, construct it here.

    Args:
        graph: The training edges, which carry messages and are learned.
        edges: The true edges of ``"val"``, ``"test"`` or both, each of shape ``(2, n)``, senders first. With types
            each end is given by its id in its type.
        negatives: For each of these edges K receivers that its sender has no edge to, shape ``(n, K)``. Edges with
            labels have none.
        undirected: Whether the graph holds both directions of every edge, with types both as edges of that one type.
            Default: with types it is found out, otherwise it does.
        edge_type: Of a graph with types, the one that is predicted.
        reverse: The edge type that holds the same links turned round: ``"auto"`` to find it by its name, ``rev_...``,
            or by its links, None if there is none.
        labels: Name of the graph's edge array that a model learns to predict: classes, numbers, or rows of either.
            Edges whose label is -1 or NaN carry messages alone. Default: a model tells true edges from false ones.
        held_arrays: With ``labels``, what held edges carry: for each of ``edges`` a row for each edge of every
            array that the graph's edges have, ``{"val": {"edge_rating": ...}}``.
        time: Name of the edge array that says when each edge was there. The graph has the edges of all times then,
            held ones as well, and those earlier than all held ones are learned. ``held_arrays`` have the time of each
            held edge.
    """

    graph: Graph
    edges: Mapping[str, Tensor]
    negatives: Mapping[str, Tensor] = field(default_factory=dict)
    undirected: bool | None = None
    edge_type: EdgeType | None = None
    reverse: Reverse = "auto"
    labels: str | None = None
    held_arrays: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    time: str | None = None

    def __post_init__(self) -> None:
        check_instance("graph", self.graph, Graph, "a Graph of the training edges")
        self.graph.check_whole()
        check_arrays(edges=self.edges, negatives=self.negatives)
        if self.undirected is not None:
            check_true_or_false(undirected=self.undirected)
        if masks := masks_of_nodes(self.graph):
            raise ValueError(
                f"The graph has {masks}, which split nodes, and here edges are split: leave these arrays out, or use "
                "split_edges(graph), which does."
            )
        leaks.check_each_mapping(held_arrays=self.held_arrays)
        if self.labels is not None:
            check_no_negatives(given=bool(self.negatives))
        elif self.edges.keys() != self.negatives.keys():
            raise ValueError(f"There are edges for {list(self.edges)} and negatives for {list(self.negatives)}.")
        if unknown := sorted(self.edges.keys() - {"val", "test"}):
            raise ValueError(f'Edges are held back for "val" or "test", not for {unknown}.')
        edges = Edges.of(self.graph, checked_edge_type(self.graph, self.edge_type))
        for name in self.edges:
            edges.ends.check(name, self.edges[name], self.negatives.get(name))
        self._check_arrays(edges)
        said, is_plain = self.reverse, self.labels is None and self.time is None
        held = [edges.ends.in_graph(of) for of in self.edges.values()] if self.edge_type is not None else []
        self._settle(edges, edges.reverse_of(said, held))
        edges = self._edges
        if self.time is not None:
            leaks.check_reverse_times(edges, self.time, is_sure=said != "auto")
        if self.undirected:
            self._check_reverses()
        if self.labels is not None:
            leaks.check_other_types(edges, self.labels)
        for name in self.edges:
            self._check(name)
        both = self.undirected is True
        if is_plain:
            leaks.check_held(edges, self.edges, self.negatives, undirected=both)
        else:
            leaks.check_apart(edges, self.edges, self.held_arrays, self.labels, self.time, undirected=both)

    def _check_arrays(self, edges: Edges) -> None:
        if self.time is not None:
            leaks.check_times_of_edges(edges, self.time, self.labels)
        if self.labels is not None or self.time is not None:
            leaks.check_held_arrays(edges, self.labels, self.time, self.edges, self.held_arrays)
        elif self.held_arrays:
            raise ValueError(
                'held_arrays is for edges with labels: name the array that has them, labels="edge_rating".'
            )

    def _settle(self, edges: Edges, reverse: EdgeType | None) -> None:
        """Put what was found out in the place of what was said."""
        edge_type, undirected = edges.kind if have_names(self.graph.types) else None, self.undirected
        if undirected is None and (self.labels is not None or self.time is not None):
            undirected = leaks.both_ways(edges, None)
        elif undirected is None:
            undirected = edge_type is None or leaks.is_undirected(edges)
        check_directions(edge_type, undirected)
        for name, value in (("edge_type", edge_type), ("reverse", reverse), ("undirected", undirected)):
            object.__setattr__(self, name, value)

    @property
    def _edges(self) -> Edges:
        """The edges of the graph that are learned."""
        return Edges.of(self.graph, self.edge_type, self.reverse if isinstance(self.reverse, tuple) else None)

    @classmethod
    def open(cls, path: str | Path) -> LinkSplit:
        """Open a saved split; its arrays are memory-mapped."""
        path = check_path("path", path)
        arrays = store.read(path)[0]
        links = {name.removeprefix("links/"): array for name, array in arrays.items() if name.startswith("links/")}
        if "undirected" not in links:
            raise ValueError(f"{path} is a graph whose edges are not split: save split_edges(Graph.open(path)) first.")
        undirected = _flag(links.pop("undirected"), Path(path))
        kinds = links.pop("edge_types", None)
        ours = {name: array for name, array in links.items() if "/" not in name}  # others are what held edges carry
        edges = {name.removesuffix("_edges"): array for name, array in ours.items() if name.endswith("_edges")}
        named = leaks.saved_names(links, edges, Path(path))
        has_labels = "labels" in named
        wanted = {f"{name}_{kind}" for name in edges for kind in ("edges", "negatives")[: 1 if has_labels else 2]}
        if odd := sorted(wanted ^ links.keys()):
            raise ValueError(f"{path} is damaged (links/{odd[0]} is there, or missing, alone). Copy or save it again.")
        negatives = {} if has_labels else {name: links[f"{name}_negatives"] for name in edges}
        store.verify(Path(path), "links/")
        try:
            graph = Graph.open(path)
            return cls(graph, edges, negatives, undirected, *types_at(graph, kinds, Path(path)), **named)
        except ValueError as error:
            raise ValueError(f"{path} holds no split of edges that can be used. {error}") from error

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that :meth:`open` reads; :meth:`Graph.open` reads the training edges of it."""
        links = {f"links/{name}_edges": edges for name, edges in self.edges.items()}
        links |= {f"links/{name}_negatives": negatives for name, negatives in self.negatives.items()}
        links |= leaks.names_to_save({"labels": self.labels, "time": self.time}, self.held_arrays)
        links["links/undirected"] = torch.tensor([self.undirected])
        if self.edge_type is not None:
            kind = self._edges.ends.target_type
            links["links/edge_types"] = torch.tensor([kind.number, -1 if kind.reverse is None else kind.reverse])
        self.graph.save(path, overwrite=overwrite, beside=links)

    def bounds(self, held: Mapping[str, Tensor]) -> LinkBounds:
        """What is said of the edges of shards, given how many held ones the shards before each one have."""
        until, reverse = None, self.reverse if isinstance(self.reverse, tuple) else None
        if self.time is not None:
            until = min((int(as_integers(of[self.time]).min()) for of in self.held_arrays.values()), default=None)
        said = self.undirected is True, self.edge_type, reverse, self.labels
        return LinkBounds(*said, held, self.time, until)

    @property
    def fingerprint(self) -> str:
        """A hash of all held edges, true and false, and of what they carry."""
        kinds = "" if self.edge_type is None else f" {self.edge_type} {self.reverse}"
        kinds += "" if self.labels is None else f" {self.labels} True"
        kinds += "" if self.time is None else f" by {self.time}"
        digest = hashlib.blake2b(f"{self.graph.fingerprint} {self.undirected}{kinds}".encode(), digest_size=16)
        for name in sorted(self.edges):
            others = [self.negatives[name]] if self.labels is None else []
            carried = sorted(self.held_arrays.get(name, {}).items())
            for array in (self.edges[name], *others, *(rows for _, rows in carried)):
                digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
                digest.update(array.contiguous().numpy().data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={edges.shape[1]}" for name, edges in self.edges.items())
        kind = "" if self.edge_type is None else f", {self.edge_type}"
        of = "".join(f", {n}={v!r}" for n, v in (("labels", self.labels), ("time", self.time)) if v is not None)
        return f"LinkSplit({self.graph}{kind}{of}, {counts})"

    def _leaked(self, edges: Tensor) -> Tensor:
        """Which edges, by their ids, the graph shows."""
        if self.time is not None:  # a seed does not see events of its own time
            return torch.zeros(edges.shape[1], dtype=torch.bool)
        kind, found = self._edges.ends.target_type, torch.zeros(edges.shape[1], dtype=torch.bool)
        for ends in (edges, edges.flip(0)) if self.undirected else (edges,):
            found |= has_edges(self.graph, ends, kind.number)
            if kind.reverse is not None:
                found |= has_edges(self.graph, ends.flip(0), kind.reverse)
        return found

    def _check_reverses(self) -> None:
        """Refuse edges without a reverse. Only some are checked: all would read the whole graph at every opening."""
        ends, edges = self._edges.ends, self._edges.some_links(_EDGES_TO_CHECK)
        alone = ~has_edges(self.graph, edges.flip(0), ends.target_type.number)
        if bool(alone.any()):
            sender, receiver = ends.in_types(edges)[:, alone][:, 0].tolist()
            raise ValueError(
                f"undirected=True, but the graph has {sender} -> {receiver} and not its reverse: give "
                "LinkSplit(..., undirected=False), or add the reverses."
            )

    def _check(self, name: str) -> None:
        edges = self.edges[name]
        leaked = self._leaked(self._edges.ends.in_graph(edges))
        if bool(leaked.any()):
            sender, receiver = edges[:, leaked][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(leaked.sum())} of {edges.shape[1]} edges are among the graph's (the first is "
                f"{sender} -> {receiver}): a model would be asked for what it was shown. Remove both directions of "
                "them from the graph, or use split_edges(graph)."
            )
        if self.labels is None:
            leaks.check_rivals(name, edges, self.negatives[name])


def _flag(array: Tensor, path: Path) -> bool:
    if array.dtype != torch.bool or array.numel() != 1:
        raise ValueError(f"{path / 'links' / 'undirected.npy'} must hold one True or False. Copy or save it again.")
    return bool(array)


def split_edges(
    graph: Graph,
    val: float | str = 0.05,
    test: float | str = 0.1,
    seed: int = 0,
    *,
    negatives: int | None = None,
    undirected: bool | None = None,
    edge_type: EdgeType | None = None,
    reverse: Reverse = "auto",
    labels: str | None = None,
    time: str | None = None,
) -> LinkSplit:
    """Hold edges back for validation and testing: among false ones that they will be ranked with, or with their labels.

    An undirected graph is split by pairs of nodes: both directions and all copies are held back together, and one
    direction, drawn at random, is evaluated. The receiver of a held edge competes with ``negatives`` nodes that the
    sender has no edge to in the whole graph. Loops stay in the graph. Everything is done in RAM.

    With ``labels`` there are no false edges. Shares are of the pairs of nodes with a label between them: all edges
    between two nodes are held together, and each that has a label is evaluated. Those of -1 or NaN have none.

    Args:
        graph: All edges. The result leaves out its masks, which split nodes.
        val: Share of the edges (or pairs) for validation, or the name of a boolean edge array that marks them.
        test: The same for testing: a share if ``val`` is one, or a name or 0.
        seed: The same seed gives the same split.
        negatives: False edges for each true one. Default: 100.
        undirected: Whether the graph holds both directions of every edge, with the same arrays if there are labels, so
            that one of them is asked for. Default: it is found out.
        edge_type: Of a graph with types, the one whose edges are held back: ``("author", "writes", "paper")``. Edges of
            other types stay.
        reverse: The edge type that holds the same links turned round, from which held ones go, too: ``"auto"`` to find
            it by its name, ``rev_...``, or by its links, None if there is none.
        labels: Name of the edge array with what is to be predicted. Default: there are none.
        time: Name of the edge array that says when each edge was there. The last are held, and stay in the graph, for a
            ``TemporalSampler`` shows each what was before it. Default: edges are held back at random.
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    graph.check_whole()
    edges = Edges.of(graph, edge_type := checked_edge_type(graph, edge_type))
    _check_numbers(val, test, seed, negatives, time, has_labels=labels is not None)
    check_directions(edge_type, undirected)
    seed, count = int(seed), 100 if negatives is None else int(negatives)
    if labels is not None:
        check_word("labels", labels, "edge_rating")
    edges, shares = taken_masks(edges, {"val": val, "test": test})
    edges = replace(edges, reverse=edges.reverse_of(reverse))
    if time is not None:
        leaks.check_times_of_edges(edges, time, labels)
        leaks.check_reverse_times(edges, time, is_sure=reverse != "auto")
    found = EdgesToSplit(edges, labels, time, undirected).held_back(shares, seed, count)
    return LinkSplit(*found[:4], edge_type, edges.reverse, labels, found.arrays, time)


def _check_numbers(
    val: float | str, test: float | str, seed: int, negatives: int | None, time: str | None, *, has_labels: bool
) -> None:
    if has_labels:
        check_no_negatives(given=negatives is not None)
    if isinstance(val, str) or isinstance(test, str):
        if not all(isinstance(share, str) or (is_number(share) and share == 0) for share in (val, test)):
            raise ValueError(
                f"val and test must be two shares, or two names of edge arrays that mark edges (or one, and 0 for the "
                f"other), got {shown(val)} and {shown(test)}."
            )
        if time is not None:
            raise ValueError(f"time={shown(time)} decides which edges are held: give val and test as shares.")
    elif not (is_number(val) and is_number(test) and 0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(f"val and test are shares that leave edges to train on, got {shown(val)} and {shown(test)}.")
    check_seed(seed)
    check_at_least_if_given(1, **{"negatives, for each held edge,": negatives})
