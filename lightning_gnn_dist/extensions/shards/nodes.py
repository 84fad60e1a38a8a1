"""The nodes that a rank computes where every rank has a shard of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import gathered
from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.batches.source import Content, Taken, made_of, taken_of_edges
from lightning_gnn_dist.engine.sample import Sample, has_ids
from lightning_gnn_dist.extensions.larger_than_memory.ahead import take_apart_of_shards
from lightning_gnn_dist.extensions.passes.row_table import Room, RowTable, fetch_rows
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard, TypedBounds, check_ranks
from lightning_gnn_dist.graph.graph import with_arrays
from lightning_gnn_dist.graph.rows import (
    EDGES_PER_PIECE,
    degrees_of,
    edge_positions,
    row_pieces,
    starts_of,
    take_rows,
)
from lightning_gnn_dist.layers.layer_pass import (
    GraphNodes,
    Ids,
    by_type,
    by_types,
    edges_before,
    ids_of,
)
from lightning_gnn_dist.layers.through_layers import Layer, whole_graph_arrays
from lightning_gnn_dist.wire.channel import Channel

SHARE_OF_INPUTS = 4  # the part of an evaluation's budget that input rows may take in RAM
_BYTES_OF_AN_EDGE = 80  # while senders are sorted


class Division:
    """Which nodes each rank computes: those of a type in a shard are divided among all ranks that hold it.

    Args:
        types: Where the nodes of each type begin in each shard.
        num_ranks: A multiple of the number of shards; rank ``r`` has shard ``r % num_shards``.
    """

    def __init__(self, types: TypedBounds, num_ranks: int) -> None:
        self._num_ranks, copies = num_ranks, num_ranks // types.num_shards
        offsets = torch.tensor(types.offsets[:-1])[:, None, None]
        first, last = types.nodes[:, :-1, None] + offsets, types.nodes[:, 1:, None] + offsets
        starts = first + (last - first) * torch.arange(copies) // copies
        shard, copy = torch.arange(types.num_shards)[:, None], torch.arange(copies)
        # In the order of ids: of which rank is each piece, and where does it begin.
        self._ranks = (copy * types.num_shards + shard).expand(starts.shape).reshape(-1)
        self.starts = torch.cat([starts.view(-1), torch.tensor(types.offsets[-1:])])
        counts = torch.zeros(num_ranks, dtype=torch.int64).index_add_(0, self._ranks, self.starts.diff())
        if int(counts.min()) < 1:
            shard_of = int(counts.argmin()) % types.num_shards
            raise ValueError(
                f"Shard {shard_of} has {int(types.nodes.diff()[:, shard_of].sum())} nodes, which {copies} ranks are to "
                "compute: start fewer ranks, or divide the graph into fewer shards."
            )

    def nodes(self, rank: int) -> Ids:
        """The nodes that ``rank`` computes."""
        slots = (self._ranks == rank).nonzero().view(-1)
        pieces = [range(*ends) for ends in torch.stack([self.starts[slots], self.starts[slots + 1]], 1).tolist()]
        return pieces[0] if len(pieces) == 1 else torch.cat([ids_of(piece) for piece in pieces])

    def by_rank(self, nodes: Tensor) -> list[Tensor]:
        """Divide increasing nodes by the rank that computes them; where one piece is a rank's, nothing is copied."""
        pieces = nodes.split(torch.searchsorted(nodes, self.starts).diff().tolist())
        of_ranks: list[list[Tensor]] = [[] for _ in range(self._num_ranks)]
        for rank, piece in zip(self._ranks.tolist(), pieces, strict=True):
            of_ranks[rank].append(piece)
        return [of[0] if len(of) == 1 else torch.cat(of) for of in of_ranks]


def nodes_of_shards(
    path: Path, layers: Sequence[Layer], channel: Channel, budget_bytes: int, seed_type: str
) -> ShardNodes:
    """Return the nodes of the own shard, for a pass over all nodes.

    Args:
        path: The folder of the shards.
        layers: The layers of the model.
        channel: All ranks.
        budget_bytes: Bytes that the pass may take.
        seed_type: The node type that batches say their seeds are of.
    """
    bounds = Bounds.read(path)
    check_ranks(path, bounds, channel.size)
    shard = Shard.open(path, channel.rank % bounds.num_shards)
    how = layers, channel, budget_bytes // SHARE_OF_INPUTS, path.resolve().parent
    return ShardNodes(shard, *how, seed_type=seed_type)


