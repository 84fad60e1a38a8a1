"""Edges held back to evaluate link prediction, the false edges that they compete with, and the remaining graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_arrays,
    check_at_least,
    check_instance,
    check_path,
    check_seed,
    check_true_or_false,
    is_number,
    shown,
)
from lightning_gnn_dist.data.typed.links import (
    LinkEnds,
    Reverse,
    check_directions,
    checked_edge_type,
    checked_reverse,
    ends_of,
    links_of,
    masks_of_nodes,
    some_links_of,
    types_at,
    without_edges,
)
from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.negatives import draw_receivers, has_edges

_EDGES_TO_CHECK = 1000  # evenly spread over the graph
_NEGATIVES_TO_CHECK = 1 << 20  # evenly spread: these take half a second, at every opening
_SPLIT, _FALSE_ENDS = range(2)


@dataclass(frozen=True, eq=False)
class LinkSplit:
    """A graph of training edges, and true and false edges to evaluate on.

    :func:`split_edges` makes one from a graph. If your data set has its own split, construct it here.

    Args:
        graph: The training edges, which carry messages and are learned.
        edges: The true edges of ``"val"``, ``"test"`` or both, each of shape ``(2, n)``, senders first. With types
            each end is given by its id in its type.
        negatives: For each of these edges K receivers that its sender has no edge to, shape ``(n, K)``.
        undirected: Whether the graph holds both directions of every edge, with types both as edges of that one type.
            Default: with types it is found out, otherwise it does.
        edge_type: Of a graph with types, the one that is predicted.
        reverse: The edge type that holds the same links turned round: ``"auto"`` to find it by its name, ``rev_...``,
            or by its links, None if there is none.
    """

    graph: Graph
    edges: Mapping[str, Tensor]
    negatives: Mapping[str, Tensor]
    undirected: bool | None = None
    edge_type: EdgeType | None = None
    reverse: Reverse = "auto"

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
        if self.edges.keys() != self.negatives.keys():
            raise ValueError(f"There are edges for {list(self.edges)} and negatives for {list(self.negatives)}.")
        if unknown := sorted(self.edges.keys() - {"val", "test"}):
            raise ValueError(f'Edges are held back for "val" or "test", not for {unknown}.')
        edge_type = checked_edge_type(self.graph, self.edge_type)
        ends = ends_of(self.graph, edge_type)
        for name in self.edges:
            ends.check(name, self.edges[name], self.negatives[name])
        held = [ends.in_graph(edges) for edges in self.edges.values()] if edge_type is not None else []
        self._settle(edge_type, checked_reverse(self.graph, edge_type, self.reverse, held))
        if self.undirected:
            self._check_reverses()
        for name in self.edges:
            self._check(name)
        self._check_held()

    def _settle(self, edge_type: EdgeType | None, reverse: EdgeType | None) -> None:
        """Put what was found out in the place of what was said."""
        undirected = self.undirected
        if undirected is None:
            undirected = edge_type is None or _is_undirected(self.graph, edge_type, links_of(self.graph, edge_type)[1])
        check_directions(edge_type, undirected)
        for name, value in (("edge_type", edge_type), ("reverse", reverse), ("undirected", undirected)):
            object.__setattr__(self, name, value)

    @cached_property
    def _ends(self) -> LinkEnds:
        return ends_of(self.graph, self.edge_type, self.reverse)

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
        edges = {name.removesuffix("_edges"): array for name, array in links.items() if name.endswith("_edges")}
        wanted = {f"{name}_{kind}" for name in edges for kind in ("edges", "negatives")}
        if odd := sorted(wanted ^ links.keys()):
            raise ValueError(f"{path} is damaged (links/{odd[0]} is there, or missing, alone). Copy or save it again.")
        negatives = {name: links[f"{name}_negatives"] for name in edges}
        store.verify(Path(path), "links/")
        try:
            graph = Graph.open(path)
            return cls(graph, edges, negatives, undirected, *types_at(graph, kinds, Path(path)))
        except ValueError as error:
            raise ValueError(f"{path} holds no split of edges that can be used. {error}") from error

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that :meth:`open` reads; :meth:`Graph.open` reads the training edges of it."""
        links = {f"links/{name}_edges": edges for name, edges in self.edges.items()}
        links |= {f"links/{name}_negatives": negatives for name, negatives in self.negatives.items()}
        links["links/undirected"] = torch.tensor([self.undirected])
        if (kind := self._ends.target_type) is not None:
            links["links/edge_types"] = torch.tensor([kind.number, -1 if kind.reverse is None else kind.reverse])
        self.graph.save(path, overwrite=overwrite, beside=links)

    @property
    def fingerprint(self) -> str:
        """A hash of all edges, true and false."""
        kinds = "" if self.edge_type is None else f" {self.edge_type} {self.reverse}"
        digest = hashlib.blake2b(f"{self.graph.fingerprint} {self.undirected}{kinds}".encode(), digest_size=16)
        for name in sorted(self.edges):
            for array in (self.edges[name], self.negatives[name]):
                digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
                digest.update(array.contiguous().numpy().data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={edges.shape[1]}" for name, edges in self.edges.items())
        kind = "" if self.edge_type is None else f", {self.edge_type}"
        return f"LinkSplit({self.graph}{kind}, {counts})"

    def _has(self, edges: Tensor) -> Tensor:
        """Whether the graph has each edge, by its ids, among those of the type, in any direction that shows it."""
        kind, found = self._ends.target_type, torch.zeros(edges.shape[1], dtype=torch.bool)
        for ends in (edges, edges.flip(0)) if self.undirected else (edges,):
            found |= has_edges(self.graph, ends, kind and kind.number)
            if kind is not None and kind.reverse is not None:
                found |= has_edges(self.graph, ends.flip(0), kind.reverse)
        return found

    def _check_reverses(self) -> None:
        """Refuse edges without a reverse. Only some are checked: all would read the whole graph at every opening."""
        kind, edges = self._ends.target_type, some_links_of(self.graph, self.edge_type, _EDGES_TO_CHECK)
        alone = ~has_edges(self.graph, edges.flip(0), kind and kind.number)
        if bool(alone.any()):
            sender, receiver = self._ends.in_types(edges)[:, alone][:, 0].tolist()
            raise ValueError(
                f"undirected=True, but the graph has {sender} -> {receiver} and not its reverse: give "
                "LinkSplit(..., undirected=False), or add the reverses."
            )

    def _check(self, name: str) -> None:
        edges, negatives = self.edges[name], self.negatives[name]
        leaked = self._has(self._ends.in_graph(edges))
        if bool(leaked.any()):
            sender, receiver = edges[:, leaked][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(leaked.sum())} of {edges.shape[1]} edges are among the graph's (the first is "
                f"{sender} -> {receiver}): a model would be asked for what it was shown. Remove both directions of "
                "them from the graph, or use split_edges(graph)."
            )
        if bool((rivals_itself := (negatives == edges[1][:, None]).any(1)).any()):
            sender, receiver = edges[:, rivals_itself][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(rivals_itself.sum())} of {edges.shape[1]} edges are among their own negatives (the "
                f"first is {sender} -> {receiver}): the receivers of an edge's negatives must be others than its own."
            )

    def _check_held(self) -> None:
        """Refuse held edges that occur twice, and negatives that are edges, held or of the graph."""
        numbers = {name: self._numbers(edges) for name, edges in self.edges.items()}
        for name, (there, _) in numbers.items():
            if there.unique().numel() < there.numel():
                raise ValueError(f"{name}: some edges are there twice, and would count twice: edges.unique(dim=1).")
        held = torch.cat([torch.cat(both) for both in numbers.values()]) if numbers else torch.zeros(0)
        if len(numbers) == 2 and bool(torch.isin(numbers["val"][0], torch.cat(numbers["test"])).any()):
            raise ValueError(
                "val and test share edges: a model would be chosen by what it is tested on. Deal them again."
            )
        kind = self._ends.target_type
        for name, negatives in self.negatives.items():
            places = torch.arange(0, negatives.numel(), 1 + negatives.numel() // _NEGATIVES_TO_CHECK)
            senders = self.edges[name][0].to(torch.int64)[places // negatives.shape[1]]
            false = torch.stack([senders, negatives.flatten()[places].to(torch.int64)])
            is_edge = has_edges(self.graph, self._ends.in_graph(false), kind and kind.number)
            is_true = is_edge | torch.isin(self._numbers(false)[0], held)
            if bool(is_true.any()):
                sender, receiver = false[:, is_true][:, 0].tolist()
                raise ValueError(
                    f"{name}: {int(is_true.sum())} of {places.numel()} negatives that were seen are edges, such as "
                    f"{sender} -> {receiver}, and a model would lose by being right: draw others, or use "
                    "split_edges(graph)."
                )

    def _numbers(self, edges: Tensor) -> tuple[Tensor, Tensor]:
        """Return a number for each edge, and that of its reverse if undirected, else the same number again."""
        sender, receiver = edges.to(torch.int64)
        there = sender * self.graph.num_nodes + receiver
        return there, receiver * self.graph.num_nodes + sender if self.undirected else there


def _flag(array: Tensor, path: Path) -> bool:
    if array.dtype != torch.bool or array.numel() != 1:
        raise ValueError(f"{path / 'links' / 'undirected.npy'} must hold one True or False. Copy or save it again.")
    return bool(array)


def split_edges(
    graph: Graph,
    val: float = 0.05,
    test: float = 0.1,
    seed: int = 0,
    *,
    negatives: int = 100,
    undirected: bool | None = None,
    edge_type: EdgeType | None = None,
    reverse: Reverse = "auto",
) -> LinkSplit:
    """Hold edges back for validation and testing, and draw the false edges that they will be ranked among.

    An undirected graph is split by pairs of nodes: both directions and all copies are held back together, and one
    direction, drawn at random, is evaluated. The receiver of a held edge competes with ``negatives`` nodes that the
    sender has no edge to in the whole graph. Loops stay in the graph. Everything is done in RAM.

    Args:
        graph: All edges. The result leaves out its masks, which split nodes.
        val: Share of the edges (or pairs) for validation.
        test: Share for testing.
        seed: The same seed gives the same split.
        negatives: False edges for each true one.
        undirected: Whether the graph holds both directions of every edge. Default: it is found out.
        edge_type: Of a graph with types, the one whose edges are held back: ``("author", "writes", "paper")``. Edges of
            other types stay.
        reverse: The edge type that holds the same links turned round, from which held ones go, too: ``"auto"`` to find
            it by its name, ``rev_...``, or by its links, None if there is none.
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    graph.check_whole()
    edge_type = checked_edge_type(graph, edge_type)
    if not (is_number(val) and is_number(test) and 0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(f"val and test are shares that leave edges to train on, got {shown(val)} and {shown(test)}.")
    check_seed(seed)
    check_at_least(1, **{"negatives, for each held edge,": negatives})
    if undirected is not None:
        check_true_or_false(undirected=undirected)
    check_directions(edge_type, undirected)
    seed, size = int(seed), graph.num_nodes
    at, links = links_of(graph, edge_type)
    is_undirected = _is_undirected(graph, edge_type, links)
    if undirected and not is_undirected:
        raise ValueError("undirected=True, but some edges have no reverse: add them, or leave undirected out.")
    undirected = is_undirected if undirected is None else undirected
    reverse = checked_reverse(graph, edge_type, reverse)
    pairs, pair_of_edge = _pairs(links, size, undirected)
    held = _dealt(pairs.numel(), {"val": val, "test": test}, seed)
    is_held = torch.zeros(pairs.numel() + 1, dtype=torch.bool)  # loops are pair -1
    is_held[torch.cat([*held.values(), pairs[:0]])] = True
    kept = torch.ones(graph.num_edges, dtype=torch.bool)
    kept[at] = ~is_held[pair_of_edge]
    if reverse is not None:
        back, turned = links_of(graph, reverse)
        kept[back] = ~torch.isin(_numbers(turned.flip(0), size, undirected), pairs[is_held[:-1]])
    edges = {name: _decoded(pairs[which], size, seed, undirected) for name, which in held.items()}
    ends = ends_of(graph, edge_type)
    false = {name: _false_ends(graph, some, held[name], int(negatives), seed, ends) for name, some in edges.items()}
    edges = {name: ends.in_types(some) for name, some in edges.items()}
    return LinkSplit(without_edges(graph, kept), edges, false, undirected, edge_type, reverse)


def _dealt(total: int, shares: Mapping[str, float], seed: int) -> dict[str, Tensor]:
    """Return which of all pairs are held back under each name, if any are."""
    counts = {name: round(share * total) for name, share in shares.items()}
    for name, share in shares.items():
        if share and not counts[name]:
            raise ValueError(
                f"{name}={share} of {total} edges (or pairs, without loops) is none: give a larger share, or {name}=0."
            )
    if any(counts.values()) and sum(counts.values()) == total:
        raise ValueError(
            f"val and test would hold all {total} edges (or pairs, without loops), and none is left to train on: give "
            "smaller shares."
        )
    order = permutation(total, seed + Purpose.LINKS, _SPLIT)[: sum(counts.values())]
    held = dict(zip(counts, order.split(list(counts.values())), strict=True))
    return {name: which for name, which in held.items() if len(which)}


def _is_undirected(graph: Graph, edge_type: EdgeType | None, links: Tensor) -> bool:
    """Whether each link is there in both directions, among nodes of one type."""
    if edge_type is not None and edge_type[0] != edge_type[2]:
        return False
    # unique(): an edge with more copies than its reverse has a reverse all the same.
    there, back = (_numbers(ends, graph.num_nodes, undirected=False).unique() for ends in (links, links.flip(0)))
    return torch.equal(there, back)


def _numbers(links: Tensor, num_nodes: int, undirected: bool) -> Tensor:
    """A number for each edge; if ``undirected``, that of both directions."""
    first, last = (links.amin(0), links.amax(0)) if undirected else links
    return first * num_nodes + last


def _pairs(links: Tensor, num_nodes: int, undirected: bool) -> tuple[Tensor, Tensor]:
    """Return a number for each distinct edge or pair, and for each edge its place among them, -1 for loops."""
    is_loop = links[0] == links[1]
    pairs, which = _numbers(links, num_nodes, undirected)[~is_loop].unique(return_inverse=True)
    pair_of_edge = torch.full_like(links[0], -1)
    pair_of_edge[~is_loop] = which
    return pairs, pair_of_edge


def _decoded(pairs: Tensor, num_nodes: int, seed: int, undirected: bool) -> Tensor:
    """Return the edges that the numbers stand for, one direction of each pair, shape ``(2, n)``."""
    edges = torch.stack([pairs // num_nodes, pairs % num_nodes])
    if not undirected:
        return edges
    flips = draw_bits(key(seed + Purpose.LINKS, 0, 0, _SPLIT), pairs)
    return torch.where(flips, edges.flip(0), edges)


def _false_ends(graph: Graph, edges: Tensor, ids: Tensor, count: int, seed: int, ends: LinkEnds) -> Tensor:
    """False receivers for each edge, by their ids in their type."""
    false_key, kind = key(seed + Purpose.LINKS, 0, 0, _FALSE_ENDS), ends.target_type
    drawn, without = draw_receivers(graph, edges[0], ids, count, false_key, ends.receivers, kind and kind.number)
    if without.numel():
        sender = int(edges[0][without[0]]) - ends.senders.start
        raise ValueError(f"Node {sender} has an edge to every other: there is no false one to draw.")
    return drawn - ends.receivers.start
