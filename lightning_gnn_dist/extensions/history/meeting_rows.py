"""Rows of nodes outside the running part, which the ranks that own them compute at meetings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import Run
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.boundary.boundary import Outside
from lightning_gnn_dist.extensions.history.historic_rows import PLACE, HistoricRows, MeetingChannel
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import edge_positions
from lightning_gnn_dist.graph.with_arrays import with_arrays
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.layers.layer_pass import LayerPass
from lightning_gnn_dist.layers.row_table import Ids, ids_of
from lightning_gnn_dist.layers.through_layers import layers_in
from lightning_gnn_dist.layers.whole_nodes import GraphNodes, folder_beside
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


class MeetingRows(Outside):
    """Knows the rows of nodes outside the running part; those of the part before are forgotten.

    Args:
        home: Where the graph lives.
    """

    home: LocalGraph

    def __init__(self, home: LocalGraph) -> None:
        super().__init__(home)
        self._rows: tuple[Graph, HistoricRows] | None = None
        self._channel: MeetingChannel | None = None

    def of_batches(self, part: Graph, *, are_whole: bool) -> tuple[Graph, Run]:
        rows = self._rows_of(part)

        def with_places() -> Graph:
            of_whole = self._arrays_of_whole_graph(part) if are_whole else {}
            return with_arrays(self.home.shown(part), of_whole | {PLACE: rows.places})

        return remembered(part, "with places of rows", with_places), rows

    def refresh(self, super_epoch: int) -> None:
        run, part = self.home.running, self.home.own_parts().at(super_epoch)
        assert run.trainer is not None
        rows = self._rows_of(part)
        if not rows.is_planned:
            if self._channel is None:
                self._channel = MeetingChannel(open_channel(run.num_ranks, run.device))
            limits = run.device, run.bytes_of_evaluation, folder_beside(self.home.whole)
            there = run.settings.evaluation.bytes
            nodes = self._own_nodes(part, super_epoch)
            rows.plan(LayerPass(nodes, self._channel, *limits, None, run.dtype, there))
        with run.trainer.precision_plugin.forward_context():
            rows.refresh(run.trainer.lightning_module)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _rows_of(self, part: Graph) -> HistoricRows:
        if self._rows is None or self._rows[0] is not part:
            num_hops = self.home.running.settings.of_parts().num_hops
            is_inside = self.home.own_parts().is_resident
            self._rows = part, HistoricRows(part, is_inside, num_hops, self.home.types.offsets)
        return self._rows[1]

    def _own_nodes(self, part: Graph, super_epoch: int) -> PartNodes:
        """Return the nodes that this rank computes."""
        home, run, num_ranks = self.home, self.home.running, self.home.running.num_ranks
        whole = with_arrays(part, self._arrays_of_whole_graph(part))
        of_rank = run.rank, home.partition(num_ranks).assignment, home.plan_for(num_ranks).owner(super_epoch), num_ranks
        return PartNodes(whole, *of_rank, widen=run.widen, offsets=home.types.offsets)

    def _arrays_of_whole_graph(self, part: Graph) -> dict[str, Tensor]:
        assert self.home.running.module is not None
        return self.home.whole_arrays(layers_in(self.home.running.module), part.node_arrays["n_id"])