class ShardNodes(GraphNodes):
    """The nodes of a shard, divided among all ranks that hold it, and the input rows of what sends to them.

    Args:
        shard: The rank's shard.
        layers: The layers of the model.
        channel: All ranks.
        budget_bytes: Bytes that input rows may take in RAM; others are in a file.
        folder: Where such a file is made.
        options: What :class:`GraphNodes` take.
    """

    def __init__(
        self, shard: Shard, layers: Sequence[Layer], channel: Channel, budget_bytes: int, folder: Path, **options: Any
    ) -> None:
        self._shard, self._channel, self._bounds = shard, channel, shard.bounds.types
        super().__init__(shard.rows, offsets=self._bounds.offsets, **options)
        self._division = Division(self._bounds, channel.size)
        self._budget_bytes, self._folder = budget_bytes, folder
        more = whole_graph_arrays(layers, shard.rows, shard.first_node)
        self._own = list(with_arrays(shard.rows, more).types.node_arrays.values())
        self._tables: list[dict[str, RowTable]] = [{} for _ in self._own]
        self.most_rows = int(shard.bounds.nodes[-1])

    @property
    def types(self) -> TypedBounds:
        return self._bounds

    def own(self, rank: int) -> Ids:
        """Return the nodes that a rank owns."""
        return self._division.nodes(rank)

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        return self._division.by_rank(nodes)

    def senders(self, nodes: Ids) -> Tensor:
        indptr, indices = self.rows.indptr, self.rows.indices
        if not isinstance(nodes, range):
            pieces = (indices[at] for _, at in row_pieces(indptr, ids_of(self.rows_at(nodes))))
            return _distinct(nodes, pieces, EDGES_PER_PIECE)
        at_once = min(EDGES_PER_PIECE, max(1, self._budget_bytes // _BYTES_OF_AN_EDGE))
        first, last = edges_before(self, nodes)[[0, -1]].tolist()
        of_all = indices[first:last].split(at_once)
        outside = (some[(some < nodes.start) | (some >= nodes.stop)] for some in of_all)
        others = _distinct(indptr[:0], outside, at_once)
        below = int(torch.searchsorted(others, nodes.start))
        return torch.cat([others[:below], ids_of(nodes), others[below:]])

    def rows_at(self, nodes: Ids) -> Ids:
        """The rows of own nodes in the shard."""
        if len(self.offsets) > 2:
            return self.types.owners(ids_of(nodes))[1]
        first = self._shard.first_node
        return range(nodes.start - first, nodes.stop - first) if isinstance(nodes, range) else nodes - first

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        nodes = torch.cat([ids_of(nodes), seeds]).unique() if len(seeds) else ids_of(nodes)
        asked = self.by_owner(nodes)
        told = self._channel.exchange(asked)
        left = self._budget_bytes
        of_types = by_type(nodes, self.offsets), by_types(asked, self.offsets), by_types(told, self.offsets)
        for kind, (ids, asked_of, told_of) in enumerate(zip(*of_types, strict=True)):
            for name, array in sorted(self._own[kind].items()):
                table = RowTable(ids, array[:0], Room(left, self._folder))
                left -= table.bytes_in_ram
                take = partial(self.own_rows, kind, array)
                fetch_rows(self._channel, asked_of, told_of, take, table, self._budget_bytes)
                self._tables[kind][name] = table
        return max(map(self._bytes_of_row, self._tables))

    def _bytes_of_row(self, tables: dict[str, RowTable]) -> int:
        likes, none = {name: table.like for name, table in tables.items()}, torch.empty(0, dtype=torch.int64)
        rows = gathered(likes, none, widen=self._widen).values()
        return sum(each.element_size() * prod(each.shape[1:]) for each in rows)

    def n_id(self, kind: int) -> Tensor:
        """The ids of the shard's nodes of a type, in that type of the graph before it was divided."""
        return self.rows.types.node_arrays[self.types.node_types[kind]]["n_id"]

    def ids_in_type(self, kind: int, nodes: Tensor) -> Tensor:
        """Those ids of own nodes of a type."""
        return self.own_rows(kind, self.n_id(kind), nodes)

    def own_rows(self, kind: int, array: Tensor, nodes: Tensor) -> Tensor:
        """Rows of an array of a type for own nodes."""
        return take_rows(array, ids_of(self.rows_at(nodes)) - self.rows.types.offsets[kind])

    def _around(self, nodes: Tensor) -> tuple[Any, list[Tensor]]:
        sample = self._sample(nodes)
        apart = take_apart_of_shards(self.types, sample)
        of_types = [at + start for at, start in zip(apart.nodes, self.offsets, strict=False)]
        taken = [
            Taken({name: table.take(ids) for name, table in tables.items() if name != "x"})
            for tables, ids in zip(self._tables, of_types, strict=True)
        ]
        edges = taken_of_edges(self.rows, apart)
        content = Content.by_types(self.types, apart, sample, taken, edges, self._seed_type)
        return made_of(content, widen=self._widen), of_types

    def _ids(self, of_types: list[Tensor]) -> list[Tensor]:
        return of_types

    def _inputs(self, number: int, at: Tensor, pool: Pool | None = None) -> Tensor | None:
        return self.inputs(number, "x", at)

    def inputs(self, kind: int, name: str, nodes: Tensor) -> Tensor | None:
        tables = self._tables[kind]
        if name not in tables:
            return nodes - self.offsets[kind] if name == "n_id" else None
        return self._taken(name, tables[name].take(nodes), torch.arange(len(nodes)))

    def _sample(self, nodes: Tensor) -> Sample:
        """Sample all in-neighbours of own nodes, as the kernel of whole graphs would but for the order of nodes."""
        rows, local = self.rows, ids_of(self.rows_at(nodes))
        starts, positions = starts_of(degrees_of(rows.indptr, local)), edge_positions(rows.indptr, local)
        senders = rows.indices[positions].to(torch.int64)
        others = senders.unique()
        others = others[~torch.isin(others, nodes, assume_unique=True)]
        found, order = torch.cat([nodes, others]).sort()
        return Sample(
            nodes=torch.cat([nodes, others]),
            indptr=starts.to(torch.int32),
            indices=order[torch.searchsorted(found, senders)].to(torch.int32),
            num_sampled_nodes=[len(nodes), len(others)],
            num_sampled_edges=[len(senders)],
            edge_ids=positions if has_ids(rows) else None,
            edge_kinds=rows.types.edge_type[positions],
        )


def _distinct(found: Tensor, pieces: Iterable[Tensor], at_once: int) -> Tensor:
    """Return distinct ids and those of some pieces, in increasing order."""
    new = list[Tensor]()
    for ids in pieces:
        new.append(ids.unique().to(torch.int64))
        if sum(map(len, new)) > max(at_once, len(found)):  # so that each id is sorted only a few times
            found, new = torch.cat([found, *new]).unique(), []
    every: Tensor = torch.cat([found, *new]).unique()
    return every
