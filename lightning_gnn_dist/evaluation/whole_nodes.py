"""The nodes that a rank computes of a graph that it has at hand, and which these are where every rank has it whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_gnn_dist.batches.assembling import assemble
from lightning_gnn_dist.batches.batch import SampledData, gathered, names_in_batches, with_x
from lightning_gnn_dist.batches.file_rows import FileRows
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.evaluation.ids import Ids, edges_before, ids_of
from lightning_gnn_dist.evaluation.layer_pass import Bring
from lightning_gnn_dist.evaluation.reach import EDGES_OF_A_NODE, Neighbourhoods
from lightning_gnn_dist.evaluation.row_table import RowTable
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.graph import Graph, checked_graph
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of
from lightning_gnn_dist.graph.storage.mapped import MappedRows
from lightning_gnn_dist.graph.storage.maps import all_maps
from lightning_gnn_dist.layerwise.layers import Layer
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.sampling.neighbor import NeighborSampler

FEATURES = ("x", "x" + SUFFIX)


class GraphNodes:
    """Nodes of a graph that a rank has at hand, with all in-neighbours of those that it owns.

    Args:
        graph: The graph.
        widen: Make float32 of narrower features, of all or of all but one type.
        more: Further arrays with a row for each node.
        budget_bytes: Bytes that the work may take. Of a graph in files that takes more than half of them, no pages are
            kept in memory. Default: all are.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        widen: Widen = True,
        more: Mapping[str, Tensor] = {},  # never changed
        budget_bytes: int | None = None,
    ) -> None:
        self._graph, self._widen = graph, widen
        self._features = {name: array for name, array in graph.node_arrays.items() if name in FEATURES}
        others = {name: array for name, array in graph.node_arrays.items() if name not in FEATURES} | dict(more)
        self._others = checked_graph(graph.indptr, graph.indices, others, graph.edge_arrays)
        self.bytes_per_edge, self.most_rows = bytes_per_row(graph.edge_arrays), graph.num_nodes
        self._files: FileRows | None = None
        if budget_bytes is not None and graph.path is not None and graph.num_bytes > budget_bytes // 2:
            maps = all_maps()  # a look at all maps of the process, so not for every batch
            self._files = FileRows(self._others)
            self._mapped = {name: MappedRows(array, maps) for name, array in graph.node_arrays.items()}

    def edges_before(self, nodes: Ids) -> Tensor:
        return edges_before(self._graph.indptr, self._at(nodes))

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        row = gathered(self._features, torch.arange(min(1, self._graph.num_nodes)), widen=self._widen)
        return bytes_per_row(row) + bytes_per_row(self._others.node_arrays)

    def one_hop(self, nodes: Tensor, rows: RowTable | None, bring: Bring) -> SampledData:
        (sample,) = NeighborSampler([-1]).sample_bulk(self._graph, [ids_of(self._at(nodes))], [BatchKey(0, 0, 0)])
        if self._files is not None:
            self._files.release()
            batch = self._files.assemble(sample, widen=self._widen)
        else:
            batch = assemble(self._others, sample, widen=self._widen)
        if rows is not None:
            batch = with_x(batch, rows.take(self._ids(sample.nodes)))
        elif self._features:
            batch = with_x(batch, self._inputs(sample.nodes))
        batch.promise_x0(lambda: bring(self._inputs(sample.nodes)))
        return batch

    def _at(self, nodes: Ids) -> Ids:
        """The places of own nodes in the graph."""
        return nodes

    def _ids(self, at: Tensor) -> Tensor:
        """The nodes at some places in the graph."""
        return at

    def _inputs(self, at: Tensor) -> Tensor:
        return self._taken(self._features, at)["x"]

    def _taken(self, arrays: dict[str, Tensor], at: Tensor) -> dict[str, Tensor]:
        """Rows of arrays as batches have them."""
        if self._files is not None:
            arrays = {name: self._mapped[name].take(at) for name in arrays}
            at = torch.arange(len(at))
        return gathered(arrays, at, widen=self._widen)


class WholeNodes(GraphNodes):
    """Cuts the nodes into ranges, one for each rank: of equal work for some seeds, of equal length for all nodes.

    Args:
        graph: The graph, which all ranks have alike.
        seeds: The seeds of all ranks, or None for all nodes.
        layers: The layers of the model.
        num_ranks: How many ranks share the work.
        budget_bytes: Bytes that the work may take.
        widen: Make float32 of narrower features, of all or of all but one type.
    """

    def __init__(
        self,
        graph: Graph,
        seeds: Tensor | None,
        layers: Sequence[Layer],
        num_ranks: int,
        budget_bytes: int,
        *,
        widen: Widen = True,
    ) -> None:
        super().__init__(graph, widen=widen, more=whole_graph_arrays(layers, graph), budget_bytes=budget_bytes)
        equal = torch.arange(num_ranks + 1) * graph.num_nodes // num_ranks
        self._starts = equal if seeds is None or num_ranks == 1 else self._divided(seeds, len(layers), num_ranks)

    def own(self, rank: int) -> range:
        """Return the nodes that a rank owns."""
        return range(int(self._starts[rank]), int(self._starts[rank + 1]))

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        return list(nodes.split(torch.searchsorted(nodes, self._starts).diff().tolist()))

    def senders(self, nodes: Ids) -> Tensor:
        return Neighbourhoods(self._graph, 1).senders(ids_of(nodes))

    def input_names(self) -> list[str]:
        return names_in_batches(self._graph, widen=self._widen)

    def inputs(self, name: str, nodes: Tensor) -> Tensor | None:
        arrays = self._graph.node_arrays
        if name == "n_id" and name not in arrays:
            return nodes
        return self._taken({key: arrays[key] for key in (name, name + SUFFIX) if key in arrays}, nodes).get(name)

    def _divided(self, seeds: Tensor, num_layers: int, num_ranks: int) -> Tensor:
        """The first node of each rank's range, and the number of nodes: ranges that cost the layers the same."""
        graph = self._graph
        work, needed = torch.zeros(graph.num_nodes, dtype=torch.int64), seeds.unique()
        for _ in range(num_layers):
            work[needed] += degrees_of(graph.indptr, needed) + EDGES_OF_A_NODE
            needed = self.senders(needed)
        upto = work.cumsum(0)
        shares = torch.arange(1, num_ranks) * int(upto[-1]) // num_ranks
        cuts = torch.searchsorted(upto, shares, right=True)
        return torch.cat([cuts.new_zeros(1), cuts, cuts.new_tensor([graph.num_nodes])])
