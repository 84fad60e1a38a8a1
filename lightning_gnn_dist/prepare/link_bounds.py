"""Edges that are held back from a graph in shards: each lies with the shard that owns its receiver.

my_shares/shares.json                      what is predicted, and how many held edges each shard has
my_shares/share-00003/links/val_edges.npy  those of shard 3, with their negatives and arrays beside them

Ends have the ids of the whole graph that the shards make; of a graph with types, those in their types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.storage.files import check_entries
from lightning_gnn_dist.graph.typed.names import EdgeType, have_names
from lightning_gnn_dist.prepare.typed_bounds import TypedBounds

NAMES = ("val", "test")
_WAY_OUT = "Copy it again."


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


def _are_starts(starts: Tensor, num_shards: int) -> bool:
    return starts.numel() == num_shards + 1 and int(starts[0]) == 0 and bool((starts.diff() >= 0).all())


_PURPOSE = {"val": "validate", "test": "test"}
