"""Each layer of a model computed once for all nodes that some seeds need, with rows in RAM; the ranks share the work.

    plan:     seeds -> nodes that the last layer computes -> their senders -> nodes that the layer before computes ...
    compute:  layer l of the own nodes, batch by batch -> rows that others need are sent there -> layer l + 1

Every rank has the graph, computes nodes that cost as much as those of the others, and receives rows that it needs.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import NamesOfTypes, gathered, in_type, names_of_types
from lightning_gnn_dist.batches.one_hop import RowsOfTypes, with_rows
from lightning_gnn_dist.batches.pool import Pool, Widen, gather_rows
from lightning_gnn_dist.batches.source import Content, made_of
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph, with_arrays, with_arrays_of_types
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of, starts_of
from lightning_gnn_dist.graph.typed.types import TypeNames
from lightning_gnn_dist.layers.choice import EDGES_OF_A_NODE, Neighbourhoods, widest_row
from lightning_gnn_dist.layers.through_layers import (
    BYTES_OF_AN_EDGE,
    COPIES,
    Layer,
    ModelLayers,
    rows_of_types,
    whole_graph_arrays,
)
from lightning_gnn_dist.names import offered
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.channel import Channel

FOR_A_TABLE = 0.2  # of the budget: a layer's rows, beside those of the layer before
_FOR_A_BATCH = 0.1  # of the budget: a layer may take four times what is foreseen for it
_MESSAGES = 2  # rows that a layer makes for each edge: a sender's, and what attention makes of it
_FORM = 8  # numbers that tell the type and shape of a row
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)

Ids = Tensor | range


class Work(NamedTuple):
    """How rows are computed.

    Attributes:
        device: The device that computes.
        dtype: The type of the model's numbers, if batches are brought to it.
        widen: Make float32 of narrower features, of all or of all but one type.
        budget_bytes: Bytes that the work may take, the same on all ranks.
        bytes_there: Bytes of its own memory that the device may be asked for. Default: half of what is free there.
    """

    device: torch.device
    dtype: torch.dtype | None
    widen: Widen
    budget_bytes: int
    bytes_there: int | None = None


class Way:
    """Brings batches and input rows to the device that computes, in the type of the model's numbers."""

    pool: Pool | None = None  # lends memory for what is to be brought there

    def __init__(self, device: torch.device, dtype: torch.dtype | None = None) -> None:
        self.device, self._dtype = device, dtype

    def batch(self, batch: Any) -> Any:
        """Return a batch, in the type and on the device that compute."""
        return in_type(batch, self._dtype).to(self.device)

    def inputs(self, rows: Tensor) -> Tensor:
        """Return input rows, in the type and on the device that compute."""
        return self.there(rows.to(self._dtype) if rows.is_floating_point() and self._dtype is not None else rows)

    def there(self, rows: Tensor) -> Tensor:
        """Return rows on the device."""
        return rows.to(self.device)


