"""Edges held back to evaluate link prediction, the false edges that they compete with, and the remaining graph.

They are held back at random, or the last, or as the user's own: to be told from false ones, or with their labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_arrays,
    check_at_least_if_given,
    check_instance,
    check_path,
    check_seed,
    check_word,
    is_number,
    shown,
)
from lightning_gnn_dist.engine.rng import Purpose, draw_bits, key, permutation
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.edges import (
    Edges,
    Reverse,
    both_ways,
    check_directions,
    check_labels,
    check_same_times,
    check_times_of_edges,
    counts_of_rows,
    labelled,
    numbers_of,
    settled,
    without_reverse,
)
from lightning_gnn_dist.extensions.links.link_sampler import edges_at
from lightning_gnn_dist.extensions.links.negatives import Candidates, Moments, draw_receivers, has_edges
from lightning_gnn_dist.extensions.temporal.time_split import is_labelled, parted_by_time
from lightning_gnn_dist.extensions.temporal.times import time_order, times_of_receivers
from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.types import EdgeType

SPLIT, FALSE_ENDS = range(2)  # what is drawn
Places = dict[str, Tensor]  # by "val" and "test"
Shares = Mapping[str, float]  # of all, by "val" and "test"
_NAMED = ("labels", "time")  # arrays of edges that a split names
_EDGES_TO_CHECK = 1000  # evenly spread over the graph
_NEGATIVES_TO_CHECK = 1 << 20  # evenly spread: these take half a second, at every opening


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
            None if there is none.
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
        masks = [n.removeprefix("nodes/") for n in self.graph.arrays if n.startswith("nodes/") and n.endswith("_mask")]
        if masks:
            raise ValueError(
                f"The graph has {masks}, which split nodes, and here edges are split: leave these arrays out, or use "
                "split_edges(graph), which does."
            )
        if self.labels is not None:
            check_no_negatives(given=bool(self.negatives))
        elif self.edges.keys() != self.negatives.keys():
            raise ValueError(f"There are edges for {list(self.edges)} and negatives for {list(self.negatives)}.")
        if unknown := sorted(self.edges.keys() - {"val", "test"}):
            raise ValueError(f'Edges are held back for "val" or "test", not for {unknown}.')
        edges, said = Edges.named(self.graph, self.edge_type), self.reverse
        check_directions(edges, self.undirected)
        for name in self.edges:
            edges.ends.check(name, self.edges[name], self.negatives.get(name))
        edges = edges.reversed_by(said, [edges.ends.in_graph(of) for of in self.edges.values()])
        if self.time is not None:
            check_times_of_edges(edges, self.time, self.labels, is_sure=said != "auto")
        _check_carried(self, edges)
        found = {"edge_type": edges.edge_type, "reverse": edges.reverse, "undirected": self._is_undirected(edges)}
        for argument, value in found.items():
            object.__setattr__(self, argument, value)
        for check in (_check_hidden, _check_rivals, _check_apart):
            check(self, edges)

    def _is_undirected(self, edges: Edges) -> bool:
        if self.undirected is not None:
            return self.undirected
        if self.labels is not None or self.time is not None:
            return both_ways(edges, None)
        return edges.edge_type is None or without_reverse(edges)[0] == 0

    @classmethod
    def open(cls, path: str | Path) -> LinkSplit:
        """Open a saved split; its arrays are memory-mapped."""
        path = check_path("path", path)
        arrays = store.read(path)[0]
        links = {name.removeprefix("links/"): array for name, array in arrays.items() if name.startswith("links/")}
        if "undirected" not in links:
            raise ValueError(f"{path} is a graph whose edges are not split: save split_edges(Graph.open(path)) first.")
        carried = dict[str, dict[str, Tensor]]()  # by held edges
        for name in [name for name in links if "/" in name]:
            split, _, array = name.partition("/")
            carried.setdefault(split, {})[array] = links.pop(name)
        undirected, kinds = links.pop("undirected"), links.pop("edge_types", None)
        if undirected.dtype != torch.bool or undirected.numel() != 1:
            raise ValueError(f"{path / 'links' / 'undirected.npy'} must hold one True or False. Copy or save it again.")
        named = _names(links, path)
        edges = {name.removesuffix("_edges"): array for name, array in links.items() if name.endswith("_edges")}
        wanted = ("edges",) if "labels" in named else ("edges", "negatives")
        if odd := sorted({f"{name}_{kind}" for name in edges for kind in wanted} ^ links.keys()):
            raise ValueError(f"{path} is damaged (links/{odd[0]} is there, or missing, alone). Copy or save it again.")
        negatives = {} if "labels" in named else {name: links[f"{name}_negatives"] for name in edges}
        store.verify(path, "links/")
        try:
            graph = Graph.open(path)
            kind = _types_at(graph, kinds, path)
            return cls(graph, edges, negatives, bool(undirected), *kind, held_arrays=carried, **named)
        except ValueError as error:
            raise ValueError(f"{path} holds no split of edges that can be used. {error}") from error

    def save(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a folder that :meth:`open` reads; :meth:`Graph.open` reads the training edges of it."""
        links = {f"{name}_edges": edges for name, edges in self.edges.items()}
        links |= {f"{name}_negatives": negatives for name, negatives in self.negatives.items()}
        links |= {f"{split}/{name}": rows for split, of in self.held_arrays.items() for name, rows in of.items()}
        for said in _NAMED:
            if (name := getattr(self, said)) is not None:
                links |= {said: torch.tensor(list(name.encode()), dtype=torch.uint8), "hide": torch.tensor([True])}
        links["undirected"] = torch.tensor([self.undirected])
        if self.edge_type is not None:
            numbers = [-1 if kind is None else self.graph.types.edge_types.index(kind) for kind in self._kinds]
            links["edge_types"] = torch.tensor(numbers)
        self.graph.save(path, overwrite=overwrite, beside={f"links/{name}": array for name, array in links.items()})

    @property
    def _kinds(self) -> tuple[EdgeType | None, EdgeType | None]:
        """The edge type and its reverse."""
        return self.edge_type, None if self.reverse == "auto" else self.reverse

    def bounds(self, held: Mapping[str, Tensor]) -> LinkBounds:
        """What is said of the edges of shards, given how many held ones the shards before each one have."""
        until = None
        if self.time is not None:
            until = min((int(of[self.time].min()) for of in self.held_arrays.values()), default=None)
        return LinkBounds(self.undirected is True, *self._kinds, self.labels, held, self.time, until)

    @property
    def links(self) -> LinkBounds:
        """What shards would say of its edges, if one shard had all."""
        return self.bounds({name: torch.tensor([0, edges.shape[1]]) for name, edges in self.edges.items()})

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
        of = "".join(f", {name}={getattr(self, name)!r}" for name in _NAMED if getattr(self, name) is not None)
        return f"LinkSplit({self.graph}{kind}{of}, {counts})"


