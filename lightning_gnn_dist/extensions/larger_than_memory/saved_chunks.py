"""The chunks of a saved graph whose nodes lie chunk by chunk, so that a chunk is one range of each array.

my_graph/chunks.json   where each chunk begins, in the nodes and in the edges of each type
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.files import check_entries, flush, read_json
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.partition.base import Partition

FILE = "chunks.json"
_WAY_OUT = "Copy the graph again, or reorder it again."


@dataclass(frozen=True, eq=False)
class Chunks:
    """Where each chunk of a saved graph begins.

    Attributes:
        nodes: For each node type, how many nodes of it the chunks before each one have, and at the end all: int64,
            shape ``(types, num_chunks + 1)``.
        edges: The same for the edges of each edge type, which belong to the chunks of their receivers.
    """

    nodes: Tensor
    edges: Tensor

    @classmethod
    def of(cls, graph: Graph) -> Chunks | None:
        """Read the chunks in whose order a saved graph lies; None if it lies in another order, or in RAM."""
        if graph.path is None or not (file := graph.path / FILE).exists():
            return None
        about = read_json(file, _WAY_OUT)
        check_entries(about, {"nodes": list[list[int]], "edges": list[list[int]]}, file, _WAY_OUT)
        types = graph.types
        for name, sizes in (("nodes", list(types.num_nodes.values())), ("edges", list(types.num_edges))):
            if [row[-1:] for row in about[name]] != [[size] for size in sizes] or not _are_starts(about[name]):
                raise ValueError(f"{file} is damaged (its {name} are not those of the graph beside it). {_WAY_OUT}")
        return cls(torch.tensor(about["nodes"]), torch.tensor(about["edges"]))

    @classmethod
    def counted(cls, partition: Partition, types: GraphTypes, num_edges: Tensor) -> Chunks:
        """The chunks of a graph that is put in order, with the number of edges of each type into each chunk."""
        nodes = [
            torch.bincount(of_type, minlength=partition.num_parts)
            for of_type in partition.assignment.split(list(types.num_nodes.values()))
        ]
        return cls(_starts(torch.stack(nodes)), _starts(num_edges))

    @property
    def num_chunks(self) -> int:
        return self.nodes.shape[1] - 1

    def write(self, folder: Path) -> None:
        """Say in the folder of a saved graph where its chunks begin."""
        (folder / FILE).write_text(json.dumps({"nodes": self.nodes.tolist(), "edges": self.edges.tolist()}))
        flush(folder / FILE)

    def partition(self) -> Partition:
        """Return the chunk of each node, in 4 bytes a node."""
        numbers = torch.arange(self.num_chunks, dtype=torch.int32)
        return Partition(torch.cat([numbers.repeat_interleave(sizes) for sizes in self.nodes.diff()]), self.num_chunks)


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts[:, :1] * 0, counts.cumsum(1)], 1)


def _are_starts(rows: list[list[int]]) -> bool:
    lengths = {len(row) for row in rows}
    return len(lengths) == 1 and all(row[0] == 0 and row == sorted(row) and len(row) > 1 for row in rows)