class GraphNodes:
    """The nodes of a graph that a rank computes rows for, with all their in-neighbours.

    Args:
        graph: The graph, or those of its nodes that are here, and the edges into them.
        starts: The first node of each rank's range, and the number of nodes. Default: ranks own no ranges.
        widen: Make float32 of narrower features, of all or of all but one type.
        more: Further arrays with a row for each node.
        offsets: The first id of each node type in the graph by whose ids nodes are told. Default: in this one.
        seed_type: The node type that batches say their seeds are of. Default: the first.

    Attributes:
        rows: The graph.
        bytes_per_edge: Bytes of one edge's arrays.
        most_rows: The nodes that a batch can have at most.
    """

    def __init__(
        self,
        graph: Graph,
        starts: Tensor | None = None,
        *,
        widen: Widen = True,
        more: Mapping[str, Tensor] = {},  # never changed
        offsets: Sequence[int] | None = None,
        seed_type: str | None = None,
    ) -> None:
        self.rows, self._starts, self._widen, types = graph, starts, widen, graph.types
        self.offsets = types.offsets if offsets is None else offsets
        self._seed_type = types.node_types[0] if seed_type is None else seed_type
        others = {
            kind: {name: array for name, array in arrays.items() if name != "x"}
            for kind, arrays in types.node_arrays.items()
        }
        self._others = with_arrays(with_arrays_of_types(graph, others), more)
        self.bytes_per_edge, self.most_rows = max(map(bytes_per_row, types.edge_arrays.values())), graph.num_nodes

    @property
    def types(self) -> TypeNames:
        """The types of the graph by whose ids nodes are told."""
        return self.rows.types

    def rows_at(self, nodes: Ids) -> Ids:
        """The places of own nodes in ``rows``."""
        return nodes

    def ids_in_type(self, kind: int, nodes: Tensor) -> Tensor:
        """The ids of own nodes of a type in that type, of shards those of before the graph was divided."""
        return nodes - self.offsets[kind]

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        """Divide increasing nodes by the rank that owns them."""
        assert self._starts is not None
        return list(nodes.tensor_split(torch.searchsorted(nodes, self._starts[1:-1])))

    def senders(self, nodes: Ids) -> Tensor:
        """Some own nodes and all that send to them, in increasing order."""
        return Neighbourhoods(self.rows, 1).senders(ids_of(nodes))

    def prepare(self, nodes: Ids, seeds: Tensor) -> int:
        """Have the input rows of these nodes and seeds at hand; return the bytes of one. Collective."""
        none, others = torch.empty(0, dtype=torch.int64), self._others.types.node_arrays.values()
        inputs = [self._inputs(number, none) for number in range(len(others))]
        return max(
            bytes_per_row(more if x is None else {**more, "x": x}) for x, more in zip(inputs, others, strict=True)
        )

    @cached_property
    def names_in_batches(self) -> NamesOfTypes:
        """The names of a batch's arrays."""
        return names_of_types(self.rows.types)

    def one_hop(self, nodes: Tensor, rows: LayerRows | None, way: Way) -> Any:
        """A batch of own nodes with all their in-neighbours. Its ``x`` are ``rows``, or the input rows.

        It is made in RAM, but for rows that lie on the device. Its ``x0`` are the input rows, which ``way`` brings to
        the device when they are read.
        """
        batch, places = self._around(nodes)

        def read(number: int) -> Tensor:
            found = self._inputs(number, places[number], way.pool)
            if found is None:
                raise AttributeError("x0 is the input rows x, and these nodes have none.")
            return way.inputs(found)

        for number, store in enumerate(batch.node_stores):
            store["batch_size"] = store["num_sampled_nodes"][0]
            store.promise_x0(partial(read, number))
        x = [self._inputs(*of, way.pool) for of in enumerate(places)] if rows is None else rows.take(self._ids(places))
        return with_rows(batch, x) if any(each is not None for each in x) else batch

    def _around(self, nodes: Tensor) -> tuple[Any, list[Tensor]]:
        """The batch without features, and the places of its nodes in their types."""
        at = ids_of(self.rows_at(nodes))
        (sample,) = NeighborSampler([-1]).sample_bulk(self.rows, [at], [BatchKey(0, 0, 0)])
        content = Content.of(self._others, sample, self._seed_type)
        return self._made(content), content.apart.nodes

    def inputs(self, kind: int, name: str, nodes: Tensor) -> Tensor | None:
        """The rows of an array of a node type, by its number, or None if there is none of that name."""
        arrays = self.rows.types.node_arrays[self.rows.types.node_types[kind]]
        at = nodes - self.offsets[kind]
        if name == "n_id" and name not in arrays:
            return at
        return self._taken(name, arrays[name], at) if name in arrays else None

    def _ids(self, of_types: list[Tensor]) -> list[Tensor]:
        """The nodes at some places among those of each type."""
        return [at + start for at, start in zip(of_types, self.rows.types.offsets, strict=False)]

    def _made(self, content: Content) -> Any:
        """The batch without features."""
        return made_of(content, widen=self._widen)

    def _inputs(self, number: int, at: Tensor, pool: Pool | None = None) -> Tensor | None:
        x = self.rows.types.node_arrays[self.rows.types.node_types[number]].get("x")
        return None if x is None else self._taken("x", x, at, pool)

    def _taken(self, name: str, array: Tensor, at: Tensor, pool: Pool | None = None) -> Tensor:
        """Rows of an array as batches have them."""
        return gathered({name: array}, at, lambda _: pool, widen=self._widen)[name]


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


