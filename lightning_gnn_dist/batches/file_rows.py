"""Batches of a memory-mapped graph, assembled without filling the process's memory."""

from __future__ import annotations

import torch

from lightning_gnn_dist.batches.batch import Arrays, SampledData, assemble
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows
from lightning_gnn_dist.graph.storage.maps import all_maps


class FileRows:
    """Assembles batches from a graph's files: slower than from its maps, with less memory.

    Args:
        graph: The graph. Those of its arrays that are in RAM are read there.
    """

    def __init__(self, graph: Graph) -> None:
        maps = all_maps()
        self._structure = [MappedRows(graph.indptr, maps), MappedRows(graph.indices, maps)]
        self._nodes = {name: MappedRows(array, maps) for name, array in graph.node_arrays.items()}
        self._edges = {name: MappedRows(array, maps) for name, array in graph.edge_arrays.items()}

    def assemble(self, sample: Sample, *, widen: Widen = True, all_labels: bool = True) -> SampledData:
        """Make a batch, as :func:`~lightning_gnn_dist.batches.batch.assemble` does."""
        rows = Arrays({name: array.take(sample.nodes) for name, array in self._nodes.items()}, {})
        here = sample._replace(nodes=torch.arange(len(sample.nodes)))
        if sample.edge_ids is not None:
            edges = {name: array.take(sample.edge_ids) for name, array in self._edges.items()}
            rows, here = rows._replace(edge_arrays=edges), here._replace(edge_ids=torch.arange(len(sample.edge_ids)))
        batch = assemble(rows, here, widen=widen, all_labels=all_labels)
        if "n_id" not in self._nodes:
            batch.n_id = sample.nodes
        return batch

    def release(self) -> None:
        """Release the pages of edges that sampling has read."""
        for array in self._structure:
            array.release()
