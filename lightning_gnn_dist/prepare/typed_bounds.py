"""How a typed graph is divided into shards, and which ids its nodes have.

    ids of the whole graph:  paper of shard 0, paper of shard 1, ..., author of shard 0, author of shard 1, ...
    rows of shard 1:         paper of shard 1, author of shard 1, ...

So the nodes of a type have consecutive ids in the whole graph, as in any typed graph, and consecutive rows in a shard.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import shown, without_way_out
from lightning_gnn_dist.graph.storage.files import check_entries
from lightning_gnn_dist.graph.typed.names import EdgeType, OneType, check_names
from lightning_gnn_dist.graph.typed.report import aligned
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of

_WAY_OUT = "Copy it again."
_MOST = 1 << 62


@dataclass(frozen=True, eq=False)
class TypedBounds:
    """Where the nodes and edges of each type begin in each shard.

    Attributes:
        node_types: The names of the node types.
        edge_types: Source type, name and destination type of each edge type.
        nodes: For each node type, how many nodes of it the shards before each one have, and at the end all, int64.
        edges: The same for each edge type.
        seeds: The node type that is learned from and evaluated, if one is chosen.
    """

    node_types: tuple[str, ...]
    edge_types: tuple[EdgeType, ...]
    nodes: Tensor
    edges: Tensor
    seeds: str | None = None

    @classmethod
    def of_one(cls, nodes: Tensor, edges: Tensor) -> TypedBounds:
        """The bounds of a graph without types, given where each shard begins."""
        return cls(OneType.node_types, OneType.edge_types, nodes[None], edges[None], OneType.node_types[0])

    @classmethod
    def read(cls, about: Any, num_shards: int, file: Path) -> TypedBounds:
        """Check and return what the index of the shards says of types."""
        of_types = {"nodes": list[list[str | list[int]]], "edges": list[list[str | list[int]]], "seeds": str | None}
        check_entries(about, of_types, file, _WAY_OUT)
        nodes, edges = about["nodes"], about["edges"]
        if not all(_is_right(row, words, num_shards) for rows, words in ((nodes, 1), (edges, 3)) for row in rows):
            raise ValueError(f"{file} is damaged (of each type it must say where it begins in each shard). {_WAY_OUT}")
        kinds, edge_kinds = tuple(row[0] for row in nodes), tuple((row[0], row[1], row[2]) for row in edges)
        try:
            check_names(kinds, edge_kinds)
            of_nodes, of_edges = (torch.tensor([row[-1] for row in rows]) for rows in (nodes, edges))
            found = cls(kinds, edge_kinds, of_nodes, of_edges)
            return found if about["seeds"] is None else found.with_seeds(about["seeds"])
        except ValueError as error:
            raise ValueError(f"{file} is damaged ({without_way_out(error)}). {_WAY_OUT}") from error

    @property
    def about(self) -> dict[str, Any]:
        """What the index of the shards says of types."""
        nodes = [[name, row.tolist()] for name, row in zip(self.node_types, self.nodes, strict=True)]
        edges = [[*kind, row.tolist()] for kind, row in zip(self.edge_types, self.edges, strict=True)]
        return {"nodes": nodes, "edges": edges, "seeds": self.seeds}

    def __str__(self) -> str:
        of_all = [("nodes", self.node_types, self.nodes), ("edges", map(" ".join, self.edge_types), self.edges)]
        lines = []
        for title, names, starts in of_all:
            rows: list[tuple[str, ...]] = [(title, "all", "smallest shard", "largest")]
            for name, row in zip(names, starts, strict=True):
                counts = row.diff()
                rows.append((name, *(f"{int(count):,}" for count in (row[-1], counts.min(), counts.max()))))
            lines += aligned(rows)
        return "\n".join([*lines, f"learned from: {self.seeds or 'the seed_type that the data module names'}"])

    @property
    def num_shards(self) -> int:
        return self.nodes.shape[1] - 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The first id of each node type in the whole graph, and at the end the number of all nodes."""
        return offsets_of(self.nodes[:, -1].tolist())

    def nodes_of(self, node_type: str) -> range:
        """The ids in the whole graph of all nodes of a type."""
        number = self.node_types.index(node_type)
        return range(self.offsets[number], self.offsets[number + 1])

    def to_whole(self, shard: int, rows: Tensor) -> Tensor:
        """The ids in the whole graph of some rows of a shard."""
        first = self._rows[:, shard].contiguous()
        kind = torch.searchsorted(first, rows.contiguous(), right=True) - 1
        return rows + (self._starts[:, shard] - first)[kind]

    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The shard that has each node, by ids in the whole graph, and its row there."""
        starts = self._starts.view(-1)
        at = torch.searchsorted(starts, ids.contiguous(), right=True) - 1
        return at % self.num_shards, ids + (self._rows.view(-1) - starts)[at]

    def with_seeds(self, node_type: str) -> TypedBounds:
        """The same, of which this node type is learned from and evaluated."""
        if node_type not in self.node_types:
            raise ValueError(f"seed_type must be one of {shown(list(self.node_types))}, got {shown(node_type)}.")
        return replace(self, seeds=node_type)

    def seed_type(self) -> str:
        """The node type that is learned from."""
        if self.seeds is None:
            raise ValueError(
                f"No node type, or several, had a train_mask when the graph was divided, and a data module learns from "
                f"one: choose it, as in PartitionedDataModule(path, seed_type={self.node_types[0]!r})."
            )
        return self.seeds

    def check_rows(self, types: GraphTypes, shard: int, path: Path) -> None:
        """Refuse a shard of other types, or of other nodes or edges of a type."""
        wanted = self.nodes.diff()[:, shard].tolist(), self.edges.diff()[:, shard].tolist()
        found = list(types.num_nodes.values()), list(types.num_edges)
        names = types.node_types, types.edge_types
        if (found, names, types.sender_offsets) != (wanted, (self.node_types, self.edge_types), self.offsets):
            raise ValueError(
                f"{path} does not hold the types, or the nodes and edges of each, that the index of the shards says: "
                "they come from two divisions. Copy both from the same one."
            )

    @cached_property
    def _starts(self) -> Tensor:
        """The first id of each type and shard in the whole graph, shape (types, shards)."""
        return self.nodes[:, :-1] + torch.tensor(self.offsets[:-1]).unsqueeze(1)

    @cached_property
    def _rows(self) -> Tensor:
        """The first row of each type in each shard, shape (types, shards)."""
        counts = self.nodes.diff()
        return counts.cumsum(0) - counts


def seeds_of(types: GraphTypes) -> str | None:
    """The node type that is learned from, if one is chosen or is the only one that can be."""
    try:
        return types.seed_type()
    except ValueError:
        return None


def _is_right(row: list[Any], num_words: int, num_shards: int) -> bool:
    """Whether a row of the index has a type of so many words, and then where it begins in each shard."""
    *words, starts = row or [None]
    if len(words) != num_words or not all(isinstance(word, str) for word in words) or not isinstance(starts, list):
        return False
    fits = len(starts) == num_shards + 1 and starts[0] == 0 and starts[-1] <= _MOST
    return fits and all(one <= other for one, other in pairwise(starts))
