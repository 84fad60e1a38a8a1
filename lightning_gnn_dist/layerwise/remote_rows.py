"""The nodes that a rank computes, and the rows of all nodes that send to them, in files.

    own nodes 0 to n, and behind them their halo: nodes of other ranks, in increasing order of their ids

A row of the halo comes from the rank that computes it, once for each layer, in rounds that limit a rank's memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.convert import index_dtype
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph, checked_graph
from lightning_gnn_dist.graph.rows import take_rows
from lightning_gnn_dist.graph.storage import npy
from lightning_gnn_dist.graph.storage.row_file import RowFile, make
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.layerwise.layers import with_arrays
from lightning_gnn_dist.prepare.shard import Bounds, Shard
from lightning_gnn_dist.wire.channel import Channel

_COPIES = 6  # of the rows that a round sends: sent, as bytes, received, and kept by an allocator
_BYTES_OF_AN_EDGE = 80  # while local ids are looked up
_ROWS_AT_ONCE = 1 << 16


class Division:
    """Which nodes each rank computes: the nodes of a shard are divided among all ranks that hold it.

    Args:
        bounds: Where the shards begin.
        num_ranks: A multiple of the number of shards; rank ``r`` has shard ``r % num_shards``.
    """

    def __init__(self, bounds: Bounds, num_ranks: int) -> None:
        self._num_shards, self._copies = bounds.num_shards, num_ranks // bounds.num_shards
        first, last = bounds.nodes[:-1, None], bounds.nodes[1:, None]
        starts = first + (last - first) * torch.arange(self._copies) // self._copies
        self.starts = torch.cat([starts.view(-1), bounds.nodes[-1:]])
        if int(self.starts.diff().min()) < 1:
            shard = int(self.starts.diff().argmin()) // self._copies
            raise ValueError(
                f"Shard {shard} has {int((last - first)[shard])} nodes, which {self._copies} ranks are to compute: "
                "start fewer ranks, or divide the graph into fewer shards."
            )

    def nodes(self, rank: int) -> range:
        """The nodes that ``rank`` computes."""
        slot = self._slot(rank)
        return range(int(self.starts[slot]), int(self.starts[slot + 1]))

    def by_rank(self, nodes: Tensor) -> list[Tensor]:
        """Divide increasing nodes by the rank that computes them."""
        of_slots = nodes.split(torch.searchsorted(nodes, self.starts).diff().tolist())
        return [of_slots[self._slot(rank)] for rank in range(len(of_slots))]

    def _slot(self, rank: int) -> int:
        return rank % self._num_shards * self._copies + rank // self._num_shards


class RemoteRows:
    """A rank's own nodes and their halo, as a graph whose arrays are files. To construct it is collective.

    It holds a piece of the edges or rows in RAM, and at first about 40 bytes for each node of the halo.

    Args:
        shard: The shard that has the own nodes.
        division: Which nodes of the shard are this rank's own.
        channel: The channel of all ranks.
        folder: A folder on this host for the files.
        budget_bytes: Bytes that a piece of edges, or a round of the exchange, may take.
    """

    def __init__(self, shard: Shard, division: Division, channel: Channel, folder: Path, budget_bytes: int) -> None:
        self._channel, self._folder, self._budget_bytes = channel, folder, budget_bytes
        self._shard, self._own = shard, division.nodes(channel.rank)
        self._edges_at_once = min(EDGES_AT_ONCE, max(1, budget_bytes // _BYTES_OF_AN_EDGE))
        self.ids = self._kept("ids", self._outside(_rows_of(shard, self._own).indices))
        self._small = index_dtype(int(shard.bounds.nodes[-1]))
        self._cuts = [self._cut(division.nodes(rank)) for rank in range(channel.size)]
        self._most = self._agreed_most()

    @property
    def num_own(self) -> int:
        return len(self._own)

    @property
    def num_nodes(self) -> int:
        return self.num_own + self.ids.numel()

    def graph(self) -> Graph:
        """The graph of own nodes and halo: the edges into own nodes, and the arrays of all nodes. Collective."""
        rows = _rows_of(self._shard, self._own)
        ends = rows.indptr[-1:].expand(self.ids.numel())
        indptr = self._kept("indptr", torch.cat([rows.indptr, ends]))
        arrays = {name: self._with_halo(name, array) for name, array in sorted(rows.node_arrays.items())}
        return checked_graph(indptr, self._local_indices(rows.indices), arrays, rows.edge_arrays)

    def with_arrays(self, graph: Graph, arrays: Mapping[str, Tensor]) -> Graph:
        """The graph with more node arrays, of which only the own nodes' rows are given. Collective."""
        complete = {name: self._with_halo(name, array) for name, array in sorted(arrays.items())}
        return with_arrays(graph, complete)

    def complete(self, path: Path) -> None:
        """Add the rows of the halo to a file that has the own nodes' rows. Collective."""
        own, file = _map(path)[: self.num_own], RowFile(path, "a layer")
        for asked, cuts in self._rounds(own[:1].nbytes):
            told = self._channel.exchange(asked)
            answers = [take_rows(own, ids.to(torch.int64) - self._own.start) for ids in told]
            rows = self._channel.exchange(answers, [len(ids) for ids in asked])
            for at, piece in zip(cuts, rows, strict=True):
                file.write(self.num_own + np.arange(at.start, at.stop), piece.numpy())
        file.close()

    def _rounds(self, bytes_of_row: int) -> Iterator[tuple[list[Tensor], list[range]]]:
        """Yield the ids to ask each rank for and their positions in the halo: on all ranks in equally many rounds.

        In a round, neither the ids asked for nor the rows in answer exceed the budget.
        """
        size = max(1, self._budget_bytes // (_COPIES * (bytes_of_row + 8) * self._channel.size))
        for start in range(0, self._most, size):
            cuts = [cut[start : start + size] for cut in self._cuts]
            yield [self.ids[at.start : at.stop].to(self._small) for at in cuts], cuts

    def _cut(self, nodes: range) -> range:
        """The positions in the halo of another rank's nodes."""
        return range(*torch.searchsorted(self.ids, torch.tensor([nodes.start, nodes.stop])).tolist())

    def _outside(self, indices: Tensor) -> Tensor:
        """The nodes that send to own nodes and are not own, in increasing order."""
        found, new = torch.empty(0, dtype=torch.int64), list[Tensor]()
        for senders in indices.split(self._edges_at_once):
            new.append(senders[~_is_in(senders, self._own)].unique().to(torch.int64))
            if sum(map(len, new)) > max(self._edges_at_once, len(found)):  # so that each id is sorted only a few times
                found, new = torch.cat([found, *new]).unique(), []
        every: Tensor = torch.cat([found, *new]).unique()
        return every

    def _agreed_most(self) -> int:
        """The largest number of nodes that any rank needs from another. Collective."""
        own = torch.tensor([max(map(len, self._cuts))])
        return int(torch.cat(self._channel.exchange([own] * self._channel.size)).max())

    def _with_halo(self, name: str, array: Tensor) -> Tensor:
        path, stored = self._folder / f"nodes-{name}.npy", array
        if array.dtype == torch.bfloat16:  # numpy has no bfloat16
            stored = array.view(torch.int16)
        make(path, self.num_nodes, stored[:1].numpy())
        file = RowFile(path)
        for start in range(0, self.num_own, _ROWS_AT_ONCE):
            rows = stored[start : start + _ROWS_AT_ONCE].numpy()
            file.write(np.arange(start, start + len(rows)), rows)
        file.close()
        self.complete(path)
        return _map(path).view(array.dtype)

    def _local_indices(self, indices: Tensor) -> Tensor:
        """The edges' senders as local ids, in a file: own nodes first, the halo behind them."""
        path, dtype = self._folder / "indices.npy", index_dtype(self.num_nodes)
        npy.write_header(path, _numpy_dtype(dtype), tuple(indices.shape))
        for senders in indices.split(self._edges_at_once):
            outside = self.num_own + torch.searchsorted(self.ids, senders.to(torch.int64))
            local = torch.where(_is_in(senders, self._own), senders - self._own.start, outside)
            npy.append(path, local.to(dtype).numpy())
        return _map(path)

    def _kept(self, name: str, array: Tensor) -> Tensor:
        """The same array in a file, whose pages the system may take back."""
        npy.save(self._folder / f"{name}.npy", array.numpy())
        return _map(self._folder / f"{name}.npy")


def _rows_of(shard: Shard, nodes: range) -> Graph:
    """The rows of some nodes of a shard; edges and arrays are views."""
    first, last = nodes.start - shard.first_node, nodes.stop - shard.first_node
    rows, starts = shard.rows, shard.rows.indptr[first : last + 1]
    edges = slice(int(starts[0]), int(starts[-1]))
    arrays = {name: array[first:last] for name, array in rows.node_arrays.items()}
    of_edges = {name: array[edges] for name, array in rows.edge_arrays.items()}
    return checked_graph(starts - starts[0], rows.indices[edges], arrays, of_edges)


def _is_in(ids: Tensor, nodes: range) -> Tensor:
    return (ids >= nodes.start) & (ids < nodes.stop)


def _map(path: Path) -> Tensor:
    return torch.from_numpy(map_npy(path))


def _numpy_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    return torch.empty(0, dtype=dtype).numpy().dtype
