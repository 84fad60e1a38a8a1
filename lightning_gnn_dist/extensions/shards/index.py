"""A graph in shards, as it lies in a folder: consecutive nodes of each, with their rows, in a folder for each host.

my_shares/shares.json      where each shard begins, what is predicted, and how many held edges each has; on every host
my_shares/share-00003/     the rows of shard 3, whose entries are ids of the whole graph
my_shares/share-00003/links/val_edges.npy  held edges of shard 3, with their negatives and arrays beside them

    ids of the whole graph:  paper of shard 0, paper of shard 1, ..., author of shard 0, author of shard 1, ...
    rows of shard 1:         paper of shard 1, author of shard 1, ...

So the nodes of a type have consecutive ids in the whole graph, as in any typed graph, and consecutive rows in a shard.
Edges that are held back lie with the shard that owns their receiver. Their ends have the ids of the whole graph; of a
graph with types, those in their types.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import aligned, shown, without_way_out
from lightning_gnn_dist.extensions.links.bounds import LinkBounds, are_starts
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.files import check_entries, read_json, write_whole
from lightning_gnn_dist.graph.storage.saved import open_graph
from lightning_gnn_dist.graph.storage.store import SHARDS, shard_name
from lightning_gnn_dist.graph.typed.types import EDGE, NODE, EdgeType, GraphTypes, TypeNames, check_names, offsets_of

FORMAT = "lightning_gnn_dist shares"
_WAY_OUT = "Copy it again."


class OwnedTypes(TypeNames):
    """The types of a graph whose rows have several owners."""

    edges: Tensor  # for each edge type, how many edges of it the owners before each one have, and at the end all, int64

    @abstractmethod
    def to_whole(self, owner: int, rows: Tensor) -> Tensor:
        """The ids in the whole graph of some rows of an owner, by which draws are keyed."""


@dataclass(frozen=True, eq=False)
class TypedBounds(OwnedTypes):
    """Where the nodes and edges of each type begin in each shard; a graph without types counts as one of one type.

    Attributes:
        node_types: The names of the node types.
        edge_types: Source type, name and destination type of each edge type.
        nodes: For each node type, how many nodes of it the shards before each one have, and at the end all, int64.
        edges: The same for each edge type; empty if every host made its own shard, as nobody counted all edges.
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
        return cls((NODE,), (EDGE,), nodes[None], edges[None], NODE)

    @classmethod
    def read(cls, about: Any, num_shards: int, file: Path) -> TypedBounds:
        """Check and return what the index of the shards says of types."""
        rows = list[list[str | list[int]]]
        check_entries(about, {"nodes": rows, "edges": rows, "seeds": str | None}, file, _WAY_OUT)
        for num_words, name in ((1, "nodes"), (3, "edges")):
            for *words, starts in (row or [None] for row in about[name]):
                are_words = len(words) == num_words and all(isinstance(word, str) for word in words)
                if not (are_words and isinstance(starts, list) and are_starts(starts, num_shards)):
                    told = "of each type it must say where it begins in each shard"
                    raise ValueError(f"{file} is damaged ({told}). {_WAY_OUT}")
        names = tuple(row[0] for row in about["nodes"]), tuple((row[0], row[1], row[2]) for row in about["edges"])
        try:
            check_names(*names)
            nodes, edges = (torch.tensor([row[-1] for row in about[name]]) for name in ("nodes", "edges"))
            found = cls(*names, nodes, edges)
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
        lines = []
        of_edges = [" ".join(kind) for kind in self.edge_types]
        for title, names, starts in (("nodes", self.node_types, self.nodes), ("edges", of_edges, self.edges)):
            rows: list[tuple[str, ...]] = [(title, "all", "smallest shard", "largest")]
            for name, counts in zip(names, starts.diff(), strict=True):
                rows.append((name, *(f"{int(count):,}" for count in (counts.sum(), counts.min(), counts.max()))))
            lines += aligned(rows)
        return "\n".join([*lines, f"learned from: {self.seeds or 'the seed_type that the data module names'}"])

    @property
    def num_shards(self) -> int:
        return self.nodes.shape[1] - 1

    @cached_property
    def offsets(self) -> tuple[int, ...]:  # type: ignore[override]
        """The first id of each node type in the whole graph, and at the end the number of all nodes."""
        return offsets_of(self.nodes[:, -1].tolist())

    @cached_property
    def _starts(self) -> tuple[Tensor, Tensor]:
        """The first id in the whole graph, and the first row in its shard, of each type and shard."""
        counts = self.nodes.diff()
        return self.nodes[:, :-1] + torch.tensor(self.offsets[:-1]).unsqueeze(1), counts.cumsum(0) - counts

    def to_whole(self, shard: int, rows: Tensor) -> Tensor:
        """The ids in the whole graph of some rows of a shard."""
        ids, first = (of[:, shard].contiguous() for of in self._starts)
        return rows + (ids - first)[torch.searchsorted(first, rows.contiguous(), right=True) - 1]

    def owners(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The shard that has each node, by ids in the whole graph, and its row there."""
        starts, first = (of.view(-1) for of in self._starts)
        at = torch.searchsorted(starts, ids.contiguous(), right=True) - 1
        return at % self.num_shards, ids + (first - starts)[at]

    def with_seeds(self, node_type: str) -> TypedBounds:
        """The same, of which this node type is learned from and evaluated."""
        if node_type not in self.node_types:
            raise ValueError(f"task must be one of {shown(list(self.node_types))}, got {shown(node_type)}.")
        return replace(self, seeds=node_type)

    def seed_type(self) -> str:
        """The node type that is learned from."""
        if self.seeds is None:
            raise ValueError(
                f"No node type, or several, had a train_mask when the graph was divided, and a data module learns from "
                f"one: choose it, as in PartitionedDataModule(path, task={self.node_types[0]!r})."
            )
        return self.seeds


def seeds_of(types: GraphTypes) -> str | None:
    """The node type that is learned from, if one is chosen or is the only one that can be."""
    try:
        return types.seed_type()
    except ValueError:
        return None


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where each shard of a graph begins: what ``shares.json`` says.

    Attributes:
        fingerprint: A hash that identifies the whole graph.
        types: Where the nodes and edges of each type begin.
        division: A hash of which node is in which shard; empty if every host made its own shard.
        links: What is predicted of edges, if some are held back.
    """

    fingerprint: str
    types: TypedBounds
    division: str = ""
    links: LinkBounds | None = None

    @classmethod
    def read(cls, folder: str | Path) -> Bounds:
        """Read the bounds of a folder of shards."""
        file = Path(folder) / SHARDS
        if not file.exists():
            raise FileNotFoundError(
                f"{folder} has no {SHARDS}. Divide a graph with save_shards(graph, partition, path)."
            )
        about = {"division": "", "edges": []} | read_json(file, _WAY_OUT)
        if about.get("format") != FORMAT:
            raise ValueError(f"{file} does not describe shards of a graph: it does not say {FORMAT!r}.")
        kinds = {"fingerprint": str, "division": str, "nodes": list[int], "edges": list[int]}
        check_entries(about, kinds, file, _WAY_OUT)
        num_shards = len(about["nodes"]) - 1
        if num_shards < 1 or len(about["edges"]) not in (0, num_shards + 1):
            raise ValueError(f"{file} is damaged (it says where no shard begins, or only of some). {_WAY_OUT}")
        for name in ("nodes", "edges"):
            if about[name] and not are_starts(about[name], num_shards):
                raise ValueError(f"{file} is damaged ({name!r} must begin at 0 and not fall). {_WAY_OUT}")
        nodes, edges = (torch.tensor(about[name], dtype=torch.int64) for name in ("nodes", "edges"))
        types = TypedBounds.of_one(nodes, edges)
        if "types" in about:
            types = TypedBounds.read(about["types"], num_shards, file)
        links = LinkBounds.read(about["links"], num_shards, types, file) if "links" in about else None
        found = cls(about["fingerprint"], types, about["division"], links)
        if not (found.nodes.equal(nodes) and found.edges.equal(edges)):
            raise ValueError(f"{file} is damaged (types do not add up to all nodes). {_WAY_OUT}")
        return found

    def write(self, folder: Path) -> None:
        """Write them into a folder. A reader sees the whole file or none."""
        about = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "division": self.division,
            "nodes": self.nodes.tolist(),
            "edges": self.edges.tolist(),
            "types": self.types.about if self.types.have_names else None,
            "links": None if self.links is None else self.links.about,
        }
        said = {name: entry for name, entry in about.items() if entry}
        write_whole(folder / SHARDS, json.dumps(said, indent=1))

    @cached_property
    def nodes(self) -> Tensor:
        """The first node of each shard, then the number of nodes of all types, int64."""
        return self.types.nodes.sum(0)

    @cached_property
    def edges(self) -> Tensor:
        """The same for edges; empty if every host made its own shard, as nobody counted all edges."""
        return self.types.edges.sum(0)

    @property
    def mark(self) -> int:
        """A number that shards have in common if they are of one division of one graph."""
        found = hashlib.blake2b(f"{self.fingerprint} {self.division}".encode(), digest_size=6)
        return int.from_bytes(found.digest(), "big")

    @property
    def num_shards(self) -> int:
        return self.types.num_shards


