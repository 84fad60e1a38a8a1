"""The nodes that a rank computes of a graph that every rank has, which may lie in files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.batches.source import Content, Taken
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows, all_maps
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.layers.layer_pass import GraphNodes, divided, takes_many_pages
from lightning_gnn_dist.layers.through_layers import Layer, whole_graph_arrays


class FileNodes(GraphNodes):
    """Cuts the nodes into ranges, one for each rank: of equal work, or for all nodes of one type of equal length.

    Of a graph in files no pages are kept in memory, if they would take too much.

    Args:
        graph: The graph, which all ranks have alike.
        seeds: The seeds of all ranks, or None for all nodes.
        layers: The layers of the model.
        num_ranks: How many ranks share the work.
        budget_bytes: Bytes that the work may take.
        options: What :class:`GraphNodes` take.
    """

    def __init__(
        self,
        graph: Graph,
        seeds: Tensor | None,
        layers: Sequence[Layer],
        num_ranks: int,
        budget_bytes: int,
        **options: Any,
    ) -> None:
        num_layers, starts = len(layers), torch.arange(num_ranks + 1) * graph.num_nodes // num_ranks
        if seeds is None and have_names(graph.types):
            seeds, num_layers = torch.arange(graph.num_nodes), 1  # all layers compute the same nodes
        if seeds is not None:
            starts = divided(graph, seeds, num_layers, num_ranks)
        super().__init__(graph, starts, more=whole_graph_arrays(layers, graph), **options)
        self._ranges = starts
        self._mapped: dict[int, MappedRows] | None = None
        if takes_many_pages(graph, budget_bytes):
            maps, types, others = all_maps(), graph.types, self._others.types  # a look at maps: not for every batch
            of_types = [*types.node_arrays.values(), *others.node_arrays.values(), *others.edge_arrays.values()]
            self._mapped = {id(array): MappedRows(array, maps) for arrays in of_types for array in arrays.values()}
            self._edges = [MappedRows(array, maps) for array in (graph.indptr, graph.indices, types.edge_type)]

    def own(self, rank: int) -> range:
        """Return the nodes that a rank owns."""
        return range(*self._ranges[rank : rank + 2].tolist())

    def _made(self, content: Content) -> Any:
        if self._mapped is not None:
            for array in self._edges:
                array.release()  # the pages that drawing has read
            nodes, edges = ([self._read(of) for of in of_types] for of_types in (content.nodes, content.edges))
            content = content._replace(nodes=nodes, edges=edges)
        return super()._made(content)

    def _read(self, taken: Taken) -> Taken:
        """Return the rows that a batch takes of the arrays of a type."""
        if taken.rows is None or self._mapped is None:
            return taken
        return Taken({name: self._mapped[id(array)].take(taken.rows) for name, array in taken.arrays.items()})

    def _taken(self, arrays: Mapping[str, Tensor], at: Tensor, pool: Pool | None = None) -> dict[str, Tensor]:
        if self._mapped is not None:
            arrays = {name: self._mapped[id(array)].take(at) for name, array in arrays.items()}
            at = torch.arange(len(at))
        return super()._taken(arrays, at, pool)


def folder_beside(graph: Graph) -> Path | None:
    """Return where rows go that take too much memory, or None for the system's folder of temporary files."""
    return None if graph.path is None else graph.path.parent
