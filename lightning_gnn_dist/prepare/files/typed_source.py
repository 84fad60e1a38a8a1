"""Graphs with types as they were found, before they become a :class:`Graph`: in tables, or in a file of PyG."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.build import build
from lightning_gnn_dist.graph.typed.hetero import Content, contents_of, tables_of
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.prepare.files.from_arrays import load_pyg
from lightning_gnn_dist.prepare.files.raw import RAM_PER_EDGE, RawGraph, check_drop
from lightning_gnn_dist.prepare.files.text_tables import Progress

T = TypeVar("T")
NO_LABELS = "--split deals labelled nodes, and no node type has a label (a column or array y, or label)."
Contents = tuple[dict[str, Content], dict[EdgeType, Content]]


class TypedSource(ABC):
    """Something that a graph with types can be read from. A subclass says what each type holds.

    ``time`` names the array by which the edges of one type into a node are ordered, or is None; ``headings`` says in
    words what is taken for the headings of tables.
    """

    time: str | None
    headings: tuple[str, ...] = ()

    @property
    @abstractmethod
    def num_edges(self) -> int:
        """The number of edges; an estimate for text."""

    @property
    @abstractmethod
    def num_types(self) -> tuple[int, int]:
        """The number of node types, and of edge types."""

    @abstractmethod
    def contents(self, on_progress: Progress) -> Contents:
        """Return what the nodes and the edges of each type hold, as PyG does."""

    @property
    def needed_ram(self) -> int:
        """About the RAM that sorting the edges takes, beside arrays that are mapped."""
        return RAM_PER_EDGE * self.num_edges

    def read(
        self,
        on_progress: Progress,
        *,
        reverse: bool = False,
        split: Sequence[float] | None = None,
        seed: int = 0,
        float_labels: bool = False,
    ) -> Graph:
        """Read everything, and build the graph.

        Args:
            on_progress: Called with the share that is read.
            reverse: Add an edge type ``rev_<name>`` for each, with the same arrays.
            split: Shares of the labelled nodes of each type to train on, validate and test.
            seed: Decides the split.
            float_labels: Accept a floating point ``y`` with one value per node, for regression.
        """
        nodes, edges = self.contents(on_progress)
        if split:
            nodes = _split(nodes, split, seed)
        if reverse:
            flipped = {kind: some | {"edge_index": some["edge_index"].flip(0)} for kind, some in edges.items()}
            edges = edges | with_reverse(flipped)
        tables = tables_of(nodes, edges, check_features=True, float_labels=float_labels, edge_ids=False)
        return typed_graph(*build(*tables, self.time))


@dataclass(frozen=True)
class HeteroFile(TypedSource):
    """A ``HeteroData`` that ``torch.save`` saved. Its tensors are mapped, not read.

    Args:
        data: The content of the file.
        time: The array of times, by which the edges of one type into a node are ordered.
    """

    data: HeteroData
    time: str | None = None

    @classmethod
    def of(cls, path: Path, drop: Collection[str] = (), time: str | None = None) -> HeteroFile | None:
        """The file at ``path``; None if it holds a ``Data``."""
        data = load_pyg(path)
        if isinstance(data, Data):
            return None
        check_drop(drop, {name for store in data.stores for name in store}, path)
        for store in data.stores:
            for name in set(drop).intersection(store.keys()):
                del store[name]
        return cls(data, time)

    @property
    def num_edges(self) -> int:
        return sum(store["edge_index"].shape[-1] for store in self.data.edge_stores if "edge_index" in store)

    @property
    def num_types(self) -> tuple[int, int]:
        return len(self.data.node_types), len(self.data.edge_types)

    def contents(self, on_progress: Progress) -> Contents:
        return contents_of(self.data)


def _split(nodes: dict[str, Content], shares: Sequence[float], seed: int) -> dict[str, Content]:
    """The nodes with masks that deal the labelled ones of each type."""
    labelled = [kind for kind, content in nodes.items() if "y" in content]
    if not labelled:
        raise ValueError(NO_LABELS)
    none = torch.zeros(2, 0, dtype=torch.int64)
    for kind in labelled:
        arrays = {name: array for name, array in nodes[kind].items() if name != "num_nodes"}
        raw = RawGraph(none, len(nodes[kind]["y"]), arrays, {}).with_split(shares, seed)
        nodes = nodes | {kind: nodes[kind] | raw.node_arrays}
    return nodes


def with_reverse(edges: Mapping[EdgeType, T]) -> dict[EdgeType, T]:
    """The reverse type of each edge type, with the same value."""
    for source, name, target in edges:
        if (target, f"rev_{name}", source) in edges:
            raise ValueError(
                f"There are edges {(target, f'rev_{name}', source)} already: leave --reverse out, or these edges."
            )
    return {(target, f"rev_{name}", source): value for (source, name, target), value in edges.items()}
