"""Each layer of a model computed once for all nodes that some seeds need, with rows in RAM; the ranks share the work.

    plan:     seeds -> nodes that the last layer computes -> their senders -> nodes that the layer before computes ...
    compute:  layer l of the own nodes, batch by batch -> rows that others need are sent there -> layer l + 1

Every rank has the graph, computes nodes that cost as much as those of the others, and receives rows that it needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import NamesOfTypes, gathered, in_type, names_of_types
from lightning_gnn_dist.batches.one_hop import RowsOfTypes, with_rows
from lightning_gnn_dist.batches.pool import Pool, Widen, gather_rows
from lightning_gnn_dist.batches.source import Content, made_of
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.convert import SUFFIX
from lightning_gnn_dist.graph.graph import Graph, with_arrays, with_arrays_of_types
from lightning_gnn_dist.graph.rows import bytes_per_row, degrees_of, starts_of
from lightning_gnn_dist.graph.typed.names import TypeOffsets
from lightning_gnn_dist.layers.choice import EDGES_OF_A_NODE, Neighbourhoods, widest_row
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.layers.through_layers import BYTES_OF_AN_EDGE, COPIES, Layer, rows_of_types, whole_graph_arrays
from lightning_gnn_dist.names import offered
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.channel import Channel

FEATURES = ("x", "x" + SUFFIX)
FOR_A_TABLE = 0.2  # of the budget: a layer's rows, beside those of the layer before
_FOR_A_BATCH = 0.1  # of the budget: a layer may take four times what is foreseen for it
_MESSAGES = 2  # rows that a layer makes for each edge: a sender's, and what attention makes of it
_FORM = 8  # numbers that tell the type and shape of a row
_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)

Progress = Callable[[int], object]


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


class Rows(Protocol):
    """Rows of some nodes."""

    def take(self, nodes: Sequence[Tensor]) -> RowsOfTypes:
        """Return the rows of some nodes of each type."""
        ...


class HasInputs(Protocol):
    """Nodes whose input rows a batch of some of them can promise."""

    @property
    def types(self) -> TypeOffsets:
        """The types of the graph."""
        ...

    @property
    def names_in_batches(self) -> NamesOfTypes:
        """The names of a batch's arrays."""
        ...

    def inputs(self, kind: int, name: str, nodes: Tensor) -> Tensor | None:
        """The rows of an array of a node type, by its number, or None if there is none of that name."""
        ...


