"""A shard of a graph: consecutive nodes with their rows and arrays, in a directory that only one host needs.

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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.checks import aligned, shown, without_way_out
from lightning_gnn_dist.gone import way_out
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.files import check_entries, read_json, write_whole
from lightning_gnn_dist.graph.storage.saved import open_graph
from lightning_gnn_dist.graph.storage.store import SHARDS, shard_name
from lightning_gnn_dist.graph.typed.names import EdgeType, OneType, check_names, have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes, offsets_of

FORMAT = "lightning_gnn_dist shares"
INDEX = SHARDS
MOST_STARTS = 1 << 62
_WAY_OUT = "Copy it again."
_PURPOSE = {"val": "validate", "test": "test"}  # of held edges


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
    fits = len(starts) == num_shards + 1 and starts[0] == 0 and starts[-1] <= MOST_STARTS
    return fits and all(one <= other for one, other in pairwise(starts))


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
        until: Then the time of the first held edge, as an integer that compares as times do.
    """

    undirected: bool
    edge_type: EdgeType | None
    reverse: EdgeType | None
    labels: str | None
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
        if not links["hide"]:
            raise ValueError(f"{file} tells of shown edges. {way_out('split_edges.hide')} Split the graph again.")
        held = {name: torch.tensor(starts) for name, starts in links["held"].items()}
        if not held.keys() <= _PURPOSE.keys() or not all(_are_starts(starts, num_shards) for starts in held.values()):
            raise ValueError(f"{file} is damaged (links: it must say how many held edges shards have). {_WAY_OUT}")
        of_all = links["labels"], held, links["time"], links["until"]
        return cls(links["undirected"], named[0], named[1], *of_all)

    @property
    def about(self) -> dict[str, Any]:
        """What the index of shards says."""
        names = "undirected", "edge_type", "reverse", "labels", "time", "until"
        held = {name: starts.tolist() for name, starts in self.held.items()}
        return {name: getattr(self, name) for name in names} | {"hide": True, "held": held}

    def __str__(self) -> str:
        counts = " and ".join(f"{int(starts[-1]):,} to {_PURPOSE[name]}" for name, starts in self.held.items())
        kind = "" if self.edge_type is None else f" of type {' '.join(self.edge_type)}"
        what = "are predicted" if self.labels is None else f"have labels to predict ({self.labels})"
        what += "" if self.time is None else f" at their times ({self.time})"
        return f"edges{kind} {what}; held back: {counts or 'none'}"


def _are_starts(starts: Tensor, num_shards: int) -> bool:
    return starts.numel() == num_shards + 1 and int(starts[0]) == 0 and bool((starts.diff() >= 0).all())


