"""A shard of a graph: consecutive nodes with their rows and arrays, in a directory that only one host needs.

my_shares/shares.json      where each shard begins; every host has this
my_shares/share-00003/     the rows of shard 3, whose entries are ids of the whole graph
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.shard_bounds import LinkBounds, TypedBounds
from lightning_gnn_dist.graph.storage.files import check_entries, read_json, write_whole
from lightning_gnn_dist.graph.storage.saved import open_graph
from lightning_gnn_dist.graph.storage.store import SHARDS, shard_name
from lightning_gnn_dist.graph.typed.names import have_names

FORMAT = "lightning_gnn_dist shares"
INDEX = SHARDS
MOST_STARTS = 1 << 62
_WAY_OUT = "Copy it again."


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