class RamTable:
    """A row in RAM for each of some nodes of a type.

    Args:
        ids: The nodes, in increasing order.
        like: Rows of the type and shape that theirs have.
    """

    def __init__(self, ids: Ids, like: Tensor) -> None:
        self.like = torch.empty((0, *like.shape[1:]), dtype=like.dtype)
        self._rows, self._place = self.like.new_empty((len(ids), *like.shape[1:])), places_in(ids)

    def write(self, nodes: Tensor, rows: Tensor) -> None:
        self._rows[self._place(nodes)] = rows.cpu()

    def take(self, nodes: Tensor) -> Tensor:
        return gather_rows(self._rows, self._place(nodes))


class LayerRows:
    """Rows of nodes of all types: a table for each type that has some, made when the first of them come.

    Args:
        ids: The nodes of each type, in increasing order.
        says: What makes the rows, for error messages.
    """

    def __init__(self, ids: Sequence[Ids], says: str) -> None:
        self._ids, self._says = ids, says
        self.of_types: list[Any] = [None] * len(ids)
        self._without = [0] * len(ids)  # nodes of each type that were written without rows

    def make(self, likes: RowsOfTypes) -> None:
        """Make the tables of those types that have rows of some type and shape, and no table yet."""
        for number, like in enumerate(likes):
            if self.of_types[number] is None and like is not None:
                self.of_types[number] = self._made(self._ids[number], like)
            if self.of_types[number] is not None and self._without[number]:
                raise TypeError(
                    f"{self._says} returned rows of a type on some ranks or for some batches, and none for "
                    f"{self._without[number]} other nodes of it: return a row for each of the first "
                    "batch[kind].batch_size nodes of a type, or never a row of it."
                )

    def _made(self, ids: Ids, like: Tensor) -> Any:
        return RamTable(ids, like)

    @property
    def likes(self) -> RowsOfTypes:
        """No rows, of the type and shape that each table's rows have."""
        return [None if table is None else table.like for table in self.of_types]

    @property
    def bytes_of_row(self) -> int:
        """The bytes of the largest row."""
        return max((bytes_per_row({"": like}) for like in self.likes if like is not None), default=0)

    def write(self, nodes: Sequence[Tensor], rows: RowsOfTypes) -> None:
        """Set the rows of some nodes of each type; rows of a type are there for all of its nodes or for none."""
        for number, (ids, some) in enumerate(zip(nodes, rows, strict=True)):
            self._without[number] += len(ids) if some is None else 0
        self.make(rows)
        for table, ids, some in zip(self.of_types, nodes, rows, strict=True):
            if some is not None:
                table.write(ids, some)

    def take(self, nodes: Sequence[Tensor]) -> RowsOfTypes:
        return [None if table is None else table.take(ids) for table, ids in zip(self.of_types, nodes, strict=True)]


