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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import in_type
from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.layers.budget import Forecast
from lightning_gnn_dist.layers.row_table import Ids, RowTables, by_type, by_types, fetch_rows, ids_of, kept
from lightning_gnn_dist.layers.through_layers import BYTES_OF_AN_EDGE, COPIES, Layer, rows_of_types
from lightning_gnn_dist.wire.channel import Channel

_FOR_A_BATCH = 0.4  # of the budget; pages of files and what an allocator keeps come on top
_FOR_A_TABLE = 0.2  # of the budget: a layer's rows in RAM, beside those of the layer before
_FOR_A_LIST = 0.02  # of the budget: the ids of nodes
_MESSAGES = 2  # rows that a layer makes for each edge: a sender's, and what attention makes of it
_FORM = 8  # numbers that tell the type and shape of a row
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
_SHORT = ("can't allocate memory", "not enough memory")  # what torch says where the system gives it no memory

Progress = Callable[[int], object]
Bring = Callable[[Tensor], Tensor]
OnRows = Callable[[Any, Tensor], object]
Told = Callable[[Any, RowsOfTypes], object]


class NodesOfRank(Protocol):
    """The part of a graph that a rank computes rows for.

    Attributes:
        offsets: The first id of each node type, and at the end the number of all nodes.
        bytes_per_edge: Bytes of one edge's arrays.
        most_rows: The nodes that a batch can have at most.
    """

    bytes_per_edge: int
    most_rows: int

    @property
    def offsets(self) -> Sequence[int]: ...

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        """Divide increasing nodes by the rank that owns them."""
        ...

    def senders(self, nodes: Ids) -> Tensor:
        """Some own nodes and all that send to them, in increasing order."""
        ...

    def edges_before(self, nodes: Ids) -> Tensor:
        """How many edges lead to the own nodes before each of these, and before the end of them, but for a constant."""
        ...

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        """Have the input rows of these nodes and seeds at hand; return the bytes of one. Collective."""
        ...

    def one_hop(self, nodes: Tensor, rows: RowTables | None, bring: Bring) -> Any:
        """A batch of own nodes with all their in-neighbours. Its ``x`` are ``rows``, or the input rows.

        Its ``x0`` are the input rows, which ``bring`` brings to the device when they are read.
        """
        ...


class LayerNodes(NamedTuple):
    """The nodes of one layer on a rank.

    Attributes:
        nodes: The own nodes whose rows it computes.
        wanted: The nodes whose rows it needs.
        told: Those of its nodes that each rank needs.
        held: The nodes whose rows it has in the end, computed or received.
    """

    nodes: Ids
    wanted: Tensor
    told: list[Tensor]
    held: Ids