@dataclass(frozen=True, eq=False)
class Bounds:
    """Where each shard of a graph begins.

    Attributes:
        fingerprint: A hash that identifies the whole graph.
        types: Where the nodes and edges of each type begin; a graph without types is one of one type.
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
        about = _read_index(Path(folder))
        nodes, edges = (torch.tensor(about.get(name, []), dtype=torch.int64) for name in ("nodes", "edges"))
        file, num_shards, types = Path(folder) / INDEX, nodes.numel() - 1, TypedBounds.of_one(nodes, edges)
        if "types" in about:
            types = TypedBounds.read(about["types"], num_shards, file)
        links = LinkBounds.read(about, num_shards, types, file)
        found = cls(about["fingerprint"], types, about.get("division", ""), links)
        if not (found.nodes.equal(nodes) and found.edges.equal(edges)):
            raise ValueError(f"{file} is damaged (types do not add up to all nodes). {_WAY_OUT}")
        return found

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
        nodes, edges = int(self.bounds.nodes[self.index + 1]) - self.first_node, self.rows.num_edges
        if self.bounds.edges.numel():
            edges = int(self.bounds.edges[self.index + 1]) - self.first_edge
        if (self.rows.num_nodes, self.rows.num_edges) != (nodes, edges):
            raise ValueError(
                f"{path} holds {self.rows.num_nodes} nodes and {self.rows.num_edges} edges, but {INDEX} says {nodes} "
                f"and {edges}: they come from two divisions. Copy both from the same one."
            )
        if have_names(self.bounds.types):
            self.bounds.types.check_rows(self.rows.types, self.index, path)
        elif have_names(self.rows.types):
            raise ValueError(f"{path} has types, and {INDEX} knows of none: copy both from the same division.")
        for kind, arrays in self.rows.types.node_arrays.items():
            if "n_id" in arrays:
                _check_ids(arrays["n_id"], path / "nodes" / kind / "n_id.npy")


def check_ranks(folder: Path, bounds: Bounds, num_ranks: int) -> None:
    """Refuse a number of ranks with which some shards would be held more often than others."""
    if num_ranks % bounds.num_shards:
        raise ValueError(
            f"{folder} is divided into {bounds.num_shards} shards, which {num_ranks} ranks cannot hold evenly: use a "
            f"multiple of {bounds.num_shards} ranks, or divide the graph into another number of shards."
        )


def check_same(marks: list[int]) -> None:
    """Refuse shards of different graphs or divisions. All ranks pass the marks of all, so all raise or none."""
    odd = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if odd:
        raise ValueError(
            f"The shards of ranks {odd} are not of the graph of rank 0, or of another division of it: make all shards "
            "from the same files, assignment and settings, or copy them from one division."
        )


def write_index(
    folder: Path, fingerprint: str, types: TypedBounds, *, division: str = "", links: LinkBounds | None = None
) -> None:
    """Write where each shard begins. A reader sees the whole file or none."""
    about: dict[str, Any] = {"format": FORMAT, "fingerprint": fingerprint}
    if division:
        about["division"] = division
    about["nodes"] = types.nodes.sum(0).tolist()
    if types.edges.numel():
        about["edges"] = types.edges.sum(0).tolist()
    if have_names(types):
        about["types"] = types.about
    if links is not None:
        about["links"] = links.about
    write_whole(folder / INDEX, json.dumps(about, indent=1))


def _read_index(folder: Path) -> dict[str, Any]:
    file = folder / INDEX
    if not file.exists():
        raise FileNotFoundError(f"{folder} has no {INDEX}. Divide a graph with save_shards(graph, partition, path).")
    about = read_json(file, _WAY_OUT)
    if about.get("format") != FORMAT:
        raise ValueError(f"{file} does not describe shards of a graph: it does not say {FORMAT!r}.")
    kinds = {"fingerprint": str, "division": str, "nodes": list[int], "edges": list[int]}
    check_entries({"edges": [], "division": ""} | about, kinds, file, _WAY_OUT)
    for name in ("nodes", "edges"):
        starts = about.get(name, [])
        if starts != sorted(starts) or starts[:1] not in ([0], []) or starts[-1:] > [MOST_STARTS]:
            raise ValueError(f"{file} is damaged ({name!r} must begin at 0 and not fall). {_WAY_OUT}")
    if len(about["nodes"]) < 2 or len(about.get("edges", [])) not in (0, len(about["nodes"])):
        raise ValueError(f"{file} is damaged (it says where no shard begins, or only of some). {_WAY_OUT}")
    return about


def _check_ids(n_id: Tensor, file: Path) -> None:
    """Refuse an ``n_id`` that does not hold one distinct id per row."""
    if n_id.dtype not in (torch.int32, torch.int64) or n_id.dim() != 1:
        raise ValueError(f"{file} holds {n_id.dtype} {tuple(n_id.shape)}, and ids of nodes are needed. {_WAY_OUT}")
    ids = n_id.sort().values
    if ids.numel() and int(ids[0]) < 0:
        raise ValueError(f"{file} is damaged (it holds node {int(ids[0])}, and ids begin at 0). {_WAY_OUT}")
    if bool((twice := ids[1:] == ids[:-1]).any()):
        raise ValueError(f"{file} is damaged (it holds node {int(ids[1:][twice][0])} twice). {_WAY_OUT}")


def holds_shards(path: Path) -> bool:
    """Whether a folder holds shards of a graph."""
    return (path / INDEX).exists()