class LayerPass:
    """One pass over the layers of a model, with rows in RAM. All ranks make it together.

    Args:
        nodes: The nodes of this rank.
        channel: The ranks that share the work.
        work: How rows are computed.
        norm: The name of a layer that needs the rows of all nodes in one batch, or None.
        widest: Bytes of the largest row that a layer may make.

    Attributes:
        planned: For each layer, the nodes that it computes, sends and receives, which :meth:`plan` has found.
        says: What is computed, for error messages.
    """

    def __init__(
        self, nodes: GraphNodes, channel: Channel, work: Work, norm: str | None = None, widest: int = 0
    ) -> None:
        self.nodes, self.channel, self.work, self.norm = nodes, channel, work, norm
        self.planned, self._widest, self.says = list[LayerNodes](), widest, "Layer 0 of layers()"
        self._way = Way(work.device, work.dtype)

    def plan(self, wanted_of_layers: Sequence[Tensor]) -> Self:
        """Find, for each layer, the nodes that lead to rows of some nodes behind any of them. Collective.

        Args:
            wanted_of_layers: For each layer, the nodes whose rows this rank wants, in increasing order.
        """
        layers, wanted = list[LayerNodes](), wanted_of_layers[-1]
        for of_layer in reversed(wanted_of_layers):
            wanted = torch.cat([wanted, of_layer]).unique() if len(of_layer) and layers else wanted
            told = self.channel.exchange(self.nodes.by_owner(wanted))
            own = told[0] if len(told) == 1 else torch.cat(told).unique()
            held = own if len(told) == 1 else torch.cat([own, wanted]).unique()
            layers.insert(0, LayerNodes(own, wanted, told, held))
            wanted = self.nodes.senders(own)
        self.planned, self._bytes_in = layers, self.nodes.prepare(wanted, wanted_of_layers[-1])
        return self

    def plan_for(self, seeds: Tensor, num_layers: int) -> Self:
        """Plan for rows of this rank's seeds, which increase, behind the last layer. Collective."""
        return self.plan([seeds[:0]] * (num_layers - 1) + [seeds])

    def try_one(self, layer: Layer) -> None:
        """Compute the first layer for one node, if this rank has some. Not collective."""
        self._begin()
        if len(nodes := self.planned[0].nodes):
            self._outputs(layer, ids_of(nodes[:1]), None)

    def rows(self, layers: Sequence[Layer]) -> LayerRows:
        """Compute all planned layers; return the rows of the last one for this rank's seeds. Collective."""
        return deque(self.tables(layers), maxlen=1).pop()

    def tables(self, layers: Sequence[Layer]) -> Iterator[LayerRows]:
        """Compute the layers; yield the rows of each for the nodes that are held of it. Collective."""
        rows, offsets = None, self.nodes.offsets
        self._begin()
        for number, (layer, of_layer) in enumerate(zip(layers, self.planned, strict=False)):
            self.says = f"Layer {number} of layers()"
            before, rows = rows, self._new_rows(by_type(of_layer.held, offsets))
            for nodes, outputs in self._batches(layer, of_layer.nodes, before):
                rows.write([ids_of(ids) for ids in by_type(nodes, offsets)], outputs)
            if self.channel.size > 1:
                rows.make(agreed_forms(self.channel, rows.likes, self.says))
                self._exchange(of_layer, rows)
            yield rows

    def _begin(self) -> None:  # optional
        """Find out how much memory there is for a pass."""

    def _new_rows(self, ids: Sequence[Ids]) -> LayerRows:
        return LayerRows(ids, self.says)

    def _batches(self, layer: Layer, nodes: Ids, before: LayerRows | None) -> Iterator[tuple[Tensor, RowsOfTypes]]:
        """Yield the nodes of each batch of a layer, and their rows by types."""
        bytes_in = self._bytes_in if before is None else before.bytes_of_row
        budget, edges, start = self.work.budget_bytes, edges_before(self.nodes, nodes), 0
        foreseen = partial(bytes_foreseen, self.nodes, edges, bytes_in, max(bytes_in, self._widest))
        while start < len(nodes):
            stop = self._stop(partial(foreseen, start), start, len(nodes), _FOR_A_BATCH * budget, budget)
            some = ids_of(nodes[start:stop])
            yield some, self._outputs(layer, some, before)[1]
            start = stop

    def _stop(self, foreseen: Callable[[int], float], start: int, count: int, allowed: float, most: int) -> int:
        """Where a batch of some of so many nodes ends, given what it would take and may take."""
        if self.norm is None:
            return start + max(1, bisect_right(range(start + 1, count + 1), allowed, key=foreseen))
        if foreseen(count) > most:
            raise ValueError(
                f"{self.norm} takes the rows of all {count} nodes at once: about {foreseen(count) / 1e9:.1f} GB for a "
                f"layer, and an evaluation may take {most / 1e9:.1f} GB. Allow more with "
                "Evaluation(bytes=...), or budget_bytes=... of predict_by_layer, or choose a norm of single rows such "
                "as BatchNorm."
            )
        return count

    def _outputs(self, layer: Layer, nodes: Tensor, before: LayerRows | None) -> tuple[Any, RowsOfTypes]:
        """A batch of a layer, and the rows of its seeds."""
        batch = self._way.batch(self.nodes.one_hop(nodes, before, self._way))
        return batch, outputs_of(layer, batch, self.says)

    def _exchange(self, of_layer: LayerNodes, rows: LayerRows) -> None:
        """Send the rows that other ranks need, and receive those that this one does. Collective."""
        own, asked, told = self.channel.rank, self.nodes.by_owner(of_layer.wanted), list(of_layer.told)
        asked[own], told[own] = asked[own][:0], told[own][:0]
        of_types = by_types(asked, self.nodes.offsets), by_types(told, self.nodes.offsets)
        for table, asked_of, told_of in zip(rows.of_types, *of_types, strict=True):
            if table is not None:
                self._fetch(table, asked_of, told_of)

    def _fetch(self, table: Any, asked: list[Tensor], told: list[Tensor]) -> None:
        """Write the rows of nodes that each rank sends here into a table, and send each those of others. Collective."""
        came = self.channel.exchange([table.take(ids) for ids in told], list(map(len, asked)))
        for ids, rows in zip(asked, came, strict=True):
            table.write(ids, rows)


