"""Edges held back to evaluate link prediction, the false edges that they compete with, and the remaining graph."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
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
from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.sampling.links import edges_at
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
        edges: The true edges of ``"val"``, ``"test"`` or both, each of shape ``(2, n)``, senders first.
        negatives: For each of these edges K receivers that its sender has no edge to, shape ``(n, K)``.
        undirected: Whether the graph holds both directions of every edge.
    """

    graph: Graph
    edges: Mapping[str, Tensor]
    negatives: Mapping[str, Tensor]
    undirected: bool = True

    def __post_init__(self) -> None:
        check_instance("graph", self.graph, Graph, "a Graph of the training edges")
        self.graph.check_whole()
        check_arrays(edges=self.edges, negatives=self.negatives)
        check_true_or_false(undirected=self.undirected)
        masks = [name for name in self.graph.node_arrays if name.endswith("_mask")]
        if masks:
            raise ValueError(
                f"The graph has {masks}, which split nodes, and here edges are split: leave these arrays out, or use "
                "split_edges(graph), which does."
            )
        if self.edges.keys() != self.negatives.keys():
            raise ValueError(f"There are edges for {list(self.edges)} and negatives for {list(self.negatives)}.")
        if unknown := sorted(self.edges.keys() - {"val", "test"}):
            raise ValueError(f'Edges are held back for "val" or "test", not for {unknown}.')
        if self.undirected:
            self._check_reverses()
        for name in self.edges:
            self._check(name, self.edges[name], self.negatives[name])
        self._check_held()

    @classmethod
    def open(cls, path: str | Path) -> LinkSplit:
        """Open a saved split; its arrays are memory-mapped."""
        path = check_path("path", path)
        arrays = store.read(path)[0]
        links = {name.removeprefix("links/"): array for name, array in arrays.items() if name.startswith("links/")}
        if "undirected" not in links:
            raise ValueError(f"{path} is a graph whose edges are not split: save split_edges(Graph.open(path)) first.")
        undirected = _flag(links.pop("undirected"), Path(path))
        edges = {name.removesuffix("_edges"): array for name, array in links.items() if name.endswith("_edges")}
        wanted = {f"{name}_{kind}" for name in edges for kind in ("edges", "negatives")}
        if odd := sorted(wanted ^ links.keys()):
            raise ValueError(f"{path} is damaged (links/{odd[0]} is there, or missing, alone). Copy or save it again.")
        negatives = {name: links[f"{name}_negatives"] for name in edges}
        store.verify(Path(path), "links/")
        try:
            return cls(Graph.open(path), edges, negatives, undirected)
        except ValueError as error:
            raise ValueError(f"{path} holds no split of edges that can be used. {error}") from error

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that :meth:`open` reads; :meth:`Graph.open` reads the training edges of it."""
        links = {f"links/{name}_edges": edges for name, edges in self.edges.items()}
        links |= {f"links/{name}_negatives": negatives for name, negatives in self.negatives.items()}
        self.graph.save(path, overwrite=overwrite, beside=links | {"links/undirected": torch.tensor([self.undirected])})

    @property
    def fingerprint(self) -> str:
        """A hash of all edges, true and false."""
        digest = hashlib.blake2b(f"{self.graph.fingerprint} {self.undirected}".encode(), digest_size=16)
        for name in sorted(self.edges):
            for array in (self.edges[name], self.negatives[name]):
                digest.update(f"{name} {array.dtype} {tuple(array.shape)}".encode())
                digest.update(array.contiguous().numpy().data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}={edges.shape[1]}" for name, edges in self.edges.items())
        return f"LinkSplit({self.graph}, {counts})"

    def _check_reverses(self) -> None:
        """Refuse edges without a reverse. Only some are checked: all would read the whole graph at every opening."""
        number = self.graph.num_edges
        edges = edges_at(self.graph, torch.arange(0, number, max(1, number // _EDGES_TO_CHECK)))
        alone = ~has_edges(self.graph, edges.flip(0))
        if bool(alone.any()):
            sender, receiver = edges[:, alone][:, 0].tolist()
            raise ValueError(
                f"undirected=True, but the graph has {sender} -> {receiver} and not its reverse: give "
                "LinkSplit(..., undirected=False), or add the reverses."
            )

    def _check(self, name: str, edges: Tensor, negatives: Tensor) -> None:
        if edges.dim() != 2 or len(edges) != 2 or negatives.dim() != 2 or len(negatives) != edges.shape[1]:
            raise ValueError(
                f"{name}: edges need the shape (2, n) and negatives (n, K), got {tuple(edges.shape)} and "
                f"{tuple(negatives.shape)}."
            )
        for ids in (edges, negatives):
            low, high = (int(ids.min()), int(ids.max())) if ids.numel() else (0, 0)
            if ids.dtype not in (torch.int32, torch.int64) or not 0 <= low <= high < self.graph.num_nodes:
                raise ValueError(f"{name}: edges and negatives hold node ids, integers in [0, {self.graph.num_nodes}).")
        if not edges.shape[1]:
            raise ValueError(f"{name}: there are no edges to judge by, and their mean would be NaN: leave {name} out.")
        if not negatives.shape[1]:
            raise ValueError(f"{name}: negatives of shape {tuple(negatives.shape)} leave each edge without a rival.")
        leaked = has_edges(self.graph, edges)
        if self.undirected:
            leaked |= has_edges(self.graph, edges.flip(0))
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
        for name, negatives in self.negatives.items():
            places = torch.arange(0, negatives.numel(), 1 + negatives.numel() // _NEGATIVES_TO_CHECK)
            senders = self.edges[name][0].to(torch.int64)[places // negatives.shape[1]]
            false = torch.stack([senders, negatives.flatten()[places].to(torch.int64)])
            is_true = has_edges(self.graph, false) | torch.isin(self._numbers(false)[0], held)
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
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    graph.check_whole()
    graph.check_untyped()
    if not (is_number(val) and is_number(test) and 0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(f"val and test are shares that leave edges to train on, got {shown(val)} and {shown(test)}.")
    check_seed(seed)
    check_at_least(1, **{"negatives, for each held edge,": negatives})
    if undirected is not None:
        check_true_or_false(undirected=undirected)
    seed, negatives = int(seed), int(negatives)
    sender, receiver = edges_of(graph)
    is_undirected = _is_symmetric(sender, receiver, graph.num_nodes)
    if undirected and not is_undirected:
        raise ValueError("undirected=True, but some edges have no reverse: add them, or leave undirected out.")
    undirected = is_undirected if undirected is None else undirected
    pairs, pair_of_edge = _pairs(sender, receiver, graph.num_nodes, undirected)
    order = permutation(pairs.numel(), seed + Purpose.LINKS, _SPLIT)
    counts = {"val": round(val * pairs.numel()), "test": round(test * pairs.numel())}
    _check_counts(pairs.numel(), counts, {"val": val, "test": test})
    held = dict(zip(counts, order[: sum(counts.values())].split(list(counts.values())), strict=True))
    is_held = torch.zeros(pairs.numel() + 1, dtype=torch.bool)  # loops are pair -1
    is_held[order[: sum(counts.values())]] = True
    held = {name: which for name, which in held.items() if len(which)}
    edges = {name: _decoded(pairs[which], graph.num_nodes, seed, undirected) for name, which in held.items()}
    false = {name: _false_ends(graph, ends, held[name], negatives, seed) for name, ends in edges.items()}
    return LinkSplit(_without(graph, is_held[pair_of_edge]), edges, false, undirected)


def _check_counts(total: int, counts: Mapping[str, int], shares: Mapping[str, float]) -> None:
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


def edges_of(graph: Graph) -> tuple[Tensor, Tensor]:
    """Return all senders and all receivers: int64, shape ``(num_edges,)``, in the order of ``graph.indices``."""
    receivers = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    return graph.indices.to(torch.int64), receivers


def _is_symmetric(sender: Tensor, receiver: Tensor, num_nodes: int) -> bool:
    # unique(): an edge with more copies than its reverse has a reverse all the same.
    there, back = (sender * num_nodes + receiver).unique(), (receiver * num_nodes + sender).unique()
    return torch.equal(there, back)


def _pairs(sender: Tensor, receiver: Tensor, num_nodes: int, undirected: bool) -> tuple[Tensor, Tensor]:
    """Return a number for each distinct edge or pair, and for each edge its place among them, -1 for loops."""
    first, last = (sender.minimum(receiver), sender.maximum(receiver)) if undirected else (sender, receiver)
    is_loop = sender == receiver
    pairs, which = (first * num_nodes + last)[~is_loop].unique(return_inverse=True)
    pair_of_edge = torch.full_like(sender, -1)
    pair_of_edge[~is_loop] = which
    return pairs, pair_of_edge


def _decoded(pairs: Tensor, num_nodes: int, seed: int, undirected: bool) -> Tensor:
    """Return the edges that the numbers stand for, one direction of each pair, shape ``(2, n)``."""
    edges = torch.stack([pairs // num_nodes, pairs % num_nodes])
    if not undirected:
        return edges
    flips = draw_bits(key(seed + Purpose.LINKS, 0, 0, _SPLIT), pairs)
    return torch.where(flips, edges.flip(0), edges)


def _false_ends(graph: Graph, edges: Tensor, ids: Tensor, count: int, seed: int) -> Tensor:
    drawn, without = draw_receivers(graph, edges[0], ids, count, key(seed + Purpose.LINKS, 0, 0, _FALSE_ENDS))
    if without.numel():
        raise ValueError(f"Node {int(edges[0][without[0]])} has an edge to every other: there is no false one to draw.")
    return drawn


def _without(graph: Graph, is_held: Tensor) -> Graph:
    kept = ~is_held
    upto = torch.cat([graph.indptr[:1], kept.cumsum(0)])
    nodes = {name: array for name, array in graph.node_arrays.items() if not name.endswith("_mask")}
    edges = {name: array[kept] for name, array in graph.edge_arrays.items()}
    return Graph(upto[graph.indptr], graph.indices[kept], nodes, edges)
