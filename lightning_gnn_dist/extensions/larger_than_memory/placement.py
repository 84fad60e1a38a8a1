"""Where batches are made, in RAM or on the device that trains, and what of a graph lies there: a plan in bytes.

    edges, what they carry, and narrow arrays of nodes  -> on the device if they fit
    rows of wide arrays of nodes, such as features      -> as many as fit into the rest, those that are read most
    all else                                            -> in RAM

Edges come first: without them batches are drawn in RAM, and all but their held rows crosses the bus.

Which rows are read most is known from expected draws from the training nodes, hop by hop:

    r_0(v) = 1 for each training node v,   r_(h+1)(u) = sum over edges u -> v of f(r_h(v)) min(1, s_h / deg v)
    f(r) = B (1 - exp(-r / B)), the batches of B that hold a node which is drawn r times

s_h is the number of neighbours drawn at hop h. Nothing is drawn, so the order is the same in every run.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gnn_dist.batches.batch import LABELS, SampledData, bytes_of, device_of_batch
from lightning_gnn_dist.batches.pool import gather_rows
from lightning_gnn_dist.batches.source import Finish, GraphSource, stream_to
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import KINDS, drawn_there, draws_anywhere
from lightning_gnn_dist.extensions.larger_than_memory.rows_on_device import Crossing, HeldRows, RowsOnDevice
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.memo import memory_of, of_all_graphs
from lightning_gnn_dist.graph.rows import bytes_per_row, senders_by_row
from lightning_gnn_dist.graph.storage.mapped import WINDOW_BYTES, Map, MappedRows, all_maps
from lightning_gnn_dist.graph.typed.types import GraphTypes
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.settings import BatchSettings, SampleOn
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.memory import free_on

LEAST_WIDTH = 32  # bytes; rows of narrower arrays go where the edges are, and where these are in files through the map


def wide_arrays(arrays: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the arrays with rows of at least 32 bytes, but labels, which seeds alone need."""
    return {name: array for name, array in arrays.items() if array[:1].nbytes >= LEAST_WIDTH and name != LABELS}


@dataclass(frozen=True)
class Sizes:
    """Bytes of a graph.

    Args:
        edges: Of edges, of what they carry, and of narrow arrays of nodes.
        widths: Of a row of the wide arrays of each node type.
        rows: Of all rows of wide arrays.
    """

    edges: int
    widths: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, graph: Graph) -> Sizes:
        """Measure a graph."""
        types = graph.types
        widths = tuple(bytes_per_row(wide_arrays(types.node_arrays[kind])) for kind in types.node_types)
        rows = sum(width * types.num_nodes[kind] for width, kind in zip(widths, types.node_types, strict=True))
        return cls(graph.num_bytes - rows, widths, rows)


@dataclass(frozen=True)
class MemoryPlan:
    """What of a graph lies on a device.

    Args:
        sizes: The graph's.
        draws_there: Whether edges and narrow arrays lie there, so that batches are drawn there.
        row_bytes: How many bytes rows of wide arrays may take there.
    """

    sizes: Sizes
    draws_there: bool
    row_bytes: int

    @classmethod
    def of_all(cls, sizes: Sizes) -> MemoryPlan:
        """Return the plan with all on the device."""
        return cls(sizes, draws_there=True, row_bytes=sizes.rows)

    @classmethod
    def within(cls, room: int, sizes: Sizes, *, draws: bool) -> MemoryPlan:
        """Return the plan for a number of bytes; ``draws`` says whether any sampler can draw on a device."""
        draws_there = draws and sizes.edges <= room
        return cls(sizes, draws_there, max(0, min(sizes.rows, room - sizes.edges * draws_there)))

    @property
    def holds_all_rows(self) -> bool:
        return self.row_bytes >= self.sizes.rows

    @property
    def is_all_there(self) -> bool:
        return self.draws_there and self.holds_all_rows

    @property
    def is_all_in_ram(self) -> bool:
        widths = [width for width in self.sizes.widths if width]
        return not self.draws_there and (not widths or self.row_bytes < min(widths))

    @property
    def num_bytes(self) -> int:
        """Bytes that all of it takes on the device, at most."""
        return self.sizes.edges * self.draws_there + self.row_bytes