def pass_over(graph: Graph, seeds: Tensor, own: Tensor, model: ModelLayers, channel: Channel, work: Work) -> LayerPass:
    """Return a pass over a graph that every rank has; where RAM is short, or a device computes, that of an extension.

    Args:
        graph: The graph.
        seeds: The seeds of all ranks.
        own: This rank's, in increasing order.
        model: The layers.
        channel: The ranks that share the work.
        work: How rows are computed.
    """
    num_bytes = graph.num_nodes * widest_row(model.owner)
    is_short = num_bytes > FOR_A_TABLE * work.budget_bytes or takes_many_pages(graph, work.budget_bytes)
    other = offered("layers beyond memory") if is_short or work.device.type != "cpu" else None
    if other is None:
        starts, more = divided(graph, seeds, len(model.layers), channel.size), whole_graph_arrays(model.layers, graph)
        nodes = GraphNodes(graph, starts, widen=work.widen, more=more)
        made = LayerPass(nodes, channel, work, model.norm, widest_row(model.owner))
    else:
        made = other(graph, seeds, model, channel, work)
    return made.plan_for(own, len(model.layers))


def takes_many_pages(graph: Graph, budget_bytes: int) -> bool:
    """Whether a graph lies in files whose pages would take more than half of a budget."""
    return graph.path is not None and graph.num_bytes > budget_bytes // 2


