"""Batches of a memory-mapped graph, assembled without filling the process's memory."""

from __future__ import annotations

from lightning_gnn_dist.batches.assembling import Content, Taken, made_of
from lightning_gnn_dist.batches.batch import LABELS, SampledData
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
        """Make a batch, as :func:`~lightning_gnn_dist.batches.assembling.assemble` does."""
        seeds, edge_ids = sample.nodes[: sample.num_sampled_nodes[0]], sample.edge_ids
        nodes = {
            name: array.take(seeds if name == LABELS and not all_labels else sample.nodes)
            for name, array in self._nodes.items()
        }
        edges = {} if edge_ids is None else {name: array.take(edge_ids) for name, array in self._edges.items()}
        return made_of(Content.of_one_type(sample, Taken(nodes), Taken(edges)), widen=widen)

    def release(self) -> None:
        """Release the pages of edges that sampling has read."""
        for array in self._structure:
            array.release()
