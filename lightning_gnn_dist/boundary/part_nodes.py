"""The nodes that a rank computes where it holds a part, with all in-neighbours of those that it owns."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.batches.batch import SampledData, gathered, with_x
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.evaluation.ids import Ids, edges_before, ids_of
from lightning_gnn_dist.evaluation.layer_pass import Bring
from lightning_gnn_dist.evaluation.row_table import RowTable
from lightning_gnn_dist.evaluation.whole_nodes import FEATURES
from lightning_gnn_dist.graph.graph import Graph, checked_graph
from lightning_gnn_dist.graph.rows import bytes_per_row, edge_positions
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


class PartNodes:
    """The own nodes of a part. Nodes are told by their ids in the whole graph, which ``n_id`` of the part holds.

    Args:
        part: The rank's own nodes, in increasing order of their ids, and behind them all others that send to them.
        rank: The rank.
        chunks: The chunk of every node of the whole graph.
        owners: The rank that owns each chunk.
        num_ranks: How many ranks there are.
        widen: Make float32 of narrower features, of all or of all but one type.
    """

    def __init__(
        self, part: Graph, rank: int, chunks: Tensor, owners: Tensor, num_ranks: int, *, widen: Widen = True
    ) -> None:
        arrays = part.node_arrays
        self._chunks, self._owners, self._num_ranks, self._widen = chunks, owners, num_ranks, widen
        self._features = {name: array for name, array in arrays.items() if name in FEATURES}
        others = {name: array for name, array in arrays.items() if name not in FEATURES}
        self._part = checked_graph(part.indptr, part.indices, others, part.edge_arrays)
        self._ids = arrays["n_id"]
        self._own = self._ids[: int((self._owner_of(self._ids) == rank).sum())]
        self.bytes_per_edge, self.most_rows = bytes_per_row(part.edge_arrays), part.num_nodes

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        owner = self._owner_of(nodes)
        return [nodes[owner == rank] for rank in range(self._num_ranks)]

    def senders(self, nodes: Ids) -> Tensor:
        nodes = ids_of(nodes)
        edges = edge_positions(self._part.indptr, self._at(nodes))
        senders = self._part.indices[edges].to(torch.int64).unique()
        found: Tensor = torch.cat([nodes, self._ids[senders]]).unique()
        return found

    def edges_before(self, nodes: Ids) -> Tensor:
        return edges_before(self._part.indptr, self._at(ids_of(nodes)))

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        row = gathered(self._features, torch.arange(min(1, len(self._ids))), widen=self._widen)
        return bytes_per_row(row) + bytes_per_row(self._part.node_arrays)

    def one_hop(self, nodes: Tensor, rows: RowTable | None, bring: Bring) -> SampledData:
        (sample,) = NeighborSampler([-1]).sample_bulk(self._part, [self._at(nodes)], [BatchKey(0, 0, 0)])
        batch = assemble(self._part, sample, widen=self._widen)
        if rows is not None:
            batch = with_x(batch, rows.take(self._ids[sample.nodes]))
        elif self._features:
            batch = with_x(batch, self._inputs(sample.nodes))
        batch.promise_x0(lambda: bring(self._inputs(sample.nodes)))
        return batch

    def _inputs(self, at: Tensor) -> Tensor:
        rows: Tensor = gathered(self._features, at, widen=self._widen)["x"]
        return rows

    def _at(self, nodes: Tensor) -> Tensor:
        return torch.searchsorted(self._own, nodes)

    def _owner_of(self, nodes: Tensor) -> Tensor:
        owners: Tensor = self._owners[self._chunks[nodes].to(torch.int64)]
        return owners
