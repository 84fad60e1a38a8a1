"""Predictions for all nodes of a sharded graph, one layer at a time.

    h_l of the own nodes -> h_l of the halo comes from the ranks that computed it -> h_(l+1) of the own nodes

Several ranks may have the same shard. Each computes some of its nodes, so a layer is computed once for each node.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_info
from numpy.typing import NDArray
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage import drafts
from lightning_gnn_dist.graph.storage.row_file import RowFile, make
from lightning_gnn_dist.layerwise.layers import Layer, LayerWork, with_x
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.layerwise.remote_rows import Division, RemoteRows
from lightning_gnn_dist.prepare.shard import Bounds, Shard, check_ranks
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import open_channel


@dataclass(kw_only=True)
class ShardedWork(LayerWork):
    """The work of a rank that has a shard.

    Attributes:
        folder: The folder of the shards.
    """

    folder: Path

    def step(self, batch: Tensor) -> Tensor:
        """Take the place of the module's ``predict_step``. All ranks meet before each layer to exchange halos."""
        bounds, num_ranks = Bounds.read(self.folder), collectives.world_size()
        check_ranks(self.folder, bounds, num_ranks)
        division = Division(bounds, num_ranks)
        *inner, last = self.layers()
        rank_zero_info(f"{len(inner) + 1} layers, one after the other, for {int(bounds.nodes[-1]):,} nodes.")
        shard = Shard.open(self.folder, collectives.rank() % bounds.num_shards)
        channel = open_channel(num_ranks)
        try:
            with drafts.folder_beside(self.folder.resolve()) as folder:  # the disk of the shards has room for rows
                halo = RemoteRows(shard, division, channel, folder, self.budget_bytes)
                graph = halo.graph()
                graph = self.inputs = halo.with_arrays(graph, whole_graph_arrays([*inner, last], graph))
                for index, layer in enumerate(inner):
                    graph = self._next(layer, graph, halo, folder, index)
                self._write_last(last, graph, range(halo.num_own), int(bounds.nodes[-1]))
        finally:
            channel.close()
        return batch

    def _next(self, layer: Layer, graph: Graph, halo: RemoteRows, folder: Path, index: int) -> Graph:
        """Compute a layer; return the graph whose ``x`` is its rows of the own nodes and their halo. Collective."""
        path, file = folder / f"layer-{index}.npy", None
        for nodes, rows in self.compute(layer, graph, range(halo.num_own), None):
            if file is None:
                make(path, halo.num_nodes, rows)
                file = RowFile(path, "a layer")
            file.write(np.arange(nodes.start, nodes.stop), rows)
        assert file is not None
        file.close()
        halo.complete(path)
        (folder / f"layer-{index - 1}.npy").unlink(missing_ok=True)
        return with_x(graph, path)

    def _write_last(self, layer: Layer, graph: Graph, own: range, num_rows: int) -> None:
        if self.path is None:
            for _ in self.compute(layer, graph, own, self.on_rows):
                pass
            return
        n_id = _checked(graph.node_arrays["n_id"][own.start : own.stop].numpy(), num_rows)
        file = self.shared_rows(self.path, num_rows)
        try:
            for nodes, rows in self.compute(layer, graph, own, self.on_rows):
                file.write(n_id[nodes.start : nodes.stop], rows)
            file.publish()
        finally:
            file.discard()


def _checked(n_id: NDArray[np.int64], num_nodes: int) -> NDArray[np.int64]:
    if n_id.min() < 0 or n_id.max() >= num_nodes:
        raise ValueError(
            f"n_id holds {n_id.min()} to {n_id.max()}, but the graph has {num_nodes} nodes: row v of the file is that "
            "of node v. Leave path out, and take the rows by on_rows."
        )
    return n_id
