"""Rows of nodes outside the running part, which the ranks that own them compute at meetings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.boundary.historic_rows import HistoricRows, MeetingChannel
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.layers.layer_pass import LayerPass
from lightning_gnn_dist.layers.row_table import Ids, ids_of
from lightning_gnn_dist.layers.whole_nodes import GraphNodes
from lightning_gnn_dist.wire.channel import open_channel


class PartNodes(GraphNodes):
    """The own nodes of a part. Nodes are told by their ids in the whole graph, which ``n_id`` of the part holds.

    Args:
        part: The rank's own nodes, in increasing order of their ids, and all others that send to them.
        rank: The rank.
        chunks: The chunk of every node of the whole graph.
        owners: The rank that owns each chunk.
        num_ranks: How many ranks there are.
        widen: Make float32 of narrower features, of all or of all but one type.
        offsets: The first id of each node type in the whole graph, and at the end the number of its nodes.
    """

    def __init__(
        self,
        part: Graph,
        rank: int,
        chunks: Tensor,
        owners: Tensor,
        num_ranks: int,
        *,
        widen: Widen = True,
        offsets: Sequence[int],
    ) -> None:
        super().__init__(part, widen=widen, offsets=offsets)
        self._chunks, self._owners, self._num_ranks = chunks, owners, num_ranks
        self._n_id = part.node_arrays["n_id"]
        self._own_at = (self._owner_of(self._n_id) == rank).nonzero().view(-1)
        self._own = self._n_id[self._own_at]

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        owner = self._owner_of(nodes)
        return [nodes[owner == rank] for rank in range(self._num_ranks)]

    def senders(self, nodes: Ids) -> Tensor:
        edges = edge_positions(self._graph.indptr, self.rows_at(nodes))
        senders = self._graph.indices[edges].to(torch.int64).unique()
        found: Tensor = torch.cat([ids_of(nodes), self._n_id[senders]]).unique()
        return found

    def rows_at(self, nodes: Ids) -> Tensor:
        return self._own_at[torch.searchsorted(self._own, ids_of(nodes))]

    def _ids(self, of_types: list[Tensor]) -> list[Tensor]:
        return [self._n_id[at] for at in super()._ids(of_types)]

    def _owner_of(self, nodes: Tensor) -> Tensor:
        owners: Tensor = self._owners[self._chunks[nodes].to(torch.int64)]
        return owners


class MeetingRows:
    """Knows the rows of nodes outside the running part; those of the part before are forgotten.

    Args:
        running: The run, and how its batches are made.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._rows: tuple[Graph, HistoricRows] | None = None
        self._channel: MeetingChannel | None = None

    def rows_of(self, part: Graph, is_inside: Tensor, offsets: Sequence[int]) -> HistoricRows:
        """Return the rows of nodes outside a part.

        Args:
            part: The part.
            is_inside: Which of its nodes are inside.
            offsets: The first id of each node type in the whole graph, and at the end the number of its nodes.
        """
        if self._rows is None or self._rows[0] is not part:
            num_hops = self._running.settings.of_parts().num_hops
            self._rows = part, HistoricRows(part, is_inside, num_hops, offsets)
        return self._rows[1]

    def refresh(self, rows: HistoricRows, own_nodes: Callable[[], PartNodes], folder: Path | None) -> None:
        """Compute the rows anew. Collective.

        Args:
            rows: The rows of the running part.
            own_nodes: Returns the nodes that this rank computes.
            folder: Where rows go that take too much memory.
        """
        run = self._running
        assert run.trainer is not None
        if not rows.is_planned:
            if self._channel is None:
                self._channel = MeetingChannel(open_channel(run.num_ranks, run.device))
            limits = run.device, run.bytes_of_evaluation, folder
            there = run.settings.evaluation.bytes
            rows.plan(LayerPass(own_nodes(), self._channel, *limits, None, run.dtype, there))
        with run.trainer.precision_plugin.forward_context():
            rows.refresh(run.trainer.lightning_module)

    def close(self) -> None:
        """End the connections. Not collective."""
        if self._channel is not None:
            self._channel.close()
