"""The whole graph as one rank sees it: its own rows are memory-mapped, and it asks other ranks for theirs.

    ids -> the ranks that own them -> their answers -> back in the order of the ids
    frontier -> its owners draw neighbours, hop by hop -> ... -> the rows of all nodes of a bulk, others' fetched once

Batches are the same, bit for bit, as where every host has the graph. Ranks answer at any time (``asking``), so that
each asks for what it needs when it likes, in the background too. The few methods that are collective say so: all
ranks of a channel call them together, also those that need nothing.

LADIES takes P = Q A, row by row: the owners of a bulk's frontier nodes send their rows, once for all batches of the
bulk. Importances are sums of squares over the rows, and floating point sums depend on their order. So owners send the
entries of their rows in order, and the rank that makes the batch adds them up as one host would. Entries take 4 bytes
an edge; sums would take 12 for each sender, and the chosen edges would still have to be sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import BufferPool
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.engine.layer_kernels import LayerDraws
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.weighted import NONE
from lightning_gnn_dist.extensions.asking.asking import Asking
from lightning_gnn_dist.extensions.asking.turns import Result, Steps, answered
from lightning_gnn_dist.extensions.larger_than_memory.ahead import AheadSource, Arrays, RowCache, Table, Tables
from lightning_gnn_dist.extensions.links.link_sampler import FALSE_ENDS, FalseEnds, Home, LinkSampler
from lightning_gnn_dist.extensions.links.negatives import RANDOM_TRIES, tried_places
from lightning_gnn_dist.extensions.shards.index import Shard, TypedBounds
from lightning_gnn_dist.extensions.shards.questions import (
    DEGREES,
    EDGES,
    LINKED,
    NODES,
    DrawRule,
    Join,
    Message,
    Owner,
    Question,
    Route,
    answer_of,
    ask_owners,
    draw_hops,
    letters_of,
    narrow,
    sample_at_times,
    sample_layer,
    whole_rows,
)
from lightning_gnn_dist.extensions.temporal.row_draws import Drawn, GrowingBatch
from lightning_gnn_dist.extensions.temporal.temporal_sampler import TemporalSampler
from lightning_gnn_dist.extensions.temporal.times import TimeOrder, TimeSource, node_times, ordered, sources_of
from lightning_gnn_dist.graph.rows import bytes_per_row, starts_of, take_rows
from lightning_gnn_dist.graph.typed.types import TypeNames
from lightning_gnn_dist.homes.settings import Loading
from lightning_gnn_dist.sampling.base import Sampler, check_seeds
from lightning_gnn_dist.sampling.layer_wise import LadiesSampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.channel import Channel

BYTES_OF_A_ROUND = 1 << 26  # of rows of other ranks that are asked for at once
_FIRST_TRIES = 2  # of false receivers, asked at once for all draws: both are edges so seldom that no turn follows
_BLOCK, _LARGEST_BLOCK = 64, 1 << 14  # nodes in order that are asked about at once, twice as many each time

ShardedSampler = NeighborSampler | TemporalSampler | LadiesSampler | LinkSampler


def check_sampler(sampler: object, types: TypeNames) -> ShardedSampler:
    """Return the sampler; refuse one that needs the whole graph on one host, or that knows none of the types."""
    if isinstance(sampler, LinkSampler):
        check_sampler(sampler.sampler, types)
        return sampler
    if isinstance(sampler, NeighborSampler | TemporalSampler):
        sampler.of_types(types)  # refuses numbers of other types
        return sampler
    if types.have_names:
        raise ValueError(
            f"A typed graph in shards is sampled by NeighborSampler or TemporalSampler, got {shown(sampler)}: choose "
            "one of these, or give every host the whole graph."
        )
    if isinstance(sampler, LadiesSampler):
        return sampler
    raise ValueError(
        f"A sharded graph is sampled by NeighborSampler, TemporalSampler or LadiesSampler, got {shown(sampler)}: "
        "others ask for edges among nodes of several hosts. Choose one of these, or give every host the whole graph."
    )


class ShardedGraph(Tables[TypedBounds]):
    """A graph of which each rank of a channel holds one shard. Making one is collective.

    Args:
        shard: This rank's shard. Rank ``i`` of the channel has shard ``i``.
        channel: The ranks that hold all shards together.
        cache_bytes: Memory for rows of other ranks that coming bulks need again.

    Attributes:
        types: Which rank owns which ids of each type; a graph without types counts as one of one type.
        rows: The rows of the own shard.
        orders: The shard's edges in the order of times, by the names of times.
    """

    def __init__(self, shard: Shard, channel: Channel, *, cache_bytes: int = 0) -> None:
        if channel.size != shard.bounds.num_shards or channel.rank != shard.index:
            raise ValueError(
                f"Rank {channel.rank} of {channel.size} needs shard {channel.rank} of {channel.size}, and has shard "
                f"{shard.index} of {shard.bounds.num_shards}: divide the graph into as many shards as ranks hold it "
                "together."
            )
        self.shard, self.channel, self.types = shard, channel, shard.bounds.types
        self.rows, self.num_nodes = shard.rows, int(shard.bounds.nodes[-1])
        self.orders: dict[str, TimeOrder] = {}
        pool = BufferPool(2 * channel.size)  # for rows on their way, so that the system need not clear new memory
        self._owner = Owner(self.rows, self.types, shard.index, pool, self.orders)
        self._asking = Asking(channel, partial(answer_of, self._owner), pool.take)
        self._splits: dict[str, Tensor] = {}
        of_nodes = list(self._tables(NODES, cache_bytes).values())
        super().__init__(self.types, of_nodes, self._tables(EDGES), cache_bytes)

    def split(self, name: str) -> Tensor:
        """Return the ids of all nodes of the whole graph that ``<name>_mask`` marks, increasing. Collective."""
        if name not in self._splits:
            self._splits[name] = self._of_all(self.ids_of_own(self.rows.split(name)))
        return self._splits[name]

    def _of_all(self, own: Tensor) -> Tensor:
        """Return what all ranks give, one after the other. Collective."""
        return torch.cat(self.channel.exchange([own] * self.channel.size))

    def close(self) -> None:
        """End the connections, when the other ranks need nothing more of this one. Collective."""
        self._asking.close()
        self.channel.close()

    def abort(self) -> None:
        """End the connections at once; who asks gets an error, in the background too. Not collective."""
        self._asking.abort()
        self.channel.close()

    def ask(self, questions: list[Question]) -> list[list[Message]]:
        """Return for each question the answer of each rank, the own one too, in one exchange."""
        return ask_owners(self._asking, self._owner, questions)

    def answered(self, steps: Steps[Result]) -> Result:
        """Do at once what asks other ranks."""
        return answered(steps, self.ask)

    # Batches, one sample for each. Their ``edge_ids`` count in the edges' types.

    def draw(self, sampler: Sampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Steps[list[Sample]]:
        """Draw what a sampler draws from the whole graph. By time it is collective, the first time for each name."""
        sampler = check_sampler(sampler, self.types)
        if isinstance(sampler, LinkSampler):
            asked = partial(sample_at_times, self), self.false_ends, partial(self.array_of, EDGES)
            home = Home(self.rows, self.num_nodes, self.ids_of_own, self.draw, *asked)
            return (yield from sampler.sample_across(home, seeds, keys))
        if isinstance(sampler, LadiesSampler):
            return (yield from self._layer_wise(sampler, seeds, keys))
        if isinstance(sampler, TemporalSampler):
            self.order_by(sampler.time)
            times = yield from self._times_of_seeds(seeds, sampler)
            return (yield from sample_at_times(self, sampler, seeds, times.split(list(map(len, seeds))), keys))
        growing = [GrowingBatch(ids, self.num_nodes, number) for number, ids in enumerate(seeds)]
        how = DrawRule(sampler.replace, sampler.weight)
        return (yield from draw_hops(self, growing, sampler.of_types(self.types), keys, how))

    def order_by(self, name: str) -> None:
        """Order the own edges by the times called ``name``, for draws by time. Collective, the first time."""
        if name in self.orders:
            return
        types, sources = self.rows.types, list(sources_of(self.rows, name))
        for number, source in enumerate(sources):
            if source is not None and source.first_sender is not None:  # who may be another rank's
                kind = types.edge_types[number]
                sender = types.node_types.index(kind[0])
                ids = self.rows.indices[types.edges_of(kind)].to(torch.int64) - self.types.offsets[sender]
                sources[number] = TimeSource(self.answered(self.array_of(NODES, sender, name, ids)), None)
        self.orders[name] = ordered(self.rows, sources)
        self._of_all(torch.empty(0))  # from now on each rank answers

    def times_of_all_nodes(self, number: int, name: str) -> Tensor:
        """Return the times called ``name`` of all nodes of a type. Collective."""
        return self._of_all(self.rows.types.node_arrays[self.types.node_types[number]][name][:])

    def _times_of_seeds(self, seeds: Sequence[Tensor], sampler: TemporalSampler) -> Steps[Tensor]:
        """Return the time of each seed of all batches."""
        for ids in seeds:
            check_seeds(ids, self.num_nodes)
            refuse_repeated(ids, "To ask for a node at several times, give it a copy for each")
        kind, ids, name = self.types.seed_type(), torch.cat(list(seeds)), sampler.sight[1]
        of_type = self.types.nodes_of(kind)
        if ids.numel() and not of_type.start <= int(ids.min()) <= int(ids.max()) < of_type.stop:
            raise ValueError(
                f"The seeds of a batch by time must be nodes of type {kind!r}, which the shards learn from."
            )
        node_times(self.rows, name, kind)  # refuses an array that is not there
        return (yield from self.array_of(NODES, self.types.node_types.index(kind), name, ids - of_type.start))

    def _layer_wise(
        self, sampler: LadiesSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]
    ) -> Steps[list[Sample]]:
        batches, none = [GrowingBatch(ids, self.num_nodes) for ids in seeds], np.empty(0)
        for hop in range(sampler.num_hops):
            frontiers = [batch.frontier for batch in batches]
            nodes, places = torch.cat(frontiers).unique(return_inverse=True)
            rows = yield from whole_rows(self, nodes, sampler.weight)
            starts, values = starts_of(rows.counts), NONE if rows.weights is None else rows.weights.numpy()
            layers = LayerDraws(np.array(sampler.num_nodes, np.int64), values, none, none, sampler.normalize)
            for batch, at, batch_key in zip(batches, places.split(list(map(len, frontiers))), keys, strict=True):
                known, work, table = batch.open(rows.senders, int((starts[at + 1] - starts[at]).sum()))
                csr, begin = (starts.numpy(), rows.senders.numpy(), at.numpy()), len(known) - len(at)
                found = sample_layer(*csr, known, begin, key(*batch_key, hop), hop, layers, work, table)
                ends = torch.from_numpy(work.starts[begin : len(known) + 1].copy())
                drawn = work.positions, work.weights
                positions, weights = (torch.from_numpy(of[: int(ends[-1])].copy()) for of in drawn)
                edge_ids = None if rows.edge_ids is None else rows.edge_ids[positions]
                batch.add(found, work, Drawn(ends.diff(), rows.senders[:0], None, edge_ids, weights))
        return [batch.sample() for batch in batches]

    def false_ends(self, wanted: FalseEnds) -> Steps[list[Tensor]]:
        """Draw false receivers for the edges of some batches, and return those of each batch, shape (n, draws).

        They are those that are drawn where one host has the graph, also for a sender with an edge to every candidate:
        first tries of all draws -> their owners -> the other random tries of those that are edges -> nodes in order.
        """
        sizes, draws = list(map(len, wanted.ids)), wanted.draws
        words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in wanted.keys], np.uint64).view(np.int64))
        words, numbers = words.repeat_interleave(torch.tensor(sizes)), torch.cat(list(wanted.ids))
        ends, times = torch.cat(list(wanted.ends), 1), None
        if wanted.times is not None:
            times = wanted.times[0], torch.cat(list(wanted.times[1]))
        bounds = wanted.candidates.there_by(ends[0] if times is None else times[1]).clamp_(min=1)
        found, left = torch.empty(len(numbers) * draws, dtype=torch.int64), torch.arange(len(numbers) * draws)
        end, upto = 0, RANDOM_TRIES + (int(bounds.max()) if len(numbers) else 0)
        blocks = (min(_BLOCK << number, _LARGEST_BLOCK) for number in count(0))
        for size in chain([_FIRST_TRIES, RANDOM_TRIES - _FIRST_TRIES], blocks):
            if end == upto or not len(left):
                break
            tries = range(end, end := min(end + size, upto))  # are asked about together
            edges, most = left // draws, RANDOM_TRIES + bounds[left // draws]
            places = tried_places(words[edges], numbers[edges], left % draws, tries, bounds[edges])
            tried = wanted.candidates.ids(places)
            is_tried = torch.arange(tries.start, tries.stop) < most[:, None]
            is_free = is_tried & (tried != ends[:, edges, None]).all(0)
            rows, columns = is_free.nonzero(as_tuple=True)
            if len(rows):
                at = None if times is None else (times[0], times[1][edges[rows]])
                pairs = torch.stack([ends[0, edges[rows]], tried[rows, columns]])
                is_free[rows, columns] = ~(yield from self.are_edges(pairs, wanted.edge_type, at))
            is_found = is_free.any(1)  # or the one tried last
            column = torch.where(is_found, is_free.to(torch.uint8).argmax(1), is_tried.sum(1) - 1)
            found[left] = tried[torch.arange(len(left)), column]
            left = left[~is_found & (most > end)]
        return list(found.view(len(numbers), draws).split(sizes))

    # What is asked of other ranks.

    def degrees(self, nodes: Tensor) -> Steps[Tensor]:
        """Return the in-degrees of some nodes, in their order."""
        route, questions = self.to_owners(nodes)
        (answers,) = yield [Question(DEGREES, questions)]
        return route.restore([answer[0] for answer in answers])

    def rows_of(self, arrays: dict[str, Tensor], ids: Tensor, first_row: int = 0) -> dict[str, Tensor]:
        """Return the rows of some nodes of arrays that each rank has of its own ones. Collective.

        Others' rows come in rounds that bound what else is held. A round takes every so-manieth node: consecutive ones
        are mostly of one rank, which would answer all ranks while the others wait.

        Args:
            arrays: The arrays of the own nodes, in RAM or mapped.
            ids: The nodes whose rows are wanted, with all own ones, in their order.
            first_row: The row of the shard that these arrays begin with.
        """
        (owners, rows), names = self.types.owners(ids), sorted(arrays)
        is_other = owners != self.shard.index
        full = {name: arrays[name].new_empty((len(ids), *arrays[name].shape[1:])) for name in names}
        for name, out in full.items():
            out[~is_other] = arrays[name]
        others = is_other.nonzero().view(-1)
        counts = torch.cat(self.channel.exchange([torch.tensor([len(others)])] * self.channel.size))
        rounds = -(-int(counts.max()) * bytes_per_row(arrays) // BYTES_OF_A_ROUND)
        for at in (others[start::rounds] for start in range(rounds)):
            route = Route(owners[at], self.channel.size)
            asked = [some - first_row for some in self.channel.exchange(route.pieces(rows[at]))]
            for name in names:
                answers = [take_rows(arrays[name], some) for some in asked]
                full[name][at] = route.restore(self.channel.exchange(answers, route.sizes))
        return full

    def fetched(self, kind: int, number: int, ids: Tensor, name: str | None = None) -> Steps[Arrays]:
        """Return rows of a type of nodes or edges, for increasing ids in it.

        Args:
            kind: ``NODES`` or ``EDGES``.
            number: The number of the type.
            ids: The ids.
            name: The array that is asked for. Default: all.
        """
        arrays, bounds = self._of_kind(kind)
        pieces = ids.split(torch.searchsorted(ids, bounds[number]).diff().tolist())
        of_ranks = zip(pieces, bounds[number].tolist(), bounds[number].diff().tolist(), strict=False)
        more = torch.tensor([number]), letters_of(name)
        (answers,) = yield [Question(kind, [[narrow(some - low, most), *more] for some, low, most in of_ranks])]
        names = sorted(arrays[number]) if name is None else [name]
        return {each: _joined([answer[at] for answer in answers]) for at, each in enumerate(names)}

    def rows_at(self, kind: int, number: int, ids: Tensor, name: str | None = None) -> Steps[Arrays]:
        """Return rows of a type for some ids in it, in any order; the arguments are those of :meth:`fetched`."""
        distinct, at = ids.unique(return_inverse=True)
        rows = yield from self.fetched(kind, number, distinct, name)
        return {each: array[at] for each, array in rows.items()}

    def array_of(self, kind: int, number: int, name: str, ids: Tensor) -> Steps[Tensor]:
        """Return what an array of a type holds for some ids in it, in any order."""
        return (yield from self.rows_at(kind, number, ids, name))[name]

    def to_owners(self, nodes: Tensor, *columns: Tensor) -> tuple[Route, list[Message]]:
        """Divide some nodes, and a number or more that goes with each, among their owners: a question for each.

        A question begins with the nodes as rows of the owner's shard.
        """
        owners, rows = self.types.owners(nodes)
        route, sizes = Route(owners, self.channel.size), self.shard.bounds.nodes.diff().tolist()
        local = [narrow(some, most) for some, most in zip(route.pieces(rows), sizes, strict=True)]
        return route, [list(of_rank) for of_rank in zip(local, *map(route.pieces, columns), strict=True)]

    def in_order(self, route: Route, answers: list[Message]) -> tuple[Tensor, Tensor, Join]:
        """Bring what owners have drawn into order; refuse ids outside the graph, which would index beyond a table."""
        counts, senders, join = route.in_order(answers)
        low, high = (int(end) for end in senders.aminmax()) if senders.numel() else (0, -1)
        if low < 0 or high >= self.num_nodes:
            raise ValueError(
                f"A rank has an edge from node {low if low < 0 else high}, but ids lie in [0, {self.num_nodes}): its "
                "shard was changed after it was opened. Copy the shards again."
            )
        return counts, senders, join

    def are_edges(
        self, edges: Tensor, edge_type: int | None = None, at: tuple[str, Tensor] | None = None
    ) -> Steps[Tensor]:
        """Return whether the graph has each of some edges: a bool for each.

        Args:
            edges: Senders and receivers, by their ids in the whole graph, shape (2, n).
            edge_type: Of a typed graph the number of the one type to look at.
            at: The name of times whose order is prepared, and when each edge must be there, as an integer. Default: at
                any time.
        """
        senders = edges[0].to(self.rows.indices.dtype)
        kind = torch.tensor([] if edge_type is None else [edge_type])
        (name, times), none = ("", []) if at is None else (at[0], [at[1]]), torch.empty(0, dtype=torch.int64)
        route, questions = self.to_owners(edges[1].contiguous(), senders, *times)
        asked = [[rows, of, kind, *(when or [none]), letters_of(name)] for rows, of, *when in questions]
        (answers,) = yield [Question(LINKED, asked)]
        return route.restore([answer[0] for answer in answers])

    def ids_of_own(self, rows: Tensor) -> Tensor:
        """Return the ids in the whole graph of some rows of the own shard."""
        return self.types.to_whole(self.shard.index, rows)

    def _of_kind(self, kind: int) -> tuple[list[Arrays], Tensor]:
        """The own arrays of each type of nodes or edges, and where each shard's begin."""
        types = self.rows.types
        if kind == NODES:
            return [dict(own) for own in types.node_arrays.values()], self.types.nodes
        return [dict(own) for own in types.edge_arrays.values()], self.types.edges

    def _tables(self, kind: int, cache_bytes: int = 0) -> dict[int, Table]:
        """The rows of each type of nodes, or of those types of edges that have arrays: nobody may count the others."""
        (arrays, bounds), found = self._of_kind(kind), dict[int, Table]()
        for number, own in enumerate(arrays):
            if kind == NODES or own:
                first, end = bounds[number, self.shard.index : self.shard.index + 2].tolist()
                width = bytes_per_row(own)
                most = min(cache_bytes // width, int(bounds[number, -1]) - (end - first)) if width else 0
                fetch = partial(self.fetched, kind, number)
                found[number] = Table(own, first, end - first, RowCache(own, most), fetch)
        return found


class ShardedSource(AheadSource):
    """Makes the batches that a source of the whole graph would make.

    Rows of other ranks are asked for once for all nodes of a bulk, in the background where that is wished. Making a
    source is collective with a ``TemporalSampler``; making batches is not.

    Args:
        graph: The graph to sample.
        sampler: A ``NeighborSampler`` or ``LadiesSampler``, or one that samples by time or around edges.
        loading: How batches are made.
        options: What :class:`AheadSource` takes.
    """

    def __init__(self, graph: ShardedGraph, sampler: object, loading: Loading, **options: Any) -> None:
        super().__init__(graph, partial(graph.draw, check_sampler(sampler, graph.types)), loading, **options)
        if isinstance(sampler, TemporalSampler):
            graph.order_by(sampler.time)  # now, as all ranks are here, and not in the background


def _joined(pieces: list[Tensor]) -> Tensor:
    """The rows of several tensors, copied only if there are several."""
    filled = [piece for piece in pieces if len(piece)]
    return torch.cat(filled) if len(filled) > 1 else (filled or pieces)[0]
