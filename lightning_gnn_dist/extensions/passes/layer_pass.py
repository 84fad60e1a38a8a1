"""Each layer of a model computed once for the nodes that some seeds need, the work shared by all ranks.

    plan:     seeds -> nodes that the last layer computes -> their senders -> nodes that the layer before computes ...
    compute:  layer l of the own nodes -> rows that other ranks named in the plan are sent there -> layer l + 1

A rank computes the nodes that it owns, so that no row is computed twice, and holds rows of those that it needs. It is
the one engine of evaluations, of predictions of all nodes, and of the rows that parts keep of nodes outside them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.extensions.passes.forecast import RAM, Forecast, Memory, bytes_there
from lightning_gnn_dist.extensions.passes.row_table import (
    Ids,
    Room,
    RowTables,
    by_types,
    fetch_rows,
    ids_by_type,
    kept,
)
from lightning_gnn_dist.extensions.passes.way import WayAndBack
from lightning_gnn_dist.layers.layer_pass import (
    FOR_A_TABLE,
    LayerNodes,
    Owned,
    Progress,
    Sized,
    Way,
    Work,
    agreed_forms,
    bytes_foreseen,
    check_all_at_once,
    ids_of,
    outputs_of,
    planned,
)
from lightning_gnn_dist.layers.through_layers import Layer
from lightning_gnn_dist.wire.channel import Channel

_FOR_A_BATCH = 0.4  # of the budget; pages of files and what an allocator keeps come on top
_UNDER_WAY = 0.1  # of the budget: what is on its way to the device, and what is on its way back
_FOR_A_LIST = 0.02  # of the budget: the ids of nodes
_SHORT = ("can't allocate memory", "not enough memory")  # what torch says where the system gives it no memory

OnRows = Callable[[Any, Tensor], object]
Told = Callable[[Any, RowsOfTypes], object]


class NodesOfRank(Sized, Owned, Protocol):
    """The part of a graph that a rank computes rows for.

    Attributes:
        offsets: The first id of each node type, and at the end the number of all nodes.
    """

    @property
    def offsets(self) -> Sequence[int]: ...

    def edges_before(self, nodes: Ids) -> Tensor:
        """How many edges lead to the own nodes before each of these, and before the end of them, but for a constant."""
        ...

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        """Have the input rows of these nodes and seeds at hand; return the bytes of one. Collective."""
        ...

    def one_hop(self, nodes: Tensor, rows: RowTables | None, way: Way) -> Any:
        """A batch of own nodes with all their in-neighbours. Its ``x`` are ``rows``, or the input rows.

        It is made in RAM, but for rows that lie on the device. Its ``x0`` are the input rows, which ``way`` brings to
        the device when they are read.
        """
        ...


@dataclass
class LayerPass:
    """One pass over the layers of a model. All ranks make it together.

    Attributes:
        nodes: The nodes of this rank.
        channel: The ranks that share the work.
        work: How rows are computed.
        folder: Where rows go that take more, or None for the system's folder of temporary files.
        whole: The name of a layer that needs the rows of all nodes in one batch, or None.
    """

    nodes: NodesOfRank
    channel: Channel
    work: Work
    folder: Path | None = None
    whole: str | None = None
    says: str = "Layer 0 of layers()"

    def plan(self, seeds: Tensor, num_layers: int) -> list[LayerNodes]:
        """Return, for each layer, the nodes that lead to the last one's rows of this rank's seeds. Collective.

        The seeds increase.
        """
        return self.plan_all([seeds[:0]] * (num_layers - 1) + [seeds])

    def plan_all(self, wanted_of_layers: Sequence[Tensor]) -> list[LayerNodes]:
        """Return, for each layer, the nodes that lead to rows of some nodes behind any of them. Collective.

        Args:
            wanted_of_layers: For each layer, the nodes whose rows this rank wants, in increasing order.
        """
        layers, inputs = planned(self.nodes, self.channel, wanted_of_layers)
        self.bytes_in = self.nodes.prepare(inputs, wanted_of_layers[-1])
        return layers

    def plan_of_own(self, own: Ids, num_layers: int, kind: int = 0) -> list[LayerNodes]:
        """Return, for each layer, the nodes that lead to the last one's rows of all nodes of a type, each on its owner.

        The layers before the last are alike, so nodes are listed once: as a range, or where they take much memory in a
        file. Collective.
        """
        held = own
        wanted, told = ids_of(own[:0]), list[Tensor]()
        if self.channel.size > 1:
            held = self._kept(self.nodes.senders(own))
            wanted = self._kept(held[_is_outside(held, own)])
            told = [self._kept(nodes) for nodes in self.channel.exchange(self.nodes.by_owner(wanted))]
        self.bytes_in = self.nodes.prepare(held, wanted[:0])
        last = ids_by_type(own, self.nodes.offsets)[kind]
        return [LayerNodes(own, wanted, told, held)] * (num_layers - 1) + [LayerNodes(last, wanted, told, held)]

    def _kept(self, nodes: Tensor) -> Tensor:
        return kept(nodes, int(_FOR_A_LIST * self.work.budget_bytes), self.folder)

    def rows(
        self, layers: Sequence[Layer], planned: Sequence[LayerNodes], progress: Progress = lambda _: None
    ) -> RowTables:
        """Compute the layers; return the rows of the last one for the nodes that are wanted of it. Collective.

        The arguments are those of :meth:`tables`.
        """
        table = None
        for found in self.tables(layers, planned, progress):
            table = found
        assert table is not None
        return table

    def tables(
        self, layers: Sequence[Layer], planned: Sequence[LayerNodes], progress: Progress = lambda _: None
    ) -> Iterator[RowTables]:
        """Compute the layers; yield the rows of each for the nodes that are held of it. Collective.

        Args:
            layers: The layers, each a function of a batch of one hop.
            planned: What :meth:`plan` has returned for as many layers.
            progress: Called with the number of nodes whose rows were computed.
        """
        table = None
        self._begin()
        for number, (layer, of_layer) in enumerate(zip(layers, planned, strict=True)):
            self.says = f"Layer {number} of layers()"
            table = self._computed(layer, of_layer, table, progress)
            yield table

    def last_rows(
        self, layers: Sequence[Layer], planned: Sequence[LayerNodes], on_rows: OnRows | None, kind: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Compute the layers; yield nodes and rows of each batch of the last one, which nobody keeps. Collective.

        Args:
            layers: The layers, each a function of a batch of one hop.
            planned: What a plan has returned for as many layers.
            on_rows: Called with each batch of the last layer and the rows of its seeds, on the device.
            kind: Which of the types the nodes of the last layer are of.
        """
        table = None
        for found in self.tables(layers[:-1], planned[:-1]):
            table = found
        self.says = f"Layer {len(layers) - 1} of layers()"

        def told(batch: Any, rows: RowsOfTypes) -> None:
            of_kind = rows[kind]
            if of_kind is None:
                kind_of_seeds = batch.node_types[kind]
                raise TypeError(f"The last layer of layers() returned no rows of the seeds' type, {kind_of_seeds!r}.")
            if on_rows is not None:
                on_rows(batch, of_kind)

        back = self._way.back()
        for nodes, rows in self._batches(layers[-1], planned[-1].nodes, table, told):
            of_kind = rows[kind]
            assert of_kind is not None
            yield from back.send(nodes, of_kind)
        yield from back.rest()

    def try_one(self, layer: Layer, of_layer: LayerNodes) -> None:
        """Compute the first layer for one node, if this rank has some."""
        self._begin()
        if len(of_layer.nodes):
            self._outputs(layer, ids_of(of_layer.nodes[:1]), None)

    def _begin(self) -> None:
        """Find out how much memory there is for a pass."""
        device, in_ram = self.work.device, self.work.budget_bytes
        there = bytes_there(self.work.bytes_there, device)
        self._least_bytes = min(in_ram, there or in_ram)
        self._way = WayAndBack(device, self.work.dtype, int(_UNDER_WAY * self._least_bytes))
        self._room = Room(int(FOR_A_TABLE * in_ram), self.folder, self._way, int(FOR_A_TABLE * there))
        self._forecasts = [Forecast(_FOR_A_BATCH * in_ram, RAM)]
        if there:
            self._forecasts.append(Forecast(_FOR_A_BATCH * there, Memory.of_device(device)))

    def _computed(self, layer: Layer, of_layer: LayerNodes, before: RowTables | None, progress: Progress) -> RowTables:
        """Compute a layer for own nodes, and fetch the rows of the others. Collective."""
        held = ids_by_type(of_layer.held, self.nodes.offsets)
        tables, (ram, there) = RowTables(held, self._room, self.says), _held_by(before)
        for nodes, rows in self._batches(layer, of_layer.nodes, before):
            tables.write([ids_of(ids) for ids in ids_by_type(nodes, self.nodes.offsets)], rows)
            ram += _bytes_of(rows) if tables.bytes_in_ram else 0
            self._held = ram, there + tables.bytes_there
            progress(len(nodes))
        if self.channel.size > 1:
            tables.make(agreed_forms(self.channel, tables.likes, self.says))
            self._exchange(of_layer, tables)
        return tables

    def _batches(
        self, layer: Layer, nodes: Ids, before: RowTables | None, told: Told = lambda *_: None
    ) -> Iterator[tuple[Tensor, RowsOfTypes]]:
        """Yield the nodes of each batch of a layer, and their rows by types, on the device."""
        bytes_in, self._held = self.bytes_in if before is None else before.bytes_of_row, _held_by(before)
        start, bytes_out, edges = 0, bytes_in, self.nodes.edges_before(nodes)
        while start < len(nodes):
            foreseen = partial(bytes_foreseen, self.nodes, edges, bytes_in, bytes_out, start)
            allowed = min(each.allowed for each in self._forecasts)
            fitting = bisect_right(range(start + 1, len(nodes) + 1), allowed, key=foreseen)
            stop = start + max(fitting, 1)
            if self.whole is not None:
                stop = len(nodes)
                check_all_at_once(self.whole, stop, foreseen(stop), self._least_bytes)
            for each in self._forecasts:
                each.begin()
            some = ids_of(nodes[start:stop])
            try:
                batch, outputs = self._outputs(layer, some, before)
            except (MemoryError, RuntimeError) as error:
                if stop - start == 1 or self.whole is not None or not _is_short_of_memory(error):
                    raise
                for each in self._forecasts:
                    each.was_too_much(foreseen(stop))
                continue
            told(batch, outputs)
            self._way.launched(batch)
            del batch  # otherwise two batches would be held while the next is made
            yield some, outputs
            for each, held in zip(self._forecasts, self._held, strict=False):
                each.end(foreseen(stop), held)
            start, bytes_out = stop, max((each[:1].nbytes for each in outputs if each is not None), default=0)
            del outputs

    def _outputs(self, layer: Layer, nodes: Tensor, before: RowTables | None) -> tuple[Any, RowsOfTypes]:
        """A batch of a layer, and the rows of its seeds."""
        batch = self._way.batch(self.nodes.one_hop(nodes, before, self._way))
        return batch, outputs_of(layer, batch, self.says)

    def _exchange(self, of_layer: LayerNodes, tables: RowTables) -> None:
        """Send the rows that other ranks need, and receive those that this one does. Collective."""
        own, asked, told = self.channel.rank, self.nodes.by_owner(of_layer.wanted), list(of_layer.told)
        asked[own], told[own] = asked[own][:0], told[own][:0]
        of_types = by_types(asked, self.nodes.offsets), by_types(told, self.nodes.offsets)
        for table, asked_of, told_of in zip(tables.of_types, *of_types, strict=True):
            if table is not None:
                fetch_rows(self.channel, asked_of, told_of, table.take, table, self.work.budget_bytes)


def _is_outside(nodes: Tensor, own: Ids) -> Tensor:
    if isinstance(own, range):
        return (nodes < own.start) | (nodes >= own.stop)
    return ~torch.isin(nodes, own, assume_unique=True)


def _held_by(tables: RowTables | None) -> tuple[int, int]:
    """The bytes that tables take in RAM, and on the device that computes."""
    return (0, 0) if tables is None else (tables.bytes_in_ram, tables.bytes_there)


def _bytes_of(rows: RowsOfTypes) -> int:
    return sum(each.nbytes for each in rows if each is not None)


def _is_short_of_memory(error: Exception) -> bool:
    is_short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_short or any(words in str(error) for words in _SHORT)
