"""The nodes that a rank computes of a graph that it has at hand, and which these are where every rank has it whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import NamesOfTypes, gathered, names_of_types
from lightning_gnn_dist.batches.one_hop import RowsOfTypes, with_rows
from lightning_gnn_dist.batches.pool import Pool, Widen
from lightning_gnn_dist.batches.source import Content, FileRows, made_of
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.graph import Graph, with_arrays, with_arrays_of_types
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of
from lightning_gnn_dist.graph.storage.mapped import MappedRows, all_maps
from lightning_gnn_dist.graph.typed.names import TypeOffsets, have_names
from lightning_gnn_dist.layers.reach import EDGES_OF_A_NODE, Neighbourhoods
from lightning_gnn_dist.layers.row_table import Ids, RowTables, edges_before, ids_of
from lightning_gnn_dist.layers.through_layers import Layer, whole_graph_arrays
from lightning_gnn_dist.layers.way import Way
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
        offsets: The first id of each node type in the graph by whose ids nodes are told. Default: in this one.
        seed_type: The node type that batches say their seeds are of. Default: the first.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        widen: Widen = True,
        more: Mapping[str, Tensor] = {},  # never changed
        budget_bytes: int | None = None,
        offsets: Sequence[int] | None = None,
        seed_type: str | None = None,
    ) -> None:
        self._graph, self._widen, types = graph, widen, graph.types
        self.offsets = types.offsets if offsets is None else offsets
        self._seed_type = types.node_types[0] if seed_type is None else seed_type
        self._features = [_named(arrays, FEATURES) for arrays in types.node_arrays.values()]
        others = {kind: _named(arrays, arrays.keys() - set(FEATURES)) for kind, arrays in types.node_arrays.items()}
        self._others = with_arrays(with_arrays_of_types(graph, others), more)
        self.bytes_per_edge = max(map(bytes_per_row, types.edge_arrays.values()))
        self.most_rows = graph.num_nodes
        self._files: FileRows | None = None
        if budget_bytes is not None and graph.path is not None and graph.num_bytes > budget_bytes // 2:
            maps = all_maps()  # a look at all maps of the process, so not for every batch
            self._files = FileRows(self._others)
            of_types = [array for arrays in types.node_arrays.values() for array in arrays.values()]
            self._mapped = {id(array): MappedRows(array, maps) for array in of_types}

    def edges_before(self, nodes: Ids) -> Tensor:
        return edges_before(self._graph.indptr, self.rows_at(nodes))

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        numbers = range(len(self._features))
        rows = [self._taken(self._features[number], torch.arange(min(1, self._count(number)))) for number in numbers]
        others = self._others.types.node_arrays.values()
        return max(bytes_per_row(row) + bytes_per_row(more) for row, more in zip(rows, others, strict=True))

    def one_hop(self, nodes: Tensor, rows: RowTables | None, way: Way) -> Any:
        (sample,) = NeighborSampler([-1]).sample_bulk(self._graph, [ids_of(self.rows_at(nodes))], [BatchKey(0, 0, 0)])
        content = Content.of(self._others, sample, self._seed_type)
        if self._files is not None:
            self._files.release()
            batch = self._files.made_of(content, widen=self._widen)
        else:
            batch = made_of(content, widen=self._widen)
        of_types = content.apart.nodes
        inputs = partial(self._inputs, pool=way.pool)
        x = [inputs(*of) for of in enumerate(of_types)] if rows is None else rows.take(self._ids(of_types))
        return batch_of_layer(batch, x, inputs, of_types, way)

    def rows_at(self, nodes: Ids) -> Ids:
        """The places of own nodes in the graph."""
        return nodes

    def _ids(self, of_types: list[Tensor]) -> list[Tensor]:
        """The nodes at some places among those of each type."""
        return [at + start for at, start in zip(of_types, self._graph.types.offsets, strict=False)]

    def _count(self, number: int) -> int:
        offsets = self._graph.types.offsets
        return offsets[number + 1] - offsets[number]

    def _inputs(self, number: int, at: Tensor, pool: Pool | None = None) -> Tensor | None:
        return self._taken(self._features[number], at, pool).get("x")

    def _taken(self, arrays: Mapping[str, Tensor], at: Tensor, pool: Pool | None = None) -> dict[str, Tensor]:
        """Rows of arrays as batches have them."""
        if self._files is not None:
            arrays = {name: self._mapped[id(array)].take(at) for name, array in arrays.items()}
            at = torch.arange(len(at))
        return gathered(arrays, at, lambda _: pool, widen=self._widen)


def batch_of_layer(
    batch: Any,
    rows: RowsOfTypes,
    inputs: Callable[[int, Tensor], Tensor | None],
    of_types: list[Tensor],
    way: Way,
) -> Any:
    """A batch of one hop as a layer reads it.

    Args:
        batch: The batch without features.
        rows: Its rows of each type.
        inputs: Returns input rows of some nodes of a type.
        of_types: Its nodes of each type.
        way: Brings input rows to the device that computes.
    """

    def read(number: int) -> Tensor:
        found = inputs(number, of_types[number])
        if found is None:
            raise AttributeError("x0 is the input rows x, and these nodes have none.")
        return way.inputs(found)

    for number, store in enumerate(batch.node_stores):
        store["batch_size"] = store["num_sampled_nodes"][0]
        store.promise_x0(partial(read, number))
    return with_rows(batch, rows) if any(each is not None for each in rows) else batch


def _named(arrays: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: array for name, array in arrays.items() if name in names}


class WholeNodes(GraphNodes):
    """Cuts the nodes into ranges, one for each rank: of equal work, or for all nodes of one type of equal length.

    Args:
        graph: The graph, which all ranks have alike.
        seeds: The seeds of all ranks, or None for all nodes.
        layers: The layers of the model.
        num_ranks: How many ranks share the work.
        budget_bytes: Bytes that the work may take.
        widen: Make float32 of narrower features, of all or of all but one type.
        seed_type: The node type that batches say their seeds are of. Default: the first.
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
        seed_type: str | None = None,
    ) -> None:
        more = whole_graph_arrays(layers, graph)
        super().__init__(graph, widen=widen, more=more, budget_bytes=budget_bytes, seed_type=seed_type)
        num_layers = len(layers)
        if seeds is None and have_names(graph.types):
            seeds, num_layers = torch.arange(graph.num_nodes), 1  # all layers compute the same nodes
        equal = torch.arange(num_ranks + 1) * graph.num_nodes // num_ranks
        self._starts = equal if seeds is None or num_ranks == 1 else self._divided(seeds, num_layers, num_ranks)

    def own(self, rank: int) -> range:
        """Return the nodes that a rank owns."""
        return range(int(self._starts[rank]), int(self._starts[rank + 1]))

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        return list(nodes.split(torch.searchsorted(nodes, self._starts).diff().tolist()))

    def senders(self, nodes: Ids) -> Tensor:
        return Neighbourhoods(self._graph, 1).senders(ids_of(nodes))

    @property
    def rows(self) -> Graph:
        """The graph."""
        return self._graph

    @property
    def types(self) -> TypeOffsets:
        return self._graph.types

    def ids_in_type(self, kind: int, nodes: Tensor) -> Tensor:
        """The ids of own nodes of a type in that type."""
        return nodes - self.offsets[kind]

    @cached_property
    def names_in_batches(self) -> NamesOfTypes:
        return names_of_types(self._graph.types, widen=self._widen)

    def inputs(self, kind: int, name: str, nodes: Tensor) -> Tensor | None:
        arrays = self._graph.types.node_arrays[self._graph.types.node_types[kind]]
        at = nodes - self.offsets[kind]
        if name == "n_id" and name not in arrays:
            return at
        return self._taken(_named(arrays, (name, name + SUFFIX)), at).get(name)

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


def folder_beside(graph: Graph) -> Path | None:
    """Return where rows go that take too much memory, or None for the system's folder of temporary files."""
    return None if graph.path is None else graph.path.parent
