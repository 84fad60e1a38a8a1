"""A pass over the layers of a model whose rows lie on the device that computes, in RAM or in files, wherever is room.

How large a batch may be is learned from those before it. It is the engine of evaluations beyond memory, of predictions
of all nodes, and of the rows that parts keep of nodes outside them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.extensions.passes.forecast import RAM, Forecast, Memory, bytes_there
from lightning_gnn_dist.extensions.passes.nodes import FileNodes, folder_beside
from lightning_gnn_dist.extensions.passes.row_table import Room, RowTables, fetch_rows, kept
from lightning_gnn_dist.extensions.passes.way import WayAndBack
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.layers.layer_pass import (
    FOR_A_TABLE,
    GraphNodes,
    Ids,
    LayerNodes,
    LayerPass,
    Work,
    by_type,
    bytes_foreseen,
    edges_before,
    ids_of,
)
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.layers.through_layers import Layer
from lightning_gnn_dist.wire.channel import Channel

_FOR_A_BATCH = 0.4  # of the budget; pages of files and what an allocator keeps come on top
_UNDER_WAY = 0.1  # of the budget: what is on its way to the device, and what is on its way back
_FOR_A_LIST = 0.02  # of the budget: the ids of nodes
_SHORT = ("can't allocate memory", "not enough memory")  # what torch says where the system gives it no memory

OnRows = Callable[[Any, Tensor], object]
Told = Callable[[Any, RowsOfTypes], object]


class FarPass(LayerPass):
    """A pass that keeps to a budget of bytes. All ranks make it together.

    Args:
        nodes: The nodes of this rank.
        channel: The ranks that share the work.
        work: How rows are computed.
        norm: The name of a layer that needs the rows of all nodes in one batch, or None.
        folder: Where rows go that take more, or None for the system's folder of temporary files.
    """

    _way: WayAndBack

    def __init__(
        self, nodes: GraphNodes, channel: Channel, work: Work, norm: str | None = None, folder: Path | None = None
    ) -> None:
        super().__init__(nodes, channel, work, norm)
        self._folder = folder
        self._rows: Callable[[], RowTables | None] = lambda: None  # of the layer that is computed, if they are kept

    def plan_of_own(self, own: Ids, num_layers: int, kind: int = 0) -> None:
        """Plan for rows of all nodes of a type behind the last layer, each on its owner. Collective.

        The layers before the last are alike, so nodes are listed once: as a range, or where they take much memory in a
        file.
        """
        held, wanted, told = own, ids_of(own[:0]), list[Tensor]()
        if self.channel.size > 1:
            held = self._kept(self.nodes.senders(own))
            wanted = self._kept(held[~_are_in(held, own)])
            told = [self._kept(nodes) for nodes in self.channel.exchange(self.nodes.by_owner(wanted))]
        self._bytes_in = self.nodes.prepare(held, wanted[:0])
        last = by_type(own, self.nodes.offsets)[kind]
        self.planned = [LayerNodes(of, wanted, told, held) for of in [*[own] * (num_layers - 1), last]]

    def _kept(self, nodes: Tensor) -> Tensor:
        return kept(nodes, int(_FOR_A_LIST * self.work.budget_bytes), self._folder)

    def last_rows(
        self, layers: Sequence[Layer], on_rows: OnRows | None, kind: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute the layers; yield nodes and rows of each batch of the last one, which nobody keeps. Collective.

        Args:
            layers: The layers, as many as were planned.
            on_rows: Called with each batch of the last layer and the rows of its seeds, on the device.
            kind: Which of the types the nodes of the last layer are of.
        """
        before = None
        for found in self.tables(layers[:-1]):
            before = found
        self.says, self._rows = f"Layer {len(layers) - 1} of layers()", lambda: None

        def told(batch: Any, rows: RowsOfTypes) -> None:
            if (of_kind := rows[kind]) is None:
                kind_of_seeds = batch.node_types[kind]
                raise TypeError(f"The last layer of layers() returned no rows of the seeds' type, {kind_of_seeds!r}.")
            if on_rows is not None:
                on_rows(batch, of_kind)

        back = self._way.back()
        for nodes, rows in self._batches(layers[-1], self.planned[-1].nodes, before, told):
            of_kind = rows[kind]
            assert of_kind is not None
            yield from back.send(nodes, of_kind)
        yield from back.rest()

    def _begin(self) -> None:
        device, in_ram = self.work.device, self.work.budget_bytes
        there = bytes_there(self.work.bytes_there, device)
        self._least_bytes = min(in_ram, there or in_ram)
        self._way = WayAndBack(device, self.work.dtype, int(_UNDER_WAY * self._least_bytes))
        self._room = Room(int(FOR_A_TABLE * in_ram), self._folder, self._way, int(FOR_A_TABLE * there))
        self._forecasts = [Forecast(_FOR_A_BATCH * in_ram, RAM)]
        if there:
            self._forecasts.append(Forecast(_FOR_A_BATCH * there, Memory.of_device(device)))

    def _new_rows(self, ids: Sequence[Ids]) -> RowTables:
        rows = RowTables(ids, self._room, self.says)
        self._rows = weakref.ref(rows)
        return rows

    def _batches(
        self, layer: Layer, nodes: Ids, before: Any, told: Told = lambda *_: None
    ) -> Iterator[tuple[Tensor, RowsOfTypes]]:
        """Yield the nodes of each batch of a layer, and their rows by types, on the device."""
        bytes_in, written = self._bytes_in if before is None else before.bytes_of_row, 0
        start, bytes_out, edges = 0, bytes_in, edges_before(self.nodes, nodes)
        while start < len(nodes):
            foreseen = partial(bytes_foreseen, self.nodes, edges, bytes_in, bytes_out, start)
            allowed = min(each.allowed for each in self._forecasts)
            stop = self._stop(foreseen, start, len(nodes), allowed, self._least_bytes)
            for each in self._forecasts:
                each.begin()
            some = ids_of(nodes[start:stop])
            try:
                batch, outputs = self._outputs(layer, some, before)
            except (MemoryError, RuntimeError) as error:
                if stop - start == 1 or self.norm is not None or not _is_short_of_memory(error):
                    raise
                for each in self._forecasts:
                    each.was_too_much(foreseen(stop))
                continue
            told(batch, outputs)
            self._way.launched(batch)
            del batch  # otherwise two batches would be held while the next is made
            yield some, outputs
            written += sum(rows.nbytes for rows in outputs if rows is not None)
            for each, held in zip(self._forecasts, self._held(before, written), strict=False):
                each.end(foreseen(stop), held)
            start, bytes_out = stop, max((rows[:1].nbytes for rows in outputs if rows is not None), default=0)
            del outputs

    def _held(self, before: RowTables | None, written: int) -> tuple[int, int]:
        """The bytes that tables take in RAM, and on the device that computes."""
        ram, there = (0, 0) if before is None else (before.bytes_in_ram, before.bytes_there)
        if (rows := self._rows()) is not None:
            ram, there = ram + written * (rows.bytes_in_ram > 0), there + rows.bytes_there
        return ram, there

    def _fetch(self, table: Any, asked: list[Tensor], told: list[Tensor]) -> None:
        fetch_rows(self.channel, asked, told, table.take, table, self.work.budget_bytes)


def beyond_memory(graph: Graph, seeds: Tensor, model: ModelLayers, channel: Channel, work: Work) -> FarPass:
    """Return a pass over a graph that every rank has, for the seeds of all ranks.

    Args:
        graph: The graph.
        seeds: The seeds of all ranks.
        model: The layers.
        channel: The ranks that share the work.
        work: How rows are computed.
    """
    nodes = FileNodes(graph, seeds, model.layers, channel.size, work.budget_bytes, widen=work.widen)
    return FarPass(nodes, channel, work, model.norm, folder_beside(graph))


def _are_in(nodes: Tensor, own: Ids) -> Tensor:
    if isinstance(own, range):
        return (nodes >= own.start) & (nodes < own.stop)
    return torch.isin(nodes, own, assume_unique=True)


def _is_short_of_memory(error: Exception) -> bool:
    is_short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_short or any(words in str(error) for words in _SHORT)