def expected_reads(graph: Graph, sampler: Sampler, batch_size: int) -> Tensor:
    """Return how many batches of a pass over the training nodes are expected to hold each node: float64, shape (N,).

    A graph without training nodes, as of links, counts all nodes. Of a sampler that is no ``NeighborSampler``, one
    neighbour a hop is counted, and neighbours that are drawn by weight count as equally likely.
    """
    marked = list(graph.types.splits("train").values())
    seeds = torch.cat(marked) if marked else torch.arange(0)
    seeds = seeds if len(seeds) else torch.arange(graph.num_nodes)
    num_batches = max(1, -(-len(seeds) // batch_size))
    drawn = torch.zeros(graph.num_nodes, dtype=torch.float64)
    drawn[seeds] = 1.0
    total, held = drawn.clone(), drawn
    for size in per_hop(sampler, graph.types):
        drawn = _senders_drawn(graph, held, size)
        held = _batches_with(drawn, num_batches)
        total += drawn
    return _batches_with(total, num_batches)


def most_read(reads: Tensor, types: GraphTypes, widths: Sequence[int], room: int) -> list[Tensor]:
    """Return the nodes that are read most of those whose rows fit into ``room`` bytes together.

    Args:
        reads: How often each node is read.
        types: Those of the graph.
        widths: Bytes of a row of each node type. Types with 0 are left out.
        room: Bytes.

    Returns:
        For each node type ids in it, increasing.
    """
    order = reads.argsort(descending=True, stable=True)
    width = torch.tensor(widths)[types.type_of(order)]
    order, width = order[width > 0], width[width > 0]
    chosen = order[width.cumsum(0) <= room].sort().values
    bounds = torch.searchsorted(chosen, torch.tensor(types.offsets)).tolist()
    ends = zip(bounds[:-1], bounds[1:], types.offsets[:-1], strict=True)
    return [chosen[first:last] - start for first, last, start in ends]


def per_hop(sampler: Sampler, types: GraphTypes) -> list[int]:
    """Return how many neighbours of a node are drawn in each hop, -1 for all: 1 if it is no ``NeighborSampler``."""
    if not isinstance(sampler, NeighborSampler):
        return [1] * sampler.num_hops
    return [-1 if (numbers < 0).any() else int(numbers.sum()) for numbers in sampler.of_types(types)]


def _batches_with(drawn: Tensor, num_batches: int) -> Tensor:
    return -num_batches * torch.expm1(-drawn / num_batches)


def _senders_drawn(graph: Graph, held: Tensor, size: int) -> Tensor:
    """Return how often nodes are drawn as senders to nodes that so many batches hold."""
    share = held if size < 0 else held * (size / graph.degrees().clamp(min=1)).clamp(max=1.0)
    drawn = torch.zeros_like(held)
    for rows, senders in senders_by_row(graph.indptr, graph.indices):
        drawn.index_add_(0, senders, share[rows])
    return drawn


log = logging.getLogger(__name__)

MOST_OF_FREE = 0.5  # share of the memory free without them that all graphs on a device may take

COPIES = "copies on devices"  # remembered for the graph in RAM, so they are freed together with it


class Place(NamedTuple):
    """Where the batches of a graph are made.

    Attributes:
        graph: The graph that is sampled, in RAM or on the device.
        sampler: Draws the same batches from it.
        rows: Makes batches of what was drawn, where wide rows are placed apart from the edges.
    """

    graph: Graph
    sampler: Sampler
    rows: RowsOnDevice | None = None


class Placed:
    """What of a graph lies on a device; it must not refer to the graph, which would then never be freed.

    Args:
        plan: Says what.
        rows: The rows of wide arrays. None where all stays in RAM.
    """

    def __init__(self, plan: MemoryPlan, rows: RowsOnDevice | None) -> None:
        self.plan, self.rows = plan, rows
        self.copy: Graph | None = None  # of edges and narrow arrays, and of all if there is room for it

    @property
    def num_bytes(self) -> int:
        """Bytes on the device now."""
        return (0 if self.copy is None else self.plan.sizes.edges) + (0 if self.rows is None else self.rows.num_bytes)


@dataclass(frozen=True)
class Placement:
    """Decides what of a graph lies on the device that trains, and where its batches are made.

    Args:
        device: The device that trains.
        sample_on: ``"device"`` for all on that device, ``"cpu"`` for RAM; ``"auto"``, if it is a GPU, for as much of
            the graph as there is room for.
        device_bytes: What all graphs may take there. Default: half of the memory that is free without them.
        samplers: All samplers of the run, that of training batches first. If one can draw on the device, edges are
            placed there before rows.
        batch_size: Seeds of a training batch, which with its sampler decides which rows are placed first.
        free_bytes: Returns how many bytes of a device are free.
        expected_bytes: Bytes of the room that are left for graphs still to come.
        crossing: Counts what batches bring to the device.
    """

    device: torch.device
    sample_on: SampleOn
    device_bytes: int | None = None
    samplers: tuple[Sampler, ...] = ()
    batch_size: int = 1024
    free_bytes: Callable[[torch.device], int] = free_on
    expected_bytes: int = 0
    crossing: Crossing = field(default_factory=Crossing)

    def of(self, graph: Graph, sampler: Sampler) -> Place:
        """The graph or what of it lies on the device, and a sampler that draws the same batches from it."""
        if self.sample_on == "device" and self.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f'sample_on="device" draws on CUDA devices, and this trainer computes on {self.device.type}: leave it '
                'out, or give sample_on="cpu".'
            )
        is_placed = self.sample_on == "device" or (self.sample_on == "auto" and self.device.type == "cuda")
        if not is_placed or isinstance(sampler, WholePartSampler):  # whose one batch is copied once
            return Place(graph, sampler)
        with memory_of(graph) as known:
            placed: Placed = self._placed(graph, sampler, known.setdefault(COPIES, {}))
            if not (placed.plan.draws_there and draws_anywhere(sampler)):
                return Place(graph, sampler, placed.rows)
            rows = None if placed.plan.is_all_there else placed.rows
            return Place(self._copy(graph, placed), drawn_there(sampler, graph), rows)

    def _placed(self, graph: Graph, sampler: Sampler, on_devices: dict[torch.device, Placed]) -> Placed:
        if self.device not in on_devices:
            plan = self._plan(graph, sampler)
            on_devices[self.device] = Placed(plan, None if plan.is_all_in_ram else self._rows(graph, sampler, plan))
        return on_devices[self.device]

    def _plan(self, graph: Graph, sampler: Sampler) -> MemoryPlan:
        sizes = Sizes.of(graph)
        if self.sample_on == "device":
            return MemoryPlan.of_all(sizes)
        draws = not graph.types.have_names and any(map(draws_anywhere, (sampler, *self.samplers)))
        room = self._room()
        plan = MemoryPlan.within(room, sizes, draws=draws)
        if plan.is_all_in_ram:
            told = sizes.edges / 1e6, sizes.rows / 1e6, max(0, room) / 1e6, self.device
            log.info("Batches come from RAM: edges take %.1f MB, rows %.1f MB, and they may take %.1f MB on %s.", *told)
        return plan

    def _room(self) -> int:
        """Return how many bytes are left on the device for a graph."""
        others: list[Placed] = [on[self.device] for on in of_all_graphs(COPIES) if self.device in on]
        limit = self.device_bytes
        if limit is None:
            free = self.free_bytes(self.device) + sum(placed.num_bytes for placed in others)
            limit = int(MOST_OF_FREE * free)
        return limit - max(self.expected_bytes, sum(placed.plan.num_bytes for placed in others))

    def _rows(self, graph: Graph, sampler: Sampler, plan: MemoryPlan) -> RowsOnDevice:
        types, maps = graph.types, all_maps()
        arrays = [wide_arrays(types.node_arrays[kind]) for kind in types.node_types]
        chosen: Sequence[Tensor | None] = [None] * len(arrays)
        if not plan.holds_all_rows:
            reads = expected_reads(graph, (*self.samplers, sampler)[0], self.batch_size)
            chosen = most_read(reads, types, plan.sizes.widths, plan.row_bytes)
        told = self.device, "all" if plan.holds_all_rows else "the most read", plan.row_bytes / 1e6
        log.info("On %s lie %s rows of features: %.1f MB.", *told)
        with self._open() as device:
            of_types = [
                HeldRows(of, ids, {name: _brought(array, device, maps, ids) for name, array in of.items()})
                for of, ids in zip(arrays, chosen, strict=True)
            ]
        names = [(kind, [*types.node_arrays[kind]]) for kind in types.node_types]
        return RowsOnDevice(device, names, of_types, self.crossing)

    def _copy(self, graph: Graph, placed: Placed) -> Graph:
        if placed.copy is None:
            assert placed.rows is not None
            with self._open() as device:
                placed.copy = _moved(graph, device, placed.rows.of_types[0], with_rows=placed.plan.is_all_there)
            where = "all of it" if placed.plan.is_all_there else "its edges and narrow arrays"
            log.info("Batches are drawn on %s, from %s: %.1f MB.", self.device, where, placed.num_bytes / 1e6)
        return placed.copy

    @contextmanager
    def _open(self) -> Iterator[torch.device]:
        """Copies are made in the block, on the stream that will read them."""
        stream = stream_to(self.device)
        with nullcontext() if stream is None else stream.open():
            yield self.device if stream is None else stream.device


def release(graph: Graph) -> None:
    """Drop what of a graph lies on devices; the graph in RAM stays."""
    with memory_of(graph) as known:
        known.pop(COPIES, None)


def _moved(graph: Graph, device: torch.device, rows: HeldRows, *, with_rows: bool) -> Graph:
    """Copy the edges and narrow arrays of a graph without types; with the rows that are there already, if asked."""
    maps = all_maps()
    indptr, indices = (_brought(array, device, maps) for array in (graph.indptr, graph.indices))
    narrow = {name: array for name, array in graph.node_arrays.items() if name not in rows.arrays}
    nodes = {name: _brought(array, device, maps) for name, array in narrow.items()} | (rows.held if with_rows else {})
    edges = {name: _brought(array, device, maps) for name, array in graph.edge_arrays.items()}
    in_order = {name: nodes[name] for name in graph.node_arrays if name in nodes}
    # A copy is never asked for its fingerprint.
    return typed_graph(indptr, indices, GraphTypes.of_one(indptr, indices, in_order, edges))


def _brought(array: Tensor, device: torch.device, maps: list[Map], ids: Tensor | None = None) -> Tensor:
    """The array, or some of its rows, on the device. Of a mapped array, no more than a window is in RAM at a time."""
    source = MappedRows(array, maps)
    if not source.is_read_from_file and ids is None:
        return array.to(device)
    rows_at_once = max(1, WINDOW_BYTES // max(1, array[:1].nbytes))
    num_rows = len(array) if ids is None else len(ids)
    out = torch.empty((num_rows, *array.shape[1:]), dtype=array.dtype, device=device)
    for to, first in zip(out.split(rows_at_once), range(0, num_rows, rows_at_once), strict=False):
        piece = slice(first, first + rows_at_once)
        to.copy_(array[piece] if ids is None else array.index_select(0, ids[piece]))
        source.release()
    return out


class RowsOnDevices:
    """Lets as much of a graph lie on the device that trains as there is room for, or all of it.

    Attributes:
        crossing: Counts what crosses the bus.
    """

    def __init__(self) -> None:
        self.crossing = Crossing()

    @classmethod
    def of(cls, settings: BatchSettings, graph: Graph) -> Self:
        """Return what ``Loading(sample_on="auto")`` or ``"device"`` asks for."""
        return cls()

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log."""
        return self.crossing.figures

    @staticmethod
    def check(*samplers: Sampler | None) -> None:
        """Refuse samplers that cannot draw on a device where they have to. None is skipped."""
        for sampler in samplers:
            if sampler is not None and not draws_anywhere(sampler):
                raise ValueError(
                    f'sample_on="device" needs a sampler that draws there ({KINDS}), got {sampler!r}: choose one, or '
                    'sample_on="auto".'
                )

    def source(self, home: LocalGraph, graph: Graph, sampler: Sampler, finish: Finish | None) -> GraphSource:
        """Return the source of batches of a part or of the whole graph."""
        settings, loading = home.running.settings, home.running.settings.loading
        # The part takes device memory first, though it may be loaded later; it is no larger than the whole graph.
        is_fit, samplers = home.running.stage == TrainerFn.FITTING, settings.samplers
        waits = graph is home.graph and is_fit and home.is_cut and not isinstance(samplers[0], WholePartSampler)
        placement = Placement(
            home.running.device,
            loading.sample_on,
            loading.device_bytes,
            samplers=samplers,
            batch_size=settings.batch_size,
            expected_bytes=graph.num_bytes if waits else 0,
            crossing=self.crossing,
        )
        how = home.running.options_of_sources
        return PlacedSource(graph, sampler, placement=placement, finish=finish, **how)

    def close(self, graph: Graph) -> None:
        """Drop what of the graph lies on devices, and count anew."""
        release(graph)
        self.crossing = Crossing()


class PlacedSource(GraphSource):
    """Makes the batches that a :class:`GraphSource` would make, where a placement says.

    Args:
        placement: Decides at the first batch where the graph is sampled, by which sampler, and where its rows lie,
            until the source is closed.
    """

    is_short = True  # of memory: that of a device, where full neighbourhoods are large

    def __init__(self, graph: Graph, sampler: Sampler, *, placement: Placement, **options: Any) -> None:
        super().__init__(graph, sampler, **options)
        self._placement, self._lock = placement, threading.Lock()
        self._place: Place | None = None

    def close(self) -> None:
        super().close()
        self._place = None

    def _where(self) -> tuple[Graph, Sampler]:
        with self._lock:  # several threads ask for the first batches
            if self._place is None:
                self._place = self._placement.of(self._graph, self._sampler)
            return self._place.graph, self._place.sampler

    def _assembled(self, graph: Graph, samples: Sequence[Sample]) -> list[SampledData]:
        rows = None if self._place is None else self._place.rows
        if rows is None or any(sample.is_constant for sample in samples):
            batches = super()._assembled(graph, samples)
            if self._stream is not None:
                here = [batch for batch in batches if device_of_batch(batch).type == "cpu"]
                self._placement.crossing.add(sum(map(bytes_of, here)))
            return batches
        how: Any = {"widen": self._widen, "all_labels": self._all_labels}
        return rows.batches(graph, samples, self._gather, **how)

    def _gather(self, kind: Any, name: str, array: Tensor, rows: Tensor) -> Tensor:
        return gather_rows(array, rows, self._pool_of(f"{kind} {name}"))
