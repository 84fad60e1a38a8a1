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
from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.storage.files import check_entries
from lightning_gnn_dist.graph.typed.types import EdgeType
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
    """

    undirected: bool
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str | None
    hide: bool
    held: Mapping[str, Tensor]

    @classmethod
    def read(
        cls, about: Mapping[str, Any], num_shards: int, types: TypedBounds | None, file: Path
    ) -> LinkBounds | None:
        """Check and return what the index of shards says of held edges; None if there are none."""
        if "links" not in about:
            return None
        links, kind = about["links"], list[str] | None
        kinds: dict[str, Any] = {"undirected": bool, "edge_type": kind, "reverse": kind, "labels": str | None}
        check_entries(links, kinds | {"hide": bool, "held": dict[str, list[int]]}, file, _WAY_OUT)
        known = {None} if types is None else {*types.edge_types}
        named = [None if links[name] is None else tuple(links[name]) for name in ("edge_type", "reverse")]
        if named[0] not in known or named[1] not in {*known, None}:
            raise ValueError(f"{file} is damaged (links: the graph has no edges of type {shown(named)}). {_WAY_OUT}")
        held = {name: torch.tensor(starts) for name, starts in links["held"].items()}
        if not held.keys() <= {*NAMES} or not all(_are_starts(starts, num_shards) for starts in held.values()):
            raise ValueError(f"{file} is damaged (links: it must say how many held edges shards have). {_WAY_OUT}")
        return cls(links["undirected"], named[0], named[1], links["labels"], links["hide"], held)

    @property
    def about(self) -> dict[str, Any]:
        """What the index of shards says."""
        said = {name: getattr(self, name) for name in ("undirected", "edge_type", "reverse", "labels", "hide")}
        return said | {"held": {name: starts.tolist() for name, starts in self.held.items()}}

    def __str__(self) -> str:
        counts = " and ".join(f"{int(starts[-1]):,} to {_PURPOSE[name]}" for name, starts in self.held.items())
        kind = "" if self.edge_type is None else f" of type {' '.join(self.edge_type)}"
        what = "are predicted" if self.labels is None else f"have labels to predict ({self.labels})"
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
        self._first = (0, 0) if types is None else (types.nodes_of(sender).start, types.nodes_of(receiver).start)
        of_edges = {name: owners[edges[1].to(torch.int64) + self._first[1]] for name, edges in split.edges.items()}
        self._order = {name: of.argsort(stable=True) for name, of in of_edges.items()}
        counts = {name: torch.bincount(of.to(torch.int64), minlength=num_shards) for name, of in of_edges.items()}
        self._starts = {name: torch.cat([of[:1] * 0, of.cumsum(0)]) for name, of in counts.items()}

    @cached_property
    def bounds(self) -> LinkBounds:
        """How many held edges each shard has."""
        split, reverse = self._split, self._split.reverse
        turned = reverse if isinstance(reverse, tuple) else None
        return LinkBounds(split.undirected is True, split.edge_type, turned, split.labels, split.hide, self._starts)

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


def check_can_be_divided(split: SplitOfEdges) -> None:
    """Refuse a split whose held edges cannot lie with shards."""
    if split.time is not None:
        raise ValueError(
            f"This split is by time ({split.time}), and links of shards do not know times: give every host the whole "
            "split, LinkDataModule(path), or divide one whose edges are held back at random, split_edges(graph)."
        )


def _are_starts(starts: Tensor, num_shards: int) -> bool:
    return starts.numel() == num_shards + 1 and int(starts[0]) == 0 and bool((starts.diff() >= 0).all())


_PURPOSE = {"val": "validate", "test": "test"}
