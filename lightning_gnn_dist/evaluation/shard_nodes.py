"""The nodes that a rank computes where every rank has a shard of the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.batches.assembling import Content, Taken, made_of
from lightning_gnn_dist.batches.batch import SampledData, gathered, names_in_batches, with_x
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.evaluation.ids import Ids, edges_before, ids_of
from lightning_gnn_dist.evaluation.layer_pass import Bring
from lightning_gnn_dist.evaluation.row_table import RowTable, fetch_rows
from lightning_gnn_dist.evaluation.whole_nodes import FEATURES
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.rows import EDGES_PER_PIECE, bytes_per_row, edge_positions, row_pieces, take_rows
from lightning_gnn_dist.layerwise.layers import Layer
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.prepare.shard import Bounds, Shard
from lightning_gnn_dist.wire.channel import Channel

SHARE_OF_INPUTS = 4  # the part of an evaluation's budget that input rows may take in RAM
_BYTES_OF_AN_EDGE = 80  # while senders are sorted


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


class ShardNodes:
    """The nodes of a shard, divided among all ranks that hold it, and the input rows of what sends to them.

    Args:
        shard: The rank's shard.
        layers: The layers of the model.
        channel: All ranks.
        budget_bytes: Bytes that input rows may take in RAM; others are in a file.
        folder: Where such a file is made.
        widen: Make float32 of narrower features, of all or of all but one type.
    """

    def __init__(
        self,
        shard: Shard,
        layers: Sequence[Layer],
        channel: Channel,
        budget_bytes: int,
        folder: Path,
        *,
        widen: Widen = True,
    ) -> None:
        self._shard, self._channel, self._widen = shard, channel, widen
        self._division = Division(shard.bounds, channel.size)
        self._budget_bytes, self._folder = budget_bytes, folder
        self._own = shard.rows.node_arrays | whole_graph_arrays(layers, shard.rows, shard.first_node)
        self._tables: dict[str, RowTable] = {}
        self.bytes_per_edge = bytes_per_row(shard.rows.edge_arrays)
        self.most_rows = int(shard.bounds.nodes[-1])

    def own(self, rank: int) -> range:
        """Return the nodes that a rank owns."""
        return self._division.nodes(rank)

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        return self._division.by_rank(nodes)

    def senders(self, nodes: Ids) -> Tensor:
        indptr, indices = self._shard.rows.indptr, self._shard.rows.indices
        if not isinstance(nodes, range):
            pieces = (indices[at] for _, at in row_pieces(indptr, nodes - self._shard.first_node))
            return _distinct(nodes, pieces, EDGES_PER_PIECE)
        at_once = min(EDGES_PER_PIECE, max(1, self._budget_bytes // _BYTES_OF_AN_EDGE))
        first, last = self.edges_before(nodes)[[0, -1]].tolist()
        of_all = indices[first:last].split(at_once)
        outside = (some[(some < nodes.start) | (some >= nodes.stop)] for some in of_all)
        others = _distinct(indptr[:0], outside, at_once)
        below = int(torch.searchsorted(others, nodes.start))
        return torch.cat([others[:below], ids_of(nodes), others[below:]])

    def edges_before(self, nodes: Ids) -> Tensor:
        first = self._shard.first_node
        local = range(nodes.start - first, nodes.stop - first) if isinstance(nodes, range) else nodes - first
        return edges_before(self._shard.rows.indptr, local)

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        nodes = torch.cat([ids_of(nodes), seeds]).unique() if len(seeds) else ids_of(nodes)
        asked = self.by_owner(nodes)
        told = self._channel.exchange(asked)
        room = self._budget_bytes
        for name, array in sorted(self._own.items()):
            table = RowTable(nodes, array[:0], room, self._folder)
            room -= table.bytes_in_ram

            def take(ids: Tensor, array: Tensor = array) -> Tensor:
                return take_rows(array, ids - self._shard.first_node)

            fetch_rows(self._channel, asked, told, take, table, self._budget_bytes)
            self._tables[name] = table
        row = gathered({name: table.like for name, table in self._tables.items()}, nodes[:0], widen=self._widen)
        return sum(rows.element_size() * prod(rows.shape[1:]) for rows in row.values())

    def one_hop(self, nodes: Tensor, rows: RowTable | None, bring: Bring) -> SampledData:
        sample = self._sample(nodes)
        ids = sample.nodes
        left_out = () if rows is None else FEATURES
        arrays = {name: table.take(ids) for name, table in self._tables.items() if name not in left_out}
        edges = Taken({}) if sample.edge_ids is None else Taken(self._shard.rows.edge_arrays, sample.edge_ids)
        batch = made_of(Content.of_one_type(sample, Taken(arrays), edges), widen=self._widen)
        if rows is not None:
            batch = with_x(batch, rows.take(ids))
        batch.promise_x0(lambda: bring(self._input_rows("x", ids)))
        return batch

    def input_names(self) -> list[str]:
        return names_in_batches(self._shard.rows, widen=self._widen)

    def inputs(self, name: str, nodes: Tensor) -> Tensor | None:
        if name in self._tables:
            return self._input_rows(name, nodes)
        return nodes if name == "n_id" else None

    def _input_rows(self, name: str, nodes: Tensor) -> Tensor:
        arrays = {key: self._tables[key].take(nodes) for key in (name, name + SUFFIX) if key in self._tables}
        return gathered(arrays, torch.arange(len(nodes)), widen=self._widen)[name]

    def _sample(self, nodes: Tensor) -> Sample:
        """Sample all in-neighbours of own nodes, as the kernel of whole graphs would but for the order of nodes."""
        rows, local = self._shard.rows, nodes - self._shard.first_node
        starts, positions = edges_before(rows.indptr, local), edge_positions(rows.indptr, local)
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
            edge_ids=positions if rows.edge_arrays else None,
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