class Pass(Protocol):
    """Computes the layers of a model for the nodes that lead to some seeds, on all ranks together."""

    @property
    def nodes(self) -> HasInputs:
        """What the seeds have beside these rows."""
        ...

    @property
    def num_rows(self) -> int:
        """How many rows this rank computes."""
        ...

    def try_one(self, layer: Layer) -> None:
        """Compute the first layer for one node, if this rank has some. Not collective."""

    def rows(self, layers: Sequence[Layer], progress: Progress) -> Rows:
        """Compute the layers; return the rows of the last one for this rank's seeds. Collective.

        ``progress`` is called with the number of nodes whose rows were computed.
        """
        ...


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
    """Nodes of a graph that a rank has at hand, with all their in-neighbours.

    Args:
        graph: The graph.
        widen: Make float32 of narrower features, of all or of all but one type.
        more: Further arrays with a row for each node.
        offsets: The first id of each node type in the graph by whose ids nodes are told. Default: in this one.
        seed_type: The node type that batches say their seeds are of. Default: the first.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        widen: Widen = True,
        more: Mapping[str, Tensor] = {},  # never changed
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

    @property
    def types(self) -> TypeOffsets:
        return self._graph.types

    @cached_property
    def names_in_batches(self) -> NamesOfTypes:
        return names_of_types(self._graph.types, widen=self._widen)

    @property
    def bytes_of_inputs(self) -> int:
        """The bytes of the largest input row."""
        rows = [self._taken(arrays, torch.empty(0, dtype=torch.int64)) for arrays in self._features]
        others = self._others.types.node_arrays.values()
        return max(bytes_per_row(row) + bytes_per_row(more) for row, more in zip(rows, others, strict=True))

    def one_hop(self, at: Tensor, rows: Rows | None, way: Way) -> Any:
        """A batch of nodes at some places with all their in-neighbours. Its ``x`` are ``rows``, or the input rows.

        It is made in RAM, but for rows that lie on the device. Its ``x0`` are the input rows, which ``way`` brings to
        the device when they are read.
        """
        (sample,) = NeighborSampler([-1]).sample_bulk(self._graph, [at], [BatchKey(0, 0, 0)])
        content = Content.of(self._others, sample, self._seed_type)
        batch, of_types = self._made(content), content.apart.nodes
        inputs = partial(self._inputs, pool=way.pool)
        x = [inputs(*of) for of in enumerate(of_types)] if rows is None else rows.take(self._ids(of_types))
        return batch_of_layer(batch, x, inputs, of_types, way)

    def inputs(self, kind: int, name: str, nodes: Tensor) -> Tensor | None:
        arrays = self._graph.types.node_arrays[self._graph.types.node_types[kind]]
        at = nodes - self.offsets[kind]
        if name == "n_id" and name not in arrays:
            return at
        return self._taken(_named(arrays, (name, name + SUFFIX)), at).get(name)

    def _ids(self, of_types: list[Tensor]) -> list[Tensor]:
        """The nodes at some places among those of each type."""
        return [at + start for at, start in zip(of_types, self._graph.types.offsets, strict=False)]

    def _made(self, content: Content) -> Any:
        """The batch without features."""
        return made_of(content, widen=self._widen)

    def _inputs(self, number: int, at: Tensor, pool: Pool | None = None) -> Tensor | None:
        return self._taken(self._features[number], at, pool).get("x")

    def _taken(self, arrays: Mapping[str, Tensor], at: Tensor, pool: Pool | None = None) -> dict[str, Tensor]:
        """Rows of arrays as batches have them."""
        return gathered(arrays, at, lambda _: pool, widen=self._widen)


class LayerNodes(NamedTuple):
    """The nodes of one layer on a rank.

    Attributes:
        nodes: The own nodes whose rows it computes.
        wanted: The nodes whose rows it needs.
        told: Those of its nodes that each rank needs.
        held: The nodes whose rows it has in the end, computed or received.
    """

    nodes: Tensor | range
    wanted: Tensor
    told: list[Tensor]
    held: Tensor | range


class RowsInRam:
    """Rows that a layer makes of some nodes.

    Args:
        ids: The nodes of each type, in increasing order.
        likes: Rows of the type and shape that theirs have; None for a type that has none.
    """

    def __init__(self, ids: Sequence[Tensor], likes: RowsOfTypes) -> None:
        self._ids = ids
        # Where ids follow each other, a place is a difference.
        self._firsts = [int(of[0]) if len(of) and int(of[-1] - of[0]) + 1 == len(of) else None for of in ids]
        self.of_types = [
            None if like is None else torch.empty((len(of), *like.shape[1:]), dtype=like.dtype)
            for of, like in zip(ids, likes, strict=True)
        ]
        self.bytes_of_row = max((rows[:1].nbytes for rows in self.of_types if rows is not None), default=0)

    def write(self, nodes: Sequence[Tensor], of_types: RowsOfTypes) -> None:
        """Set the rows of some nodes of each type."""
        for kind, rows in enumerate(of_types):
            if rows is not None and (table := self.of_types[kind]) is not None:
                table[self._places(kind, nodes[kind])] = rows

    def take(self, nodes: Sequence[Tensor]) -> RowsOfTypes:
        of_types = enumerate(zip(self.of_types, nodes, strict=True))
        return [None if rows is None else gather_rows(rows, self._places(kind, of)) for kind, (rows, of) in of_types]

    def _places(self, kind: int, nodes: Tensor) -> Tensor:
        first = self._firsts[kind]
        return torch.searchsorted(self._ids[kind], nodes) if first is None else nodes - first


class RamPass:
    """A pass whose rows lie in RAM, over a graph that every rank has.

    Args:
        graph: The graph.
        seeds: The seeds of all ranks.
        own: This rank's, in increasing order.
        model: The layers.
        channel: The ranks that share the work.
        work: How rows are computed.
    """

    def __init__(
        self, graph: Graph, seeds: Tensor, own: Tensor, model: ModelLayers, channel: Channel, work: Work
    ) -> None:
        self.nodes = GraphNodes(graph, widen=work.widen, more=whole_graph_arrays(model.layers, graph))
        self._graph, self._model, self._channel, self._budget_bytes = graph, model, channel, work.budget_bytes
        self._way, none = Way(work.device, work.dtype), own[:0]
        self._starts = divided(graph, seeds, len(model.layers), channel.size)
        self._planned = planned(self, channel, [*[none] * (len(model.layers) - 1), own])[0]
        self.num_rows = sum(len(of_layer.nodes) for of_layer in self._planned)

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        """Divide increasing nodes by the rank that owns them."""
        return list(nodes.tensor_split(torch.searchsorted(nodes, self._starts[1:-1])))

    def senders(self, nodes: Tensor) -> Tensor:
        """Some own nodes and all that send to them, in increasing order."""
        return Neighbourhoods(self._graph, 1).senders(nodes)

    def try_one(self, layer: Layer) -> None:
        if len(own := ids_of(self._planned[0].nodes)):
            self._outputs(layer, own[:1], None, "Layer 0 of layers()")

    def rows(self, layers: Sequence[Layer], progress: Progress) -> RowsInRam:
        rows: RowsInRam | None = None
        for number, (layer, of_layer) in enumerate(zip(layers, self._planned, strict=True)):
            says, found = f"Layer {number} of layers()", list[tuple[list[Tensor], RowsOfTypes]]()
            for nodes in self._batches(ids_of(of_layer.nodes), rows):
                found.append((by_type(nodes, self.nodes.offsets), self._outputs(layer, nodes, rows, says)))
                progress(len(nodes))
            rows = self._joined(found, of_layer, says)
        assert rows is not None
        return rows

    def _batches(self, nodes: Tensor, before: RowsInRam | None) -> Iterator[Tensor]:
        """Yield nodes whose rows are computed at once."""
        bytes_in = self.nodes.bytes_of_inputs if before is None else before.bytes_of_row
        edges = starts_of(degrees_of(self._graph.indptr, nodes))
        foreseen = partial(bytes_foreseen, self.nodes, edges, bytes_in, max(bytes_in, widest_row(self._model.owner)))
        if self._model.norm is not None:
            check_all_at_once(self._model.norm, len(nodes), foreseen(0, len(nodes)), self._budget_bytes)
            yield nodes
            return
        start = 0
        while start < len(nodes):
            ends, most = range(start + 1, len(nodes) + 1), _FOR_A_BATCH * self._budget_bytes
            stop = start + max(1, bisect_right(ends, most, key=partial(foreseen, start)))
            yield nodes[start:stop]
            start = stop

    def _outputs(self, layer: Layer, nodes: Tensor, before: RowsInRam | None, says: str) -> RowsOfTypes:
        batch = self._way.batch(self.nodes.one_hop(nodes, before, self._way))
        return [None if rows is None else rows.cpu() for rows in outputs_of(layer, batch, says)]

    def _joined(self, found: Sequence[tuple[list[Tensor], RowsOfTypes]], of_layer: LayerNodes, says: str) -> RowsInRam:
        """Put the rows of batches together, and send and receive those of other ranks. Collective."""
        kinds, channel, offsets = range(len(self.nodes.offsets) - 1), self._channel, self.nodes.offsets
        firsts = [next((rows[kind] for _, rows in found if rows[kind] is not None), None) for kind in kinds]
        likes = agreed_forms(channel, firsts, says)
        for kind in kinds:
            if likes[kind] is not None:
                check_has_rows(says, sum(len(nodes[kind]) for nodes, rows in found if rows[kind] is None))
        table = RowsInRam(by_type(ids_of(of_layer.held), offsets), likes)
        for nodes, rows in found:
            table.write(nodes, rows)
        if channel.size == 1:
            return table
        asked, told = self.by_owner(of_layer.wanted), list(of_layer.told)
        asked[channel.rank], told[channel.rank] = asked[channel.rank][:0], told[channel.rank][:0]
        sent = [table.take(by_type(ids, offsets)) for ids in told]
        came = [by_type(ids, offsets) for ids in asked]
        for kind in kinds:
            if likes[kind] is not None:
                pieces = [piece for of_rank in sent if (piece := of_rank[kind]) is not None]
                received = channel.exchange(pieces, [len(of_rank[kind]) for of_rank in came])
                for of_rank, some in zip(came, received, strict=True):
                    table.write(of_rank, [some if each == kind else None for each in kinds])
        return table


def pass_over(
    graph: Graph, seeds: Tensor, own: Callable[[], Tensor], model: ModelLayers, channel: Channel, work: Work
) -> Pass:
    """Return a pass over a graph that every rank has; where RAM is short, or a device computes, that of an extension.

    Args:
        graph: The graph.
        seeds: The seeds of all ranks.
        own: Returns this rank's, in increasing order.
        model: The layers.
        channel: The ranks that share the work.
        work: How rows are computed.
    """
    num_bytes = graph.num_nodes * widest_row(model.owner)
    is_short = num_bytes > FOR_A_TABLE * work.budget_bytes or takes_many_pages(graph, work.budget_bytes)
    other = offered("layers beyond memory") if is_short or work.device.type != "cpu" else None
    if other is None:
        return RamPass(graph, seeds, own(), model, channel, work)
    made: Pass = other(graph, seeds, own, model, channel, work)
    return made


def takes_many_pages(graph: Graph, budget_bytes: int) -> bool:
    """Whether a graph lies in files whose pages would take more than half of a budget."""
    return graph.path is not None and graph.num_bytes > budget_bytes // 2


def planned(nodes: Owned, channel: Channel, wanted_of_layers: Sequence[Tensor]) -> tuple[list[LayerNodes], Tensor]:
    """Return, for each layer, the nodes that lead to rows of some nodes behind any of them, and the inputs. Collective.

    Args:
        nodes: The nodes of this rank.
        channel: The ranks.
        wanted_of_layers: For each layer, the nodes whose rows this rank wants, in increasing order.
    """
    layers, wanted = list[LayerNodes](), wanted_of_layers[-1]
    for of_layer in reversed(wanted_of_layers):
        wanted = torch.cat([wanted, of_layer]).unique() if len(of_layer) and layers else wanted
        told = channel.exchange(nodes.by_owner(wanted))
        own = told[0] if len(told) == 1 else torch.cat(told).unique()
        held = own if len(told) == 1 else torch.cat([own, wanted]).unique()
        layers.insert(0, LayerNodes(own, wanted, told, held))
        wanted = nodes.senders(own)
    return layers, wanted


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


def outputs_of(layer: Layer, batch: Any, says: str) -> RowsOfTypes:
    """The rows that a layer makes of a batch, without gradients."""
    outputs = rows_of_types(layer(batch), batch, says)
    for rows in outputs:
        if rows is not None and rows.dtype not in _DTYPES:
            known = ", ".join(map(str, _DTYPES))
            raise TypeError(f"{says} returned rows of {rows.dtype}, and may return {known}.")
    return [None if rows is None else rows.detach() for rows in outputs]


class Owned(Protocol):
    """Nodes that ranks own."""

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        """Divide increasing nodes by the rank that owns them."""
        ...

    def senders(self, nodes: Any) -> Tensor:
        """Some own nodes and all that send to them, in increasing order."""
        ...


class Sized(Protocol):
    """Nodes of which it is known what a batch of them takes.

    Attributes:
        bytes_per_edge: Bytes of one edge's arrays.
        most_rows: The nodes that a batch can have at most.
    """

    bytes_per_edge: int
    most_rows: int


def bytes_foreseen(of: Sized, edges: Tensor, bytes_in: int, bytes_out: int, start: int, stop: int) -> float:
    """The bytes of a batch of nodes ``start`` to ``stop``, if its layer makes a message for each edge."""
    num_edges, num_nodes = int(edges[stop] - edges[start]), stop - start
    per_edge = BYTES_OF_AN_EDGE + of.bytes_per_edge + _MESSAGES * max(bytes_in, bytes_out)
    return COPIES * (min(num_edges + num_nodes, of.most_rows) * bytes_in + num_nodes * bytes_out) + num_edges * per_edge


def check_all_at_once(norm: str, num_nodes: int, num_bytes: float, most: int) -> None:
    """Refuse nodes that take too much memory for one batch, for a layer that takes the rows of all at once."""
    if num_bytes > most:
        raise ValueError(
            f"{norm} takes the rows of all {num_nodes} nodes at once: about {num_bytes / 1e9:.1f} GB for a "
            f"layer, and an evaluation may take {most / 1e9:.1f} GB. Allow more with "
            "Evaluation(bytes=...), or budget_bytes=... of predict_by_layer, or choose a norm of single rows such "
            "as BatchNorm."
        )


def check_has_rows(says: str, num_without: int) -> None:
    """Refuse nodes without rows of a type that has some."""
    if num_without:
        raise TypeError(
            f"{says} returned rows of a type on some ranks or for some batches, and none for "
            f"{num_without} other nodes of it: return a row for each of the first "
            "batch[kind].batch_size nodes of a type, or never a row of it."
        )


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


def ids_of(nodes: Tensor | range) -> Tensor:
    """Return the ids as a tensor."""
    return torch.arange(nodes.start, nodes.stop) if isinstance(nodes, range) else nodes


def by_type(ids: Tensor, offsets: Sequence[int]) -> list[Tensor]:
    """Divide increasing ids by the type of the node, which begin at these offsets."""
    return [ids] if len(offsets) == 2 else list(ids.tensor_split(torch.searchsorted(ids, torch.tensor(offsets[1:-1]))))


def _named(arrays: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: array for name, array in arrays.items() if name in names}