def divided(graph: Graph, seeds: Tensor, num_layers: int, num_ranks: int) -> Tensor:
    """Return the first node of each rank, and the number of nodes: ranges that cost the layers the same."""
    reached, work = Neighbourhoods(graph, 1), torch.zeros(graph.num_nodes, dtype=torch.int64)
    needed = seeds.unique()
    for _ in range(num_layers if num_ranks > 1 else 0):
        work[needed] += degrees_of(graph.indptr, needed) + EDGES_OF_A_NODE
        needed = reached.senders(needed)
    upto = work.cumsum(0)
    cuts = torch.searchsorted(upto, torch.arange(1, num_ranks) * int(upto[-1]) // num_ranks, right=True)
    return torch.cat([cuts.new_zeros(1), cuts, cuts.new_tensor([graph.num_nodes])])


def outputs_of(layer: Layer, batch: Any, says: str) -> RowsOfTypes:
    """The rows that a layer makes of a batch, without gradients."""
    outputs = rows_of_types(layer(batch), batch, says)
    for rows in outputs:
        if rows is not None and rows.dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise TypeError(f"{says} returned rows of {rows.dtype}, and may return {known}.")
    return [None if rows is None else rows.detach() for rows in outputs]


def bytes_foreseen(of: GraphNodes, edges: Tensor, bytes_in: int, bytes_out: int, start: int, stop: int) -> float:
    """The bytes of a batch of nodes ``start`` to ``stop``, if its layer makes a message for each edge."""
    num_edges, num_nodes = int(edges[stop] - edges[start]), stop - start
    per_edge = BYTES_OF_AN_EDGE + of.bytes_per_edge + _MESSAGES * max(bytes_in, bytes_out)
    return COPIES * (min(num_edges + num_nodes, of.most_rows) * bytes_in + num_nodes * bytes_out) + num_edges * per_edge


def agreed_forms(channel: Channel, likes: RowsOfTypes, says: str) -> RowsOfTypes:
    """Return no rows, of the types and shapes that some rank has computed; others own none of the nodes. Collective."""
    forms = torch.zeros((len(likes), _FORM), dtype=torch.int64)
    for form, like in zip(forms, likes, strict=True):
        if like is not None:
            described = [1, _DTYPES.index(like.dtype), like.dim() - 1, *like.shape[1:]]
            form[: len(described)] = torch.tensor(described)
    told = torch.stack(channel.exchange([forms] * channel.size))
    agreed: Tensor = told.amax(0)
    differs = ((told != agreed) & (told[:, :, :1] > 0)).any(2).any(1)
    if bool(differs.any()):  # all ranks see it alike
        raise TypeError(
            f"{says} returned rows of another type or shape on rank {int(differs.long().argmax())} than on "
            "others: every rank must have the same layers."
        )
    if len(agreed) == 1 and not int(agreed[0, 0]):
        agreed[0, 0] = 1  # nobody wants a row where no part has a boundary
    return [
        torch.empty((0, *shape[:dims]), dtype=_DTYPES[dtype]) if is_there else None
        for is_there, dtype, dims, *shape in agreed.tolist()
    ]


def ids_of(nodes: Ids) -> Tensor:
    """Return the ids as a tensor."""
    return torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes


def by_type(ids: Ids, offsets: Sequence[int]) -> list[Any]:
    """Divide increasing ids by the type of the node, which begin at these offsets."""
    if len(offsets) == 2:
        return [ids]
    if isinstance(ids, range):
        return [ids[start:stop] for start, stop in pairwise([bisect_left(ids, offset) for offset in offsets])]
    return list(ids.tensor_split(torch.searchsorted(ids, torch.tensor(offsets[1:-1]))))


def by_types(of_ranks: Sequence[Tensor], offsets: Sequence[int]) -> list[list[Tensor]]:
    """Return for each type which of the nodes of each rank are of it."""
    return [list(of_type) for of_type in zip(*(by_type(nodes, offsets) for nodes in of_ranks), strict=True)]


def places_in(ids: Ids) -> Callable[[Tensor], Tensor]:
    """Return what finds the places of nodes among increasing ids: a difference, where these follow each other."""
    if len(ids) and int(ids[-1]) - int(ids[0]) + 1 == len(ids):
        first = int(ids[0])
        return lambda nodes: nodes - first
    return lambda nodes: torch.searchsorted(ids_of(ids), nodes)


def edges_before(of: GraphNodes, nodes: Ids) -> Tensor:
    """Return how many edges lead to the own nodes before each of some, and before their end, but for a constant."""
    indptr, at = of.rows.indptr, of.rows_at(nodes)
    return indptr[at.start : at.stop + 1] if isinstance(at, range) else starts_of(degrees_of(indptr, at))
