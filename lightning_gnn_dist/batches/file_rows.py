"""Batches of a memory-mapped graph, assembled without filling the process's memory."""

from __future__ import annotations

from lightning_gnn_dist.batches.assembling import Content, Taken, made_of
from lightning_gnn_dist.batches.batch import LABELS, SampledData
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows, all_maps


class FileRows:
    """Assembles batches from a graph's files: slower than from its maps, with less memory.

    Args:
        graph: The graph. Those of its arrays that are in RAM are read there.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph, types, maps = graph, graph.types, all_maps()
        self._structure = [MappedRows(array, maps) for array in (graph.indptr, graph.indices, types.edge_type)]
        of_types = [*types.node_arrays.values(), *types.edge_arrays.values()]
        self._files = {id(array): MappedRows(array, maps) for arrays in of_types for array in arrays.values()}

    def assemble(self, sample: Sample, *, widen: Widen = True, all_labels: bool = True) -> SampledData:
        """Make a batch, as :func:`~lightning_gnn_dist.batches.assembling.assemble` does."""
        return self.made_of(Content.of(self._graph, sample), widen=widen, all_labels=all_labels)

    def made_of(self, content: Content, *, widen: Widen = True, all_labels: bool = True) -> SampledData:
        """Make a batch of what is taken of the graph's arrays."""
        num_labels = [None if all_labels else per_hop[0] for per_hop in content.apart.num_sampled]
        nodes = [self._read(*taken) for taken in zip(content.nodes, num_labels, strict=True)]
        content = content._replace(nodes=nodes, edges=[self._read(taken) for taken in content.edges])
        return made_of(content, widen=widen, all_labels=all_labels)

    def _read(self, taken: Taken, num_labels: int | None = None) -> Taken:
        """Return the rows that a batch takes of the arrays of a type."""
        rows = taken.rows
        if rows is None:
            return taken
        read = {
            name: self._files[id(array)].take(rows[:num_labels] if name == LABELS else rows)
            for name, array in taken.arrays.items()
        }
        return Taken(read)

    def release(self) -> None:
        """Release the pages of edges that sampling has read."""
        for array in self._structure:
            array.release()
