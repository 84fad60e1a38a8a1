"""A pass over the layers of a model whose rows lie on the device that computes, in RAM or in files, wherever is room.

How large a batch may be is learned from those before it. It is the engine of evaluations beyond memory, of predictions
of all nodes, and of the rows that parts keep of nodes outside them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.batches.pool import Pool
from lightning_gnn_dist.batches.source import Content, Taken
from lightning_gnn_dist.extensions.passes.row_table import Room, RowTables, WayAndBack, fetch_rows, kept
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage.mapped import MappedRows, all_maps
from lightning_gnn_dist.homes.run import halved
from lightning_gnn_dist.layers.layer_pass import (
    FOR_A_TABLE,
    GraphNodes,
    Ids,
    LayerNodes,
    LayerPass,
    Work,
    by_type,
    bytes_foreseen,
    divided,
    edges_before,
    ids_of,
    takes_many_pages,
)
from lightning_gnn_dist.layers.through_layers import Layer, ModelLayers, whole_graph_arrays
from lightning_gnn_dist.wire.channel import Channel
from lightning_gnn_dist.wire.memory import free_on, held_bytes, peak_bytes, reset_peak

_FIRST = 4  # the first batch takes this part of what others may
_MEASURABLE = 4 << 20  # bytes; what smaller batches take is lost in what an allocator keeps
_LEAST_FACTOR = 0.1


def bytes_there(wanted: int | None, device: torch.device) -> int:
    """Return the bytes of its own memory that a device may be asked for: ``wanted``, halved until it is at most half of
    what is free there now. By default it is that half; of a device without memory of its own, 0.
    """
    if device.type != "cuda":
        return 0
    free = free_on(device)
    return halved(free // 2 if wanted is None else wanted, free)


class Memory(NamedTuple):
    """A memory of which it is known how much is held.

    Attributes:
        held: Returns the bytes that are held; None where nobody says it.
        peak: Returns the most that have been held since ``reset_peak``; None where nobody says it.
        reset_peak: Counts the peak from now on. False where that is not possible.
    """

    held: Callable[[], int | None]
    peak: Callable[[], int | None]
    reset_peak: Callable[[], bool]

    @classmethod
    def of_device(cls, device: torch.device) -> Memory:
        """Return that of a CUDA device: what tensors take, launched or done, so that nobody waits for the device."""
        held, peak = torch.cuda.memory_allocated, torch.cuda.max_memory_allocated
        reset = torch.cuda.reset_peak_memory_stats
        return cls(partial(held, device), partial(peak, device), lambda: reset(device) is None)


RAM = Memory(held_bytes, peak_bytes, reset_peak)


class Forecast:
    """Learns how many bytes a batch takes for each byte that was foreseen for it.

    A batch took at least what the process has grown by since the batch began, and at most what it has grown by since
    the work began: an allocator keeps much of what is freed, and uses it again. So a small batch after large ones tells
    little, and one with which the process holds more than ever before, and more than it may, was too large.

    Args:
        most_bytes: Bytes that a batch may take.
        memory: Where it takes them.
    """

    def __init__(self, most_bytes: float, memory: Memory = RAM) -> None:
        self._most, self._factor, self._is_first = most_bytes, 1.0, True
        self._memory, self._base, self._highest = memory, memory.held(), 0

    @property
    def allowed(self) -> float:
        """The bytes that may be foreseen for the next batch."""
        return self._most / self._factor / (_FIRST if self._is_first else 1)

    def begin(self) -> None:
        """Note that a batch begins."""
        self._before = self._memory.held() if self._memory.reset_peak() else None

    def end(self, foreseen: float, held_by_tables: int) -> None:
        """Note what a batch was foreseen to take, and how many bytes tables of rows take beside it."""
        self._is_first = False
        peak = self._memory.peak()
        if peak is not None and self._base is not None and self._before is not None and foreseen > _MEASURABLE:
            least, most = peak - self._before, peak - self._base - held_by_tables
            fitting = min(max(self._factor, least / foreseen), most / foreseen)
            if most > max(self._most, self._highest):
                fitting = max(fitting, self._factor * most / self._most)
            self._highest = max(self._highest, most)
            self._factor = max(fitting, self._factor / 2, _LEAST_FACTOR)  # so batches grow step by step

    def was_too_much(self, foreseen: float) -> None:
        """Note that memory was short for a batch: from now on, half of it is the most."""
        self._most = min(self._most, foreseen * self._factor) / 2


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
        if seeds is None and graph.types.have_names:
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

    def _taken(self, name: str, array: Tensor, at: Tensor, pool: Pool | None = None) -> Tensor:
        if self._mapped is not None:
            array, at = self._mapped[id(array)].take(at), torch.arange(len(at))
        return super()._taken(name, array, at, pool)


def folder_beside(graph: Graph) -> Path | None:
    """Return where rows go that take too much memory, or None for the system's folder of temporary files."""
    return None if graph.path is None else graph.path.parent


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

    def plan_of_own(self, own: Ids, num_layers: int, kind: int) -> None:
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

    def last_rows(self, layers: Sequence[Layer], on_rows: OnRows | None, kind: int) -> Iterator[tuple[Tensor, Tensor]]:
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