def check_no_negatives(*, given: bool) -> None:
    """Refuse false edges beside labels."""
    if given:
        raise ValueError("negatives are for splits without labels: false edges have none. Leave negatives out.")


def _names(links: dict[str, Tensor], path: Path) -> dict[str, Any]:
    """Take the names of labels and times out of a saved split's arrays."""
    named = {said: links.pop(said) for said in _NAMED if said in links}
    if not named:
        return {}
    hide = links.pop("hide", torch.empty(0))
    if any(name.dtype != torch.uint8 for name in named.values()) or hide.dtype != torch.bool or hide.numel() != 1:
        raise ValueError(f"{path} is damaged (links/{min(named)} or links/hide cannot be read). Copy or save it again.")
    if not bool(hide):
        raise ValueError(f"{path} shows edges that are asked for. {way_out('split_edges.hide')} Split the graph again.")
    return {said: bytes(name.tolist()).decode(errors="replace") for said, name in named.items()}


def _types_at(graph: Graph, kinds: Tensor | None, path: Path) -> tuple[EdgeType | None, EdgeType | None]:
    """The edge type of a saved split and its reverse."""
    of_graph = graph.types.edge_types
    is_right = kinds is None or (kinds.shape == (2,) and -1 <= int(kinds.min()) <= int(kinds.max()) < len(of_graph))
    if not is_right or (kinds is None) == graph.types.have_names:
        raise ValueError(f"{path / 'links' / 'edge_types.npy'} must name two edge types. Copy or save it again.")
    if kinds is None:
        return None, None
    number, reverse = kinds.tolist()
    return of_graph[number], None if reverse < 0 else of_graph[reverse]


