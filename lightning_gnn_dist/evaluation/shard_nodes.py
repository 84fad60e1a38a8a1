"""The nodes that a rank computes where every rank has a shard of the graph."""

from __future__ import annotations

from math import prod
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.batches.assembling import Content, Taken, made_of
from lightning_gnn_dist.batches.batch import SampledData, gathered, names_in_batches, with_x
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.evaluation.layer_pass import Bring
from lightning_gnn_dist.evaluation.row_table import RowTable, fetch_rows
from lightning_gnn_dist.evaluation.whole_nodes import FEATURES
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE
from lightning_gnn_dist.graph.rows import bytes_per_row, edge_positions, take_rows
from lightning_gnn_dist.layerwise.remote_rows import Division
from lightning_gnn_dist.prepare.shard import Shard
from lightning_gnn_dist.wire.channel import Channel


class ShardNodes:
    """The nodes of a shard, divided among all ranks that hold it, and the input rows of what sends to them.

    Args:
        shard: The rank's shard.
        channel: All ranks.
        budget_bytes: Bytes that input rows may take in RAM; others are in a file.
        folder: Where such a file is made.
        widen: Make float32 of narrower features, of all or of all but one type.
        more: Further arrays with a row for each node of the shard.
    """

    def __init__(
        self,
        shard: Shard,
        channel: Channel,
        budget_bytes: int,
        folder: Path,
        *,
        widen: Widen = True,
        more: dict[str, Tensor] | None = None,
    ) -> None:
        self._shard, self._channel, self._widen = shard, channel, widen
        self._division = Division(shard.bounds, channel.size)
        self._budget_bytes, self._folder = budget_bytes, folder
        self._own = shard.rows.node_arrays | (more or {})
        self._tables: dict[str, RowTable] = {}
        self.bytes_per_edge = bytes_per_row(shard.rows.edge_arrays)
        self.most_rows = int(shard.bounds.nodes[-1])

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        return self._division.by_rank(nodes)

    def senders(self, nodes: Tensor) -> Tensor:
        indptr, indices = self._shard.rows.indptr, self._shard.rows.indices
        found = [nodes]
        for some in (nodes - self._shard.first_node).split(EDGES_AT_ONCE // 16):
            found.append(indices[edge_positions(indptr, some)].unique().to(torch.int64))
        every: Tensor = torch.cat(found).unique()
        return every

    def degrees(self, nodes: Tensor) -> Tensor:
        indptr, local = self._shard.rows.indptr, nodes - self._shard.first_node
        return indptr[local + 1] - indptr[local]

    def prepare(self, nodes: Tensor, seeds: Tensor) -> int:
        nodes = torch.cat([nodes, seeds]).unique()
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
        rows, degrees = self._shard.rows, self.degrees(nodes)
        positions = edge_positions(rows.indptr, nodes - self._shard.first_node)
        senders = rows.indices[positions].to(torch.int64)
        others = senders.unique()
        others = others[~torch.isin(others, nodes, assume_unique=True)]
        found, order = torch.cat([nodes, others]).sort()
        return Sample(
            nodes=torch.cat([nodes, others]),
            indptr=torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]).to(torch.int32),
            indices=order[torch.searchsorted(found, senders)].to(torch.int32),
            num_sampled_nodes=[len(nodes), len(others)],
            num_sampled_edges=[len(senders)],
            edge_ids=positions if rows.edge_arrays else None,
        )
