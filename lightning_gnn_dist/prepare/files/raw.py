"""A graph as it was found, before it becomes a :class:`Graph`: it can be made undirected and split."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from math import isclose
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_fits, check_seed
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.prepare.files.text_tables import Progress

SPLITS = ("train", "val", "test")
RAM_PER_EDGE = 80  # bytes, at most; measured: 43 for mapped arrays, 58 with reverse edges, 77 for tables


@dataclass(frozen=True)
class RawGraph:
    """Edges and arrays in the order in which they were found.

    Args:
        edge_index: Senders and receivers, shape ``(2, E)``.
        num_nodes: How many nodes there are.
        node_arrays: Arrays with a row per node.
        edge_arrays: Arrays with a row per edge.
    """

    edge_index: Tensor
    num_nodes: int
    node_arrays: dict[str, Tensor]
    edge_arrays: dict[str, Tensor]

    def undirected(self) -> RawGraph:
        """The graph with every edge both ways and once. An edge that was there keeps its own arrays."""
        convert.check_edge_index(self.edge_index, self.num_nodes)
        convert.check_edge_arrays(self.edge_arrays)
        sender, receiver = self.edge_index.to(torch.int64)
        key, order = torch.cat([receiver * self.num_nodes + sender, sender * self.num_nodes + receiver]).sort(
            stable=True
        )
        is_first = torch.ones_like(key, dtype=torch.bool)
        torch.ne(key[1:], key[:-1], out=is_first[1:])
        key, order = key[is_first], order[is_first]
        edge_index = torch.stack([key % self.num_nodes, key // self.num_nodes])
        arrays = {name: array[order % sender.numel()] for name, array in self.edge_arrays.items()}
        return replace(self, edge_index=edge_index, edge_arrays=arrays)

    def with_split(self, shares: Sequence[float], seed: int) -> RawGraph:
        """The graph with masks: random ``shares`` of the labelled nodes to train, validate and test."""
        if present := sorted(name for name in self.node_arrays if name.endswith("_mask")):
            raise ValueError(f"The source has {present} already: leave the split out, or drop these arrays.")
        if min(shares) < 0 or not (sum(shares) < 1 or isclose(sum(shares), 1)):
            raise ValueError(f"A split is three shares of at most 1 in all, got {list(shares)}.")
        check_seed(seed)
        nodes = self._labelled()
        nodes = np.random.Generator(np.random.Philox(key=seed)).permutation(nodes)
        ends = [round(sum(shares[:at]) * len(nodes)) for at in range(len(SPLITS) + 1)]
        masks: dict[str, Tensor] = {}
        for split, share, start, end in zip(SPLITS, shares, ends, ends[1:], strict=False):
            if share and start == end:
                raise ValueError(
                    f"The share {share} for {split} of {len(nodes)} labelled nodes is none: give more, or 0."
                )
            mask = torch.zeros(self.num_nodes, dtype=torch.bool)
            mask[torch.from_numpy(nodes[start:end])] = True
            masks[f"{split}_mask"] = mask
        return replace(self, node_arrays=self.node_arrays | masks)

    def build(self, *, float_labels: bool = False) -> Graph:
        """The :class:`Graph`, after the checks of :meth:`Graph.from_pyg`."""
        convert.check_arrays(self.node_arrays, check_features=True, float_labels=float_labels)
        convert.check_edge_arrays(self.edge_arrays)
        arrays = convert.without_unlabelled(self.node_arrays)
        return Graph.from_edge_index(self.edge_index, self.num_nodes, arrays, self.edge_arrays)

    def _labelled(self) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        y = self.node_arrays.get("y")
        if y is None or y.is_floating_point() or y.dim() != 1:
            return np.arange(self.num_nodes)
        return (y >= 0).nonzero().view(-1).numpy()


@dataclass(frozen=True)
class Source:
    """Something that a graph can be read from, and what is known about the graph before.

    Args:
        num_nodes: The number of nodes; an estimate for tables, and 0 if only the edges tell.
        num_edges: The number of edges; an estimate for tables.
        num_bytes: Bytes of all arrays beside the edges; an estimate for tables.
        read: Reads the graph; its argument is called with the share that is done.
        headings: What is taken for the headings of tables, in words.
    """

    num_nodes: int
    num_edges: int
    num_bytes: int
    read: Callable[[Progress], RawGraph]
    headings: tuple[str, ...] = ()

    def stored_bytes(self, *, undirected: bool) -> int:
        """About the size of the saved graph."""
        per_edge = 4 if convert.index_dtype(self.num_nodes) == torch.int32 else 8
        return 8 * (self.num_nodes + 1) + per_edge * self.num_edges * (1 + undirected) + self.num_bytes

    def needed_ram(self, *, undirected: bool) -> int:
        """About the RAM that preparing it takes, beside arrays that are mapped."""
        return RAM_PER_EDGE * self.num_edges * (1 + undirected)


def check_purposes(purposes: Iterable[tuple[str, str]], where: Path | None) -> None:
    """Refuse two sources for one array. Each purpose is what something is called there, and in the graph."""
    sources: dict[str, str] = {}
    for name, array in purposes:
        if (other := sources.setdefault(array, name)) != name:
            raise ValueError(
                f"{where} holds two arrays for one purpose, {other!r} and {name!r}, which both say {array!r} of the "
                f"graph: leave one of them out (--drop {name})."
            )


def check_num_nodes(count: int, who: str) -> None:
    """Refuse a number of nodes that cannot be meant, in words that say ``who`` told it."""
    if count < 1:
        raise ValueError(f"{who} {count:,} nodes, and a graph has at least 1.")
    check_fits(convert.BYTES_PER_NODE * count, f"{who} {count:,} nodes, numbered 0, 1, 2, ..., and their edges")


def check_drop(drop: Collection[str], names: Collection[str], where: Path) -> None:
    """Refuse to drop names that are not there."""
    if missing := sorted(set(drop) - set(names)):
        raise ValueError(f"{where} has no {missing[0]!r} to drop, but {sorted(names)}.")
