"""What is predicted of the edges of a graph, as shards of it say it too: their index has it, and how many are held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.graph.storage.files import check_entries
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames

_WAY_OUT = "Copy it again."
_PURPOSE = {"val": "validate", "test": "test"}  # of held edges
_MOST = 1 << 62  # nodes or edges


@dataclass(frozen=True, eq=False)
class LinkBounds:
    """What is predicted of the edges of a graph in shards, and how many held ones lie with each shard.

    Attributes:
        undirected: Whether the graph holds both directions of every edge.
        edge_type: Of a graph with types, the one that is predicted.
        reverse: The edge type that holds the same links turned round, if there is one.
        labels: The name of the edge array that is predicted, if edges have labels.
        held: For ``"val"``, ``"test"`` or both, how many held edges the shards before each one have, and at the end
            all, int64.
        time: The name of the array of their times, if they are split by it.
        until: Then the time of the first held edge.
    """

    undirected: bool
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str | None
    held: Mapping[str, Tensor]
    time: str | None = None
    until: int | None = None

    @classmethod
    def read(cls, about: Any, num_shards: int, types: TypeNames, file: Path) -> LinkBounds:
        """Check and return what the index of shards says of held edges."""
        kind, name = list[str] | None, str | None
        kinds: dict[str, Any] = {"undirected": bool, "edge_type": kind, "reverse": kind, "labels": name, "time": name}
        check_entries(about, kinds | {"hide": bool, "held": dict[str, list[int]], "until": int | None}, file, _WAY_OUT)
        known: set[EdgeType | None] = {*types.edge_types} if types.have_names else {None}
        named = [None if about[name] is None else tuple(about[name]) for name in ("edge_type", "reverse")]
        if named[0] not in known or named[1] not in {*known, None}:
            raise ValueError(f"{file} is damaged (links: the graph has no edges of type {shown(named)}). {_WAY_OUT}")
        if not about["hide"]:
            raise ValueError(f"{file} tells of shown edges. {way_out('split_edges.hide')} Split the graph again.")
        held = about["held"]
        if not held.keys() <= _PURPOSE.keys() or not all(are_starts(starts, num_shards) for starts in held.values()):
            raise ValueError(f"{file} is damaged (links: it must say how many held edges shards have). {_WAY_OUT}")
        starts = {name: torch.tensor(of) for name, of in held.items()}
        return cls(about["undirected"], named[0], named[1], about["labels"], starts, about["time"], about["until"])

    @property
    def receiver_type(self) -> str:
        """The node type that edges lead to; without a name in a graph without types."""
        return "" if self.edge_type is None else self.edge_type[2]

    @property
    def about(self) -> dict[str, Any]:
        """What the index of shards says."""
        held = {name: starts.tolist() for name, starts in self.held.items()}
        names = "undirected", "edge_type", "reverse", "labels", "time", "until"
        return {name: getattr(self, name) for name in names} | {"hide": True, "held": held}

    def __str__(self) -> str:
        counts = " and ".join(f"{int(starts[-1]):,} to {_PURPOSE[name]}" for name, starts in self.held.items())
        kind = "" if self.edge_type is None else f" of type {' '.join(self.edge_type)}"
        what = "are predicted" if self.labels is None else f"have labels to predict ({self.labels})"
        what += "" if self.time is None else f" at their times ({self.time})"
        return f"edges{kind} {what}; held back: {counts or 'none'}"


def are_starts(starts: list[int], num_shards: int) -> bool:
    """Whether these say where each of so many shards begins, and where the last one ends."""
    in_order = all(one <= other for one, other in pairwise(starts))
    return len(starts) == num_shards + 1 and starts[0] == 0 and in_order and starts[-1] <= _MOST