@dataclass
class LayerPass:
    """One pass over the layers of a model. All ranks make it together.

    Attributes:
        nodes: The nodes of this rank.
        channel: The ranks that share the work.
        device: The device that computes.
        budget_bytes: Bytes that the pass may take, for a batch and for rows.
        folder: Where rows go that take more, or None for the system's folder of temporary files.
        whole: The name of a layer that needs the rows of all nodes in one batch, or None.
        dtype: The type of the model's numbers, if batches are brought to it.
    """

    nodes: NodesOfRank
    channel: Channel
    device: torch.device
    budget_bytes: int
    folder: Path | None = None
    whole: str | None = None
    dtype: torch.dtype | None = None
    _says: str = "Layer 0 of layers()"

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
        planned, wanted = list[LayerNodes](), wanted_of_layers[-1]
        for of_layer in reversed(wanted_of_layers):
            wanted = torch.cat([wanted, of_layer]).unique() if len(of_layer) and planned else wanted
            told = self.channel.exchange(self.nodes.by_owner(wanted))
            nodes = told[0] if len(told) == 1 else torch.cat(told).unique()
            held = nodes if len(told) == 1 else torch.cat([nodes, wanted]).unique()
            planned.insert(0, LayerNodes(nodes, wanted, told, held))
            wanted = self.nodes.senders(nodes)
        self.bytes_in = self.nodes.prepare(wanted, wanted_of_layers[-1])
        return planned

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
        last = by_type(own, self.nodes.offsets)[kind]
        return [LayerNodes(own, wanted, told, held)] * (num_layers - 1) + [LayerNodes(last, wanted, told, held)]

    def _kept(self, nodes: Tensor) -> Tensor:
        return kept(nodes, int(_FOR_A_LIST * self.budget_bytes), self.folder)

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
        self._forecast = Forecast(_FOR_A_BATCH * self.budget_bytes)
        for number, (layer, of_layer) in enumerate(zip(layers, planned, strict=True)):
            self._says = f"Layer {number} of layers()"
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
        self._says = f"Layer {len(layers) - 1} of layers()"

        def told(batch: Any, rows: RowsOfTypes) -> None:
            of_kind = rows[kind]
            if of_kind is None:
                kind_of_seeds = batch.node_types[kind]
                raise TypeError(f"The last layer of layers() returned no rows of the seeds' type, {kind_of_seeds!r}.")
            if on_rows is not None:
                on_rows(batch, of_kind)

        for nodes, rows in self._batches(layers[-1], planned[-1].nodes, table, told):
            of_kind = rows[kind]
            assert of_kind is not None
            yield nodes, of_kind.cpu()

    def try_one(self, layer: Layer, of_layer: LayerNodes) -> None:
        """Compute the first layer for one node, if this rank has some."""
        if len(of_layer.nodes):
            self._outputs(layer, ids_of(of_layer.nodes[:1]), None)

    def _computed(self, layer: Layer, of_layer: LayerNodes, before: RowTables | None, progress: Progress) -> RowTables:
        """Compute a layer for own nodes, and fetch the rows of the others. Collective."""
        held = by_type(of_layer.held, self.nodes.offsets)
        tables = RowTables(held, int(_FOR_A_TABLE * self.budget_bytes), self.folder, self._says, self.device)
        for nodes, rows in self._batches(layer, of_layer.nodes, before):
            tables.write([ids_of(ids) for ids in by_type(nodes, self.nodes.offsets)], rows)
            self._held += _bytes_of(rows) if tables.bytes_in_ram else 0
            progress(len(nodes))
        if self.channel.size > 1:
            tables.make(self.agreed_forms(tables.likes))
            self._exchange(of_layer, tables)
        return tables

    def _batches(
        self, layer: Layer, nodes: Ids, before: RowTables | None, told: Told = lambda *_: None
    ) -> Iterator[tuple[Tensor, RowsOfTypes]]:
        """Yield the nodes of each batch of a layer, and their rows by types."""
        bytes_in, self._held = (self.bytes_in, 0) if before is None else (before.bytes_of_row, before.bytes_in_ram)
        start, bytes_out, edges = 0, bytes_in, self.nodes.edges_before(nodes)
        while start < len(nodes):
            foreseen = partial(self._foreseen, edges, start, bytes_in, bytes_out)
            fitting = bisect_right(range(start + 1, len(nodes) + 1), self._forecast.allowed, key=foreseen)
            stop = start + max(fitting, 1)
            if self.whole is not None:
                stop = self._all_of(nodes, foreseen(len(nodes)))
            self._forecast.begin()
            some = ids_of(nodes[start:stop])
            try:
                batch, outputs = self._outputs(layer, some, before)
            except (MemoryError, RuntimeError) as error:
                if stop - start == 1 or self.whole is not None or not _is_short_of_memory(error):
                    raise
                self._forecast.was_too_much(foreseen(stop))
                continue
            told(batch, outputs)
            rows = outputs
            del batch, outputs  # otherwise two batches would be held while the next is made
            yield some, rows
            self._forecast.end(foreseen(stop), self._held)
            start, bytes_out = stop, max((each[:1].nbytes for each in rows if each is not None), default=0)

    def _all_of(self, nodes: Ids, num_bytes: float) -> int:
        """Return the number of all nodes; refuse them if they take too much memory for one batch."""
        if num_bytes > self.budget_bytes:
            raise ValueError(
                f"{self.whole} takes the rows of all {len(nodes)} nodes at once: about {num_bytes / 1e9:.1f} GB for a "
                f"layer, and an evaluation may take {self.budget_bytes / 1e9:.1f} GB. Allow more with "
                "Evaluation(bytes=...), or budget_bytes=... of predict_by_layer, or choose a norm of single rows such "
                "as BatchNorm."
            )
        return len(nodes)

    def _foreseen(self, edges: Tensor, start: int, bytes_in: int, bytes_out: int, stop: int) -> float:
        """The bytes of a batch of nodes ``start`` to ``stop``, if its layer makes a message for each edge."""
        num_edges, num_nodes = int(edges[stop] - edges[start]), stop - start
        senders = min(num_edges + num_nodes, self.nodes.most_rows)
        per_edge = BYTES_OF_AN_EDGE + self.nodes.bytes_per_edge + _MESSAGES * max(bytes_in, bytes_out)
        return COPIES * (senders * bytes_in + num_nodes * bytes_out) + num_edges * per_edge

    def _outputs(self, layer: Layer, nodes: Tensor, before: RowTables | None) -> tuple[Any, RowsOfTypes]:
        """A batch of a layer, and the rows of its seeds."""
        batch = self.nodes.one_hop(nodes, before, self._brought)
        batch = in_type(batch, self.dtype).to(self.device)
        outputs = rows_of_types(layer(batch), batch, self._says)
        for rows in outputs:
            if rows is not None and rows.dtype not in _DTYPES:
                known = ", ".join(map(str, _DTYPES))
                raise TypeError(f"{self._says} returned rows of {rows.dtype}, and may return {known}.")
        return batch, [None if rows is None else rows.detach() for rows in outputs]

    def _brought(self, rows: Tensor) -> Tensor:
        """Rows in the type and on the device that compute."""
        return rows.to(self.device, self.dtype if rows.is_floating_point() else None)

    def agreed_forms(self, likes: RowsOfTypes) -> RowsOfTypes:
        """Return rows of the types and shapes that some rank has computed; others own none of the nodes. Collective."""
        if self.channel.size == 1:
            return likes
        forms = torch.zeros((len(likes), _FORM), dtype=torch.int64)
        for form, like in zip(forms, likes, strict=True):
            if like is not None:
                described = [1, _DTYPES.index(like.dtype), like.dim() - 1, *like.shape[1:]]
                form[: len(described)] = torch.tensor(described)
        told = torch.stack(self.channel.exchange([forms] * self.channel.size))
        agreed: Tensor = told.amax(0)
        differs = ((told != agreed) & (told[:, :, :1] > 0)).any(2).any(1)
        if bool(differs.any()):  # all ranks see it alike
            raise TypeError(
                f"{self._says} returned rows of another type or shape on rank {int(differs.long().argmax())} than on "
                "others: every rank must have the same layers."
            )
        if len(agreed) == 1 and not int(agreed[0, 0]):
            agreed[0, 0] = 1  # nobody wants a row where no part has a boundary
        return [_of_form(form) for form in agreed.tolist()]

    def _exchange(self, of_layer: LayerNodes, tables: RowTables) -> None:
        """Send the rows that other ranks need, and receive those that this one does. Collective."""
        own, asked, told = self.channel.rank, self.nodes.by_owner(of_layer.wanted), list(of_layer.told)
        asked[own], told[own] = asked[own][:0], told[own][:0]
        of_types = by_types(asked, self.nodes.offsets), by_types(told, self.nodes.offsets)
        for table, asked_of, told_of in zip(tables.of_types, *of_types, strict=True):
            if table is not None:
                fetch_rows(self.channel, asked_of, told_of, table.take, table, self.budget_bytes)


def _is_outside(nodes: Tensor, own: Ids) -> Tensor:
    if isinstance(own, range):
        return (nodes < own.start) | (nodes >= own.stop)
    return ~torch.isin(nodes, own, assume_unique=True)


def _bytes_of(rows: RowsOfTypes) -> int:
    return sum(each.nbytes for each in rows if each is not None)


def _of_form(form: list[int]) -> Tensor | None:
    """No rows of a type and shape."""
    is_there, dtype, dims, *shape = form
    return torch.empty((0, *shape[:dims]), dtype=_DTYPES[dtype]) if is_there else None


def _is_short_of_memory(error: Exception) -> bool:
    is_short = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return is_short or any(words in str(error) for words in _SHORT)