def _check_carried(split: LinkSplit, edges: Edges) -> None:
    """Refuse arrays of held edges that are not those of the graph's edges, and held edges without labels."""
    held, labels = split.held_arrays, split.labels
    if not isinstance(held, Mapping) or not all(isinstance(arrays, Mapping) for arrays in held.values()):
        raise TypeError(
            'held_arrays must hold the arrays of each split by name, as {"val": {"edge_rating": ...}}, got '
            f"{shown(held)}."
        )
    for arrays in held.values():
        check_arrays(held_arrays=arrays)
    if labels is None and split.time is None:
        if held:
            raise ValueError(
                'held_arrays is for edges with labels: name the array that has them, labels="edge_rating".'
            )
        return
    ours = edges.arrays
    if labels is not None:
        check_labels(labels, edges.array("labels", labels))
    elif split.time is not None:
        ours = {split.time: ours[split.time]}
    if split.edges.keys() != held.keys():
        raise ValueError(f"There are edges for {list(split.edges)} and held_arrays for {list(held)}.")
    for name, arrays in held.items():
        if arrays.keys() != ours.keys():
            raise ValueError(
                f"held_arrays of {name} are {shown(sorted(arrays))}, and edges of the graph carry "
                f"{shown(sorted(ours))}: batches of both must have the same."
            )
        for array, rows in arrays.items():
            wanted, like = (split.edges[name].shape[1], *ours[array].shape[1:]), ours[array].dtype
            if rows.shape != wanted or rows.dtype != like:
                raise ValueError(
                    f"held_arrays: {array} of {name} must be {like} of shape {wanted}, as the graph's is, got "
                    f"{shown(rows)}."
                )
        if labels is not None:
            check_labels(labels, arrays[labels])
            if not bool(is_labelled(arrays[labels]).all()):
                raise ValueError(f"held_arrays: some edges of {name} have no label to be judged by: leave them out.")


def _check_hidden(split: LinkSplit, edges: Edges) -> None:
    """Refuse a graph that shows held edges, labels, or the reverses of edges that are said to be directed."""
    if split.undirected:
        _check_reverses(edges)
    for other in edges.others() if split.labels is not None else ():
        if split.labels in other.arrays:
            turned = edges.reverse is None and other.kind[::2] == edges.kind[::-2]
            raise ValueError(
                f"Edges of {other.kind} lead between the same types of nodes as those of {edges.kind}, and have an "
                f"array {shown(split.labels)}, too, in which batches could show the labels that are asked for: "
                + (f"if they are the same links turned round, say reverse={other.kind}; otherwise " if turned else "")
                + "give that array another name, or leave it out."
            )
    for name, held in split.edges.items() if split.time is None else ():  # a seed does not see events of its own time
        kinds, ends = edges.ends.kinds, edges.ends.in_graph(held)
        found = torch.zeros(held.shape[1], dtype=torch.bool)
        for both in (ends, ends.flip(0)) if split.undirected else (ends,):
            found |= has_edges(edges.graph, both, kinds[0])
            if edges.reverse is not None:
                found |= has_edges(edges.graph, both.flip(0), kinds[1])
        if bool(found.any()):
            sender, receiver = held[:, found][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(found.sum())} of {held.shape[1]} edges are among the graph's (the first is "
                f"{sender} -> {receiver}): a model would be asked for what it was shown. Remove both directions of "
                "them from the graph, or use split_edges(graph)."
            )