@dataclass(frozen=True, eq=False)
class Shard:
    """Consecutive nodes of a graph that is divided among several hosts.

    Attributes:
        rows: Their rows and arrays. Entries of ``rows.indices`` are ids of the whole graph.
        index: The number of the shard.
        bounds: Where each shard begins.
    """

    rows: Graph
    index: int
    bounds: Bounds

    @classmethod
    def open(cls, folder: str | Path, index: int) -> Shard:
        """Map a shard of a folder. The other shards need not be on this host."""
        folder, bounds = Path(folder), Bounds.read(folder)
        if not 0 <= index < bounds.num_shards:
            raise ValueError(f"{folder} is divided into {bounds.num_shards} shards, so there is no shard {index}.")
        path = folder / shard_name(index)
        if not path.is_dir():
            raise FileNotFoundError(
                f"Shard {index} of {bounds.num_shards} is not on this host: copy {path} from where the graph was "
                f"divided, or make it here from the graph's files (lightning-gnn-dist prepare ... --shard {index})."
            )
        shard = cls(open_graph(path, int(bounds.nodes[-1])), index, bounds)
        shard._check(path)
        return shard.with_seeds(bounds.types.seeds) if bounds.types.seeds else shard

    def with_seeds(self, node_type: str) -> Shard:
        """The same shard of a typed graph, of which nodes of this type alone are learned from and evaluated."""
        bounds = replace(self.bounds, types=self.bounds.types.with_seeds(node_type))
        return Shard(self.rows.with_seeds(node_type), self.index, bounds)

    @property
    def first_node(self) -> int:
        return int(self.bounds.nodes[self.index])

    @property
    def first_edge(self) -> int:
        """The number of its first edge among all; 0 where nobody counted them, as edges carry nothing."""
        return int(self.bounds.edges[self.index]) if self.bounds.edges.numel() else 0

    def _check(self, path: Path) -> None:
        """Refuse a shard of other types, or of other nodes or edges, than the index says."""
        types, found = self.bounds.types, self.rows.types
        nodes, edges = types.nodes.diff()[:, self.index].tolist(), list(found.num_edges)
        if types.edges.numel():
            edges = types.edges.diff()[:, self.index].tolist()
        if (self.rows.num_nodes, self.rows.num_edges) != (sum(nodes), sum(edges)):
            raise ValueError(
                f"{path} holds {self.rows.num_nodes} nodes and {self.rows.num_edges} edges, but {SHARDS} says "
                f"{sum(nodes)} and {sum(edges)}: they come from two divisions. Copy both from the same one."
            )
        if found.have_names and not types.have_names:
            raise ValueError(f"{path} has types, and {SHARDS} knows of none: copy both from the same division.")
        wanted = nodes, edges, types.node_types, types.edge_types, types.offsets
        there = list(found.num_nodes.values()), list(found.num_edges), found.node_types, found.edge_types
        if types.have_names and (*there, found.sender_offsets) != wanted:
            raise ValueError(
                f"{path} does not hold the types, or the nodes and edges of each, that the index of the shards says: "
                "they come from two divisions. Copy both from the same one."
            )


def check_ranks(folder: Path, bounds: Bounds, num_ranks: int) -> None:
    """Refuse a number of ranks with which some shards would be held more often than others."""
    if num_ranks % bounds.num_shards:
        raise ValueError(
            f"{folder} is divided into {bounds.num_shards} shards, which {num_ranks} ranks cannot hold evenly: use a "
            f"multiple of {bounds.num_shards} ranks, or divide the graph into another number of shards."
        )
