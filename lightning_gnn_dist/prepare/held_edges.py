"""Edges that are held back from a graph in shards: each lies with the shard that owns its receiver.

my_shares/shares.json                      what is predicted, and how many held edges each shard has
my_shares/share-00003/links/val_edges.npy  those of shard 3, with their negatives and arrays beside them

Ends have the ids of the whole graph that the shards make; of a graph with types, those in their types.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.temporal.times import as_integers
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.storage.files import check_entries
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds

NAMES = ("val", "test")
_WAY_OUT = "Copy it again."


class SplitOfEdges(Protocol):
    """A graph of training edges, and edges that are held back from it: a ``LinkSplit``."""

    @property
    def graph(self) -> Graph: ...

    @property
    def edges(self) -> Mapping[str, Tensor]: ...

    @property
    def negatives(self) -> Mapping[str, Tensor]: ...

    @property
    def undirected(self) -> bool | None: ...

    @property
    def edge_type(self) -> EdgeType | None: ...

    @property
    def reverse(self) -> Any: ...

    @property
    def labels(self) -> str | None: ...

    @property
    def held_arrays(self) -> Mapping[str, Mapping[str, Tensor]]: ...

    @property
    def hide(self) -> bool: ...

    @property
    def time(self) -> str | None: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True, eq=False)
class LinkBounds:
    """What is predicted of the edges of a graph in shards, and how many held ones lie with each shard.

    Attributes:
        undirected: Whether the graph holds both directions of every edge.
        edge_type: Of a graph with types, the one that is predicted.
        reverse: The edge type that holds the same links turned round, if there is one.
        labels: The name of the edge array that is predicted, if edges have labels.
        hide: Whether edges that a batch asks for carry no messages in it.
        held: For ``"val"``, ``"test"`` or both, how many held edges the shards before each one have, and at the end
            all, int64.
        time: The name of the array of their times, if they are split by it.
        until: Then the time of the first held edge, as an integer that compares as times do.
    """

    undirected: bool
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str | None
    hide: bool
    held: Mapping[str, Tensor]
    time: str | None = None
    until: int | None = None

    @classmethod
    def read(cls, about: Mapping[str, Any], num_shards: int, types: TypedBounds, file: Path) -> LinkBounds | None:
        """Check and return what the index of shards says of held edges; None if there are none."""
        if "links" not in about:
            return None
        links, kind = about["links"], list[str] | None
        kinds: dict[str, Any] = {"undirected": bool, "edge_type": kind, "reverse": kind, "labels": str | None}
        kinds |= {"hide": bool, "held": dict[str, list[int]], "time": str | None, "until": int | None}
        check_entries(links, kinds, file, _WAY_OUT)
        known: set[EdgeType | None] = {*types.edge_types} if have_names(types) else {None}
        named = [None if links[name] is None else tuple(links[name]) for name in ("edge_type", "reverse")]
        if named[0] not in known or named[1] not in {*known, None}:
            raise ValueError(f"{file} is damaged (links: the graph has no edges of type {shown(named)}). {_WAY_OUT}")
        held = {name: torch.tensor(starts) for name, starts in links["held"].items()}
        if not held.keys() <= {*NAMES} or not all(_are_starts(starts, num_shards) for starts in held.values()):
            raise ValueError(f"{file} is damaged (links: it must say how many held edges shards have). {_WAY_OUT}")
        of_all = links["labels"], links["hide"], held, links["time"], links["until"]
        return cls(links["undirected"], named[0], named[1], *of_all)

    @property
    def about(self) -> dict[str, Any]:
        """What the index of shards says."""
        names = "undirected", "edge_type", "reverse", "labels", "hide", "time", "until"
        return {name: getattr(self, name) for name in names} | {
            "held": {name: starts.tolist() for name, starts in self.held.items()}
        }

    def __str__(self) -> str:
        counts = " and ".join(f"{int(starts[-1]):,} to {_PURPOSE[name]}" for name, starts in self.held.items())
        kind = "" if self.edge_type is None else f" of type {' '.join(self.edge_type)}"
        what = "are predicted" if self.labels is None else f"have labels to predict ({self.labels})"
        what += "" if self.time is None else f" at their times ({self.time})"
        return f"edges{kind} {what}; held back: {counts or 'none'}"


class HeldEdges:
    """The held edges of a split, by the shards that own their receivers.

    Args:
        split: The split.
        owners: The shard of each node of its graph.
        num_shards: The number of shards.
        number: The new id of each node.
    """

    def __init__(self, split: SplitOfEdges, owners: Tensor, num_shards: int, number: Tensor) -> None:
        self._split, self._number, types = split, number, split.graph.types
        sender, _, receiver = split.edge_type or ("", "", "")
        self._first = types.nodes_of(sender).start, types.nodes_of(receiver).start
        of_edges = {name: owners[edges[1].to(torch.int64) + self._first[1]] for name, edges in split.edges.items()}
        self._order = {name: of.argsort(stable=True) for name, of in of_edges.items()}
        counts = {name: torch.bincount(of.to(torch.int64), minlength=num_shards) for name, of in of_edges.items()}
        self._starts = {name: torch.cat([of[:1] * 0, of.cumsum(0)]) for name, of in counts.items()}

    @cached_property
    def bounds(self) -> LinkBounds:
        """How many held edges each shard has."""
        split, reverse = self._split, self._split.reverse
        turned = reverse if isinstance(reverse, tuple) else None
        kind = split.undirected is True, split.edge_type, turned
        return LinkBounds(
            *kind, split.labels, split.hide, self._starts, split.time, first_held(split.held_arrays, split.time)
        )

    def of_shard(self, index: int) -> dict[str, Tensor]:
        """Return the arrays of a shard's held edges, by the names of their files."""
        return dict(self._arrays(index))

    def _arrays(self, index: int) -> Iterator[tuple[str, Tensor]]:
        split = self._split
        for name, edges in split.edges.items():
            first, end = self._starts[name][index : index + 2].tolist()
            at = self._order[name][first:end]
            yield f"links/{name}_edges", torch.stack([self._new(edges[i][at], self._first[i]) for i in (0, 1)])
            if name in split.negatives:
                yield f"links/{name}_negatives", self._new(take_rows(split.negatives[name], at), self._first[1])
            for array, rows in split.held_arrays.get(name, {}).items():
                yield f"links/{name}/{array}", take_rows(rows, at)

    def _new(self, ids: Tensor, first: int) -> Tensor:
        """Return new ids for some, both counted from the first of their type."""
        found = self._number[ids.to(torch.int64) + first] - first
        return found.to(index_dtype(self._split.graph.num_nodes))


def first_held(held: Mapping[str, Mapping[str, Tensor]], time: str | None) -> int | None:
    """The time of the first of what is held, given its arrays, as an integer that compares as times do.

    None if nothing is held, or nothing has times.
    """
    if time is None:
        return None
    return min((int(as_integers(arrays[time]).min()) for arrays in held.values()), default=None)


def _are_starts(starts: Tensor, num_shards: int) -> bool:
    return starts.numel() == num_shards + 1 and int(starts[0]) == 0 and bool((starts.diff() >= 0).all())


_PURPOSE = {"val": "validate", "test": "test"}