def _check_reverses(edges: Edges) -> None:
    """Refuse edges without a reverse. Only some are checked: all would read the whole graph at every opening."""
    num_edges = edges.graph.num_edges
    if len(edges.graph.types.edge_types) == 1:  # nobody lists all
        links = edges_at(edges.graph, torch.arange(0, num_edges, max(1, num_edges // _EDGES_TO_CHECK)))
    else:
        links = edges_at(edges.graph, edges.at[:: max(1, len(edges.at) // _EDGES_TO_CHECK)].contiguous())
    alone = ~has_edges(edges.graph, links.flip(0), edges.ends.kinds[0])
    if bool(alone.any()):
        sender, receiver = edges.ends.in_types(links)[:, alone][:, 0].tolist()
        raise ValueError(
            f"undirected=True, but the graph has {sender} -> {receiver} and not its reverse: give "
            "LinkSplit(..., undirected=False), or add the reverses."
        )


def _check_rivals(split: LinkSplit, edges: Edges) -> None:
    """Refuse negatives that lead to the receiver of their own edge, or that are edges, held or of the graph."""
    size, in_graph, both = edges.graph.num_nodes, edges.ends.in_graph, split.undirected is True
    all_held = [numbers_of(in_graph(of), size, undirected=both) for of in split.edges.values()]
    for name, negatives in split.negatives.items():
        held = split.edges[name]
        if bool((own := (negatives == held[1][:, None]).any(1)).any()):
            sender, receiver = held[:, own][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(own.sum())} of {held.shape[1]} edges are among their own negatives (the "
                f"first is {sender} -> {receiver}): the receivers of an edge's negatives must be others than its own."
            )
        if split.time is not None:
            continue  # they are edges of other times
        places = torch.arange(0, negatives.numel(), 1 + negatives.numel() // _NEGATIVES_TO_CHECK)
        false = in_graph(torch.stack([held[0][places // negatives.shape[1]], negatives.flatten()[places]]))
        is_true = has_edges(edges.graph, false, edges.ends.kinds[0])
        is_true |= torch.isin(numbers_of(false, size, undirected=both), torch.cat(all_held))
        if bool(is_true.any()):
            sender, receiver = edges.ends.in_types(false)[:, is_true][:, 0].tolist()
            raise ValueError(
                f"{name}: {int(is_true.sum())} of {places.numel()} negatives that were seen are edges, such as "
                f"{sender} -> {receiver}, and a model would lose by being right: draw others, or use "
                "split_edges(graph)."
            )


def _check_apart(split: LinkSplit, edges: Edges) -> None:
    """Refuse held edges that occur twice, or that val and test share, and those of val later than some of test.

    Edges with labels or times are told apart by these too.
    """
    time, rows = split.time, split.held_arrays
    apart = [name for name in (split.labels, time) if name is not None]
    ends = {name: edges.ends.in_graph(of) for name, of in split.edges.items()}
    for name, of in ends.items():
        if not apart and numbers_of(of, edges.graph.num_nodes).unique().numel() < of.shape[1]:
            raise ValueError(f"{name}: some edges are there twice, and would count twice: edges.unique(dim=1).")
    if ends.keys() != {"val", "test"}:
        return
    both = split.undirected is True
    val, test = (numbers_of(ends[name], edges.graph.num_nodes, undirected=both) for name in ("val", "test"))
    counts = counts_of_rows(val, test, [(rows["val"][name], rows["test"][name]) for name in apart])
    shared = int(((counts[0] > 0) & (counts[1] > 0)).sum())
    if shared and not apart:
        raise ValueError("val and test share edges: a model would be chosen by what it is tested on. Deal them again.")
    if shared:
        raise ValueError(
            f"val and test share edges of the same ends and {' and '.join(apart)} ({shared} of val): a model would be "
            "chosen by what it is tested on. Leave each in one of them."
        )
    if time is not None and bool((latest := rows["val"][time].max()) > (first := rows["test"][time].min())):
        raise ValueError(
            f"val has events until {time}={latest.item()}, and test from {first.item()} on: a model would be "
            "chosen by what happens after events that it is tested on. Let those of val be the earlier ones."
        )


def split_edges(
    graph: Graph,
    val: float = 0.05,
    test: float = 0.1,
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
        val: Share of the edges (or pairs) for validation.
        test: The same for testing.
        seed: The same seed gives the same split.
        negatives: False edges for each true one. Default: 100.
        undirected: Whether the graph holds both directions of every edge, with the same arrays if there are labels, so
            that one of them is asked for. Default: it is found out.
        edge_type: Of a graph with types, the one whose edges are held back: ``("author", "writes", "paper")``. Edges of
            other types stay.
        reverse: The edge type that holds the same links turned round, from which held ones go, too: ``"auto"`` to find
            it by its name, ``rev_...``, None if there is none.
        labels: Name of the edge array with what is to be predicted. Default: there are none.
        time: Name of the edge array that says when each edge was there. The last are held, and stay in the graph, for a
            ``TemporalSampler`` shows each what was before it. Default: edges are held back at random.
    """
    check_instance("graph", graph, Graph, "a Graph, as Graph.from_pyg(data) makes it")
    graph.check_whole()
    edges = Edges.named(graph, edge_type)
    if labels is not None:
        check_no_negatives(given=negatives is not None)
        check_word("labels", labels, "edge_rating")
    if not (is_number(val) and is_number(test) and 0 <= val < 1 and 0 <= test < 1 and val + test < 1):
        raise ValueError(
            f"val and test are shares that leave edges to train on, got {shown(val)} and {shown(test)}. A split of "
            "your own is LinkSplit(graph, edges, negatives)."
        )
    check_seed(seed)
    check_at_least_if_given(1, **{"negatives, for each held edge,": negatives})
    check_directions(edges, undirected)
    edges = edges.reversed_by(reverse)
    if time is not None:
        check_times_of_edges(edges, time, labels, is_sure=reverse != "auto")
    splitting = Splitting(edges, labels, time, undirected, int(seed))
    return splitting.split({"val": float(val), "test": float(test)}, 100 if negatives is None else int(negatives))


class Splitting:
    """The edges of a type, some of which are to be held back: at random, or the last ones.

    At random, both directions of a pair of nodes, and with labels all edges between them, are held together, and of an
    undirected graph one direction is asked for. By time those of one time stay together, in the later split.

    Args:
        edges: The edges.
        labels: The name of the array of their labels, if they are held back with these.
        time: The name of the array of their times, if the last of them are held back.
        undirected: Whether both directions of each are there, and carry the same. None: find out.
        seed: Decides what is random.
    """

    def __init__(self, edges: Edges, labels: str | None, time: str | None, undirected: bool | None, seed: int) -> None:
        self._edges, self._labels, self._time, self._seed = edges, labels, time, seed + Purpose.LINKS
        links = edges.links
        self._can_be_held = links[0] != links[1] if labels is None else labelled(edges, labels)
        if time is not None:
            check_same_times(edges, time)
        find_out = settled if labels is None and time is None else both_ways
        self._undirected = find_out(edges, undirected)
        self._are_pairs = self._undirected or labels is not None  # both directions together
        numbers = numbers_of(links, edges.graph.num_nodes, undirected=self._are_pairs)
        self._numbers, self._pair = numbers.unique(return_inverse=True)  # of all pairs of nodes, and that of each edge
        self._asked = self._can_be_held
        if self._undirected:  # one direction, drawn for each pair; loops lead there
            flips = draw_bits(key(self._seed, 0, 0, SPLIT), self._numbers)[self._pair]
            self._asked = self._asked & ((links[0] == links[1]) | ((links[0] < links[1]) ^ flips))

    def split(self, shares: Shares, negatives: int) -> LinkSplit:
        """Hold shares of the edges back, each with so many false receivers, where there are no labels."""
        edges, time, ends = self._edges, self._time, self._edges.ends
        graph, rows, ids = self._at_random(shares) if time is None else self._last(shares, time)
        carried = edges.arrays if self._labels is not None else {} if time is None else {time: edges.arrays[time]}
        arrays = {name: {array: of[at] for array, of in carried.items()} for name, at in rows.items() if carried}
        false = dict[str, Tensor]()
        if self._labels is None:
            false = {name: self._false_ends(at, ids[name], negatives) for name, at in rows.items()}
        held = {name: ends.in_types(edges.links[:, at]) for name, at in rows.items()}
        of_types = self._undirected, edges.edge_type, edges.reverse
        return LinkSplit(graph, held, false, *of_types, self._labels, arrays, time)

    def _at_random(self, shares: Shares) -> tuple[Graph, Places, Places]:
        """Choose pairs of nodes: with labels all edges between them that are asked for, otherwise one of each.

        Return the graph without them, for each name their places among the edges of their
        type, and a number for each, by which false receivers are drawn.
        """
        edges, choice = self._edges, self._pair[self._can_be_held].unique()
        held = self._dealt(shares, choice)
        is_held, asked = torch.zeros_like(self._numbers, dtype=torch.bool), self._asked.nonzero().view(-1)
        is_held[torch.cat([choice[:0], *held.values()])] = True
        of_asked, rows = self._pair[asked], Places()
        first = torch.full_like(self._numbers, len(self._pair)).scatter_reduce(0, of_asked, asked, "amin")
        for name, pairs in held.items():
            rows[name] = first[pairs] if self._labels is None else asked[torch.isin(of_asked, pairs)]
        kept = torch.ones(edges.graph.num_edges, dtype=torch.bool)
        kept[edges.at] = ~is_held[self._pair]
        if (back := edges.back) is not None:
            numbers = numbers_of(back.links.flip(0), edges.graph.num_nodes, undirected=self._are_pairs)
            kept[back.at] = ~torch.isin(numbers, self._numbers[is_held])
        graph = _with_edges(edges.graph, kept)
        if edges.reverse is not None and self._labels is not None:
            graph = Edges(graph, edges.reverse).without(self._labels)
        return graph, rows, {name: torch.searchsorted(choice, pairs) for name, pairs in held.items()}

    def _dealt(self, shares: Shares, choice: Tensor) -> dict[str, Tensor]:
        """Which pairs are held back under each name, as a share of them, if any are."""
        total = len(choice)
        counts = {name: round(share * total) for name, share in shares.items()}
        if not total and any(shares.values()):
            raise ValueError(
                "There are no edges to hold back (or pairs, without loops): choose an edge type that has some."
            )
        for name, share in shares.items():
            if share and not counts[name]:
                raise ValueError(
                    f"{name}={share} of {total} edges (or pairs, without loops) is none: give a larger share, or "
                    f"{name}=0."
                )
        if any(counts.values()) and sum(counts.values()) == total:
            raise ValueError(
                f"val and test would hold all {total} edges (or pairs, without loops), and none is left to train on: "
                "give smaller shares."
            )
        order = permutation(total, self._seed, SPLIT)[: sum(counts.values())]
        held = dict(zip(counts, order.split(list(counts.values())), strict=True))
        return {name: choice[which] for name, which in held.items() if len(which)}

    def _last(self, shares: Shares, time: str) -> tuple[Graph, Places, Places]:
        """Choose the last events of those that are asked for, as :meth:`_at_random` does; all stay in the graph."""
        when, count = self._edges.arrays[time], int(self._asked.sum())
        found = parted_by_time(when, self._asked, shares["val"], shares["test"])
        is_left = bool(found.pop("train").any())
        for name, share in shares.items():
            if share and not bool(found[name].any()):
                raise ValueError(
                    f"No event is left for {name}: {name}={share} of {count} is none, or all are of one time."
                )
        if not is_left:
            raise ValueError(f"val and test would hold all {count} events, and none is left to train on: give less.")
        rows = {name: mask.nonzero().view(-1) for name, mask in found.items() if bool(mask.any())}
        graph = self._edges.graph
        return _with_edges(graph, torch.ones(graph.num_edges, dtype=torch.bool)), rows, rows

    def _false_ends(self, rows: Tensor, ids: Tensor, count: int) -> Tensor:
        """False receivers for some edges, by their ids in their type."""
        graph, ends, edges, name = self._edges.graph, self._edges.ends, self._edges.links[:, rows], self._time
        since, times, at = None, None, None
        if name is not None:
            since, times = times_of_receivers(graph, name, self._edges.kind[2]), self._edges.arrays[name][rows]
            at = Moments(time_order(graph, name), times.long())
        candidates = Candidates.of(ends.receivers, since, ends.receivers.start)
        word = key(self._seed, 0, 0, FALSE_ENDS)
        drawn, without = draw_receivers(graph, edges, ids, count, word, candidates, ends.kinds[0], at)
        if without.numel():
            sender = int(edges[0][without[0]]) - ends.senders.start
            if times is None:
                raise ValueError(f"Node {sender} has an edge to every other: there is no false one to draw.")
            raise ValueError(
                f"At time {times[without[0]].item()} node {sender} sent to all nodes that were there, or there was no "
                "other: there is no false receiver to draw. Leave that event out."
            )
        return drawn - ends.receivers.start


def _with_edges(graph: Graph, kept: Tensor) -> Graph:
    """The graph of the edges that ``kept`` marks, a boolean for each, without the masks of its nodes."""
    upto, types = torch.cat([graph.indptr[:1], kept.cumsum(0)]), graph.types
    at = {kind: kept[types.edges_of(kind)] for kind in types.edge_types}
    left = replace(
        types,
        num_edges=tuple(int(of_type.sum()) for of_type in at.values()),
        edge_type=types.edge_type[kept],
        node_arrays={
            kind: {name: array for name, array in arrays.items() if not name.endswith("_mask")}
            for kind, arrays in types.node_arrays.items()
        },
        edge_arrays={k: {name: a[at[k]] for name, a in arrays.items()} for k, arrays in types.edge_arrays.items()},
    )
    return typed_graph(upto[graph.indptr], graph.indices[kept], left)
