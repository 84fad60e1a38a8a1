"""The home of a graph of which each rank has a shard: ranks ask each other for what batches need of other shards.

The part of a rank is its shard, and the nodes of other shards that a boundary brings along, asked for once:

own rows -> nodes of the first hop -> their rows, asked for -> nodes of the second hop -> ... -> arrays of all nodes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.batches.source import BatchSource, GraphSource, stream_to
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.extensions.passes.layer_pass import FarPass
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard, TypedBounds, check_ranks
from lightning_gnn_dist.extensions.shards.nodes import SHARE_OF_INPUTS, ShardNodes
from lightning_gnn_dist.extensions.shards.questions import EDGES, whole_rows
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph, ShardedSource, check_sampler
from lightning_gnn_dist.extensions.temporal.row_draws import Drawn
from lightning_gnn_dist.graph.graph import Graph, typed_graph, with_arrays
from lightning_gnn_dist.graph.rows import Lookup, induced_rows, senders_by_row, starts_of
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, offsets_of
from lightning_gnn_dist.homes.access import Check, GraphAccess, OnePart, Owners, Seeds, Shown, check_typed
from lightning_gnn_dist.homes.parts import RowSource, around
from lightning_gnn_dist.homes.run import RunContext
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.layers.choice import Judged, bytes_of_batch, widest_row
from lightning_gnn_dist.layers.layered_loader import ReadyRows
from lightning_gnn_dist.layers.through_layers import Layer, ModelLayers, whole_graph_arrays
from lightning_gnn_dist.partition.base import Partition, learned_from
from lightning_gnn_dist.sampling.base import Sampler, SeesByTime
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.wire.channel import Channel, open_channel
from lightning_gnn_dist.wire.collectives import all_gather_rows, gather_objects


def read_part(graph: ShardedGraph, boundary: Boundary, coverage: Coverage | None, seed: int) -> tuple[Graph, Tensor]:
    """Return the part in RAM, and the ids of its nodes in the whole graph: those of the shard first. Collective.

    Of a typed graph, the nodes are in the order of their ids.

    Args:
        graph: The whole graph.
        boundary: Which nodes come along.
        coverage: Writes each node's weight to ``node_arrays["coverage"]``. With None there are no weights.
        seed: Decides everything random.
    """
    residents = graph.ids_of_own(torch.arange(graph.shard.rows.num_nodes))
    source = _Shards(graph)
    boundary.check_fits(source.sizes)
    part, nodes, is_own = around(source, residents, residents, boundary, seed)
    if graph.types.have_names:
        part.node_arrays |= {"n_id": nodes, "train_mask": is_own & learned_from(part, graph.types.seeds)}
    if coverage is not None:
        part.node_arrays["coverage"] = coverage.weights(part, graph.answered(graph.degrees(nodes)), is_own)
    return part, nodes


class _Shards(RowSource):
    """Has the rows of the own nodes, and asks other ranks for theirs, once: a boundary asks for them first.

    Args:
        graph: The whole graph.
    """

    def __init__(self, graph: ShardedGraph) -> None:
        self._graph, self.sizes = graph, _sizes_of_whole(graph)
        self._known: list[tuple[Tensor, Drawn]] = []

    def _rows_of(self, nodes: Tensor) -> Drawn:
        for known, rows in self._known:
            if known is nodes:
                return rows
        self._known.append((nodes, self._graph.answered(whole_rows(self._graph, nodes))))
        return self._known[-1][1]

    def edges_into(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._rows_of(nodes)
        return senders_by_row(starts_of(rows.counts), rows.senders)

    def among(self, nodes: Tensor, hops: list[Tensor]) -> Graph:
        graph, (at, receives) = self._graph, Lookup(torch.cat(hops))(nodes)
        counts, senders, kinds, ids, _ = map(_joined, zip(*map(self._rows_of, hops), strict=True))
        assert counts is not None and senders is not None
        pieces = [nodes[:0]]
        indptr, senders = induced_rows(starts_of(counts), senders, at, nodes, receives, pieces.append)
        kept = torch.cat(pieces)
        kinds = torch.zeros(1, dtype=torch.uint8).expand(len(kept)) if kinds is None else kinds[kept]  # of one type
        local = [nodes[(nodes >= first) & (nodes < end)] for first, end in pairwise(graph.types.offsets)]
        of_types = zip(graph.of_nodes, local, graph.shard.rows.types.offsets, strict=False)
        arrays = [graph.rows_of(table.own, ids, first_row) for table, ids, first_row in of_types]
        types = _types(graph, list(map(len, local)), arrays, kinds, None if ids is None else ids[kept])
        return typed_graph(indptr, senders, types, node_arrays={})


def _joined(column: tuple[Tensor | None, ...]) -> Tensor | None:
    """Return the pieces of a column one after the other, without a copy of a single one; None where none has it."""
    some = [piece for piece in column if piece is not None]
    return some[0] if len(some) == 1 else torch.cat(some) if some else None


def _types(
    graph: ShardedGraph, sizes: list[int], node_arrays: list[dict[str, Tensor]], kinds: Tensor, ids: Tensor | None
) -> GraphTypes:
    """Return the types of a part, with the rows of all arrays, given the types of its edges, and their ids in them."""
    whole = graph.types
    edge_arrays: dict[EdgeType, dict[str, Tensor]] = {kind: {} for kind in whole.edge_types}
    for number in graph.of_edges:
        assert ids is not None
        edge_arrays[whole.edge_types[number]] = graph.answered(graph.rows_at(EDGES, number, ids[kinds == number]))
    num_edges = tuple(torch.bincount(kinds, minlength=len(whole.edge_types)).tolist())
    arrays = dict(zip(whole.node_types, node_arrays, strict=True)), edge_arrays
    time = graph.shard.rows.types.time
    return GraphTypes(
        whole.node_types, offsets_of(sizes), whole.edge_types, num_edges, kinds, *arrays, time, whole.seeds or None
    )


def _sizes_of_whole(graph: ShardedGraph) -> Graph:
    """Return a graph with as many nodes of each type as the whole one, and arrays as wide, that takes no memory.

    A budget of bytes is counted by it. It has no edges, and no ``n_id``, which whole graphs do not have.
    """
    whole, own = graph.types, graph.shard.rows.types
    arrays = {
        kind: {
            name: array.new_zeros(1, *array.shape[1:]).expand(len(whole.nodes_of(kind)), *array.shape[1:])
            for name, array in own.node_arrays[kind].items()
            if name != "n_id"
        }
        for kind in whole.node_types
    }
    none = torch.empty(0, dtype=torch.int64)
    indptr = none.new_zeros(1).expand(whole.offsets[-1] + 1)
    without = {kind: dict[str, Tensor]() for kind in whole.edge_types}
    of_edges = tuple(0 for _ in whole.edge_types), own.edge_type[:0], arrays, without
    return typed_graph(indptr, none, GraphTypes(whole.node_types, whole.offsets, whole.edge_types, *of_edges))


CACHE_BYTES = 1 << 26  # for rows of other shards, unless Loading says more


class ShardHome(GraphAccess):
    """A graph of which each rank has a shard. Its part is the shard, and what the boundary brings along.

    Args:
        path: The folder of this host's shards.
        bounds: Where each shard begins.
        running: The run, and how its batches are made.
        boundary: What becomes of senders outside the own shard.
        coverage: Gives nodes weights for the loss. With None there are none.
        without_labels: Takes from a shard what batches must not show. Default: they show all.
    """

    types: TypedBounds
    folder: Path

    def __init__(
        self,
        path: Path,
        bounds: Bounds,
        running: RunContext,
        boundary: Boundary,
        coverage: Coverage | None,
        without_labels: Shown | None = None,
    ) -> None:
        _check_shards(bounds, running.settings, boundary)
        self.path = self.folder = path
        self.bounds, self.types, self._without_labels = bounds, bounds.types, without_labels
        # What the rank learns that has most, and all that shards before the own one, and all ranks, can learn.
        self._most = self._marked_before = self.num_marked = 0
        super().__init__(running, boundary, coverage)

    # The graph.

    @property
    def fingerprint(self) -> str:
        return self.bounds.fingerprint

    def __str__(self) -> str:
        return repr(str(self.path))

    def split(self, name: str) -> Tensor:
        return self.graph().split(name)

    def graph(self) -> ShardedGraph:
        """Return the whole graph across shards."""
        return self._met()[1]

    def _met(self) -> tuple[Shard, ShardedGraph]:
        """Return the own shard and the whole graph."""
        if "_connected" not in vars(self):
            raise RuntimeError(
                f"A graph in shards ({self.path}) has no batches before its ranks have met: give the data module to "
                'trainer.fit(model, data), or without a trainer, in one process, call setup("fit") first.'
            )
        return self._connected

    @property
    def shard(self) -> Shard:
        """The own shard, with the labels of its edges."""
        return self._met()[0]

    # The run.

    def open(self, check: Check, check_of_all: Check) -> None:
        shard = self._connected[1].shard
        _check_on_all_ranks(lambda: check(shard.rows), shard.index)
        check_of_all(shard.rows)

    def begin_fit(self) -> None:
        if self.exchanges and (num_ranks := self.running.num_ranks) != (num_shards := self.bounds.num_shards):
            raise ValueError(
                f"boundary=Exchange() takes one rank for each shard, and {num_ranks} ranks hold the {num_shards} "
                f"shards of {self.path}: start {num_shards} ranks, divide the graph into {num_ranks} shards, or "
                "take boundary=Halo()."
            )
        _ = self.parts  # now, as all ranks are here

    def count(self, num_own: int, num_marked: int) -> Tensor:
        """Return what each rank learns, given what this one does and what its shard has to be learned. Collective."""
        counts, num_shards = all_gather_rows(torch.tensor([num_own, num_marked])), self.bounds.num_shards
        self._most = int(counts[:, 0].max())
        self.num_marked = int(counts[:num_shards, 1].sum())
        self._marked_before = int(counts[: self.running.rank % num_shards, 1].sum())
        return counts[:, 0]

    def close(self) -> None:
        if "_connected" in vars(self):
            self.graph().close()
        super().close()

    def abort(self) -> None:
        if "_connected" in vars(self):
            self.graph().abort()

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: the rows of other shards, and those in the cache."""
        return self.graph().figures if "_connected" in vars(self) else {}

    @cached_property
    def _connected(self) -> tuple[Shard, ShardedGraph]:
        """The own shard as it was divided, with the labels of its edges, and the whole graph. Collective."""
        check_ranks(self.path, self.bounds, self.running.num_ranks)
        shard, types = Shard.open(self.path, self.running.rank % self.bounds.num_shards), self.types
        marks = all_gather_rows(torch.tensor([self.bounds.mark])).view(-1).tolist()
        if odd := [rank for rank, mark in enumerate(marks) if mark != marks[0]]:  # all raise or none
            raise ValueError(
                f"The shards of ranks {odd} are not of the graph of rank 0, or of another division of it: make all "
                "shards from the same files, assignment and settings, or copy them from one division."
            )
        shard = shard.with_seeds(types.seed_type()) if types.have_names else shard
        return shard, self._opened(replace(shard, rows=self.shown(shard.rows)))

    def _opened(self, shard: Shard) -> ShardedGraph:
        """Return the whole graph across shards. Collective."""
        cache_bytes = self.running.settings.loading.cache_bytes
        channel = open_channel(self.bounds.num_shards)
        return ShardedGraph(shard, channel, cache_bytes=CACHE_BYTES if cache_bytes is None else cache_bytes)

    # The part.

    def partition(self, num_parts: int) -> Partition:
        raise ValueError(
            f"{self.path} holds shards, and no rank knows which node is in which: the graph was cut when it was "
            "divided, and the partition that divided it says so."
        )

    @cached_property
    def parts(self) -> OnePart:
        """The own shard and what the boundary brings along, in RAM. Collective, the first time.

        They are the own rows as they are on disk where batches are drawn in the whole graph, and with an exchange,
        whose batch holds what it needs.
        """
        if self.exchanges or self.boundary.sees_whole_graph:
            return OnePart(self.graph().shard.rows)
        return OnePart(self._read_part())

    def _read_part(self) -> Graph:
        """Return the part, with the labels of its edges. Collective."""
        how = self.boundary, self.coverage, self.running.settings.seed_of_parts
        if self._without_labels is None:
            return read_part(self.graph(), *how)[0]
        graph = self._opened(self.shard)  # for this once, as no batch may ask for labels
        try:
            part, _ = read_part(graph, *how)
        except BaseException:
            graph.abort()  # its threads would wait for ranks that never answer
            raise
        graph.close()
        return part

    def shown(self, part: Graph) -> Graph:
        return part if self._without_labels is None else self._without_labels(part)

    def of_copy(self) -> slice:
        """Return which of the shard's seeds this rank takes; ranks with the same shard take turns."""
        num_shards = self.bounds.num_shards
        return slice(self.running.rank // num_shards, None, self.running.num_ranks // num_shards)

    # The nodes that are learned.

    def settle_seeds(self) -> None:
        marked = self._marked()
        counts = self.count(len(marked[self.of_copy()]), len(marked))
        if not self.exchanges and bool((counts == 0).any()):
            rank = int(counts.argmin())
            raise ValueError(
                f"Shard {rank % self.bounds.num_shards} of {self.path} has no training nodes for rank {rank} of "
                f"{len(counts)}, which would have nothing to learn from: divide the graph by "
                'MetisPartitioner(balance="train"), or use fewer shards or ranks.'
            )

    def most_seeds(self) -> int:
        self.graph()  # refuses, if it is too early
        return self._most

    def seeds_of(self, part: Graph) -> Seeds:
        own, num_marked = self._own_seeds(part), len(self._marked())
        asked = self.graph().ids_of_own(own) if self.boundary.sees_whole_graph else own
        return Seeds(own, asked, self._marked_before + torch.arange(num_marked)[self.of_copy()])

    def _marked(self) -> Tensor:
        """Return all training nodes of the shard."""
        return self.graph().shard.rows.split("train")

    def _own_seeds(self, part: Graph) -> Tensor:
        """Return this rank's share of the training nodes, by their ids in a part."""
        seeds = self._marked()[self.of_copy()]
        rows = self.graph().shard.rows
        if part is not rows and part.types.have_names:  # nodes of others stand between the own ones
            seeds, _ = Lookup(part.node_arrays["n_id"])(self.graph().ids_of_own(seeds))
        return seeds

    # Batches.

    def training_source(self, part: Graph, sampler: Sampler) -> BatchSource:
        if self.boundary.sees_whole_graph:
            return self.whole_source(sampler)
        if part.types.have_names:
            sampler.sample_bulk(part, [], [])  # refuses the part, or draws nothing
        return GraphSource(self.shown(part), sampler, **self.running.options_of_sources)

    def whole_source(self, sampler: Sampler, *, evaluates: bool = False) -> ShardedSource:
        run, stream = self.running, stream_to(self.running.device)
        loading = run.settings.loading
        return ShardedSource(self.graph(), sampler, loading, stream=stream, widen=run.widen)

    # What an evaluation costs, measured by draws.

    @property
    def place(self) -> int:
        """The place of the share that lies mostly in the own shard."""
        copy, shard = divmod(self.running.rank, self.bounds.num_shards)
        return shard * (self.running.num_ranks // self.bounds.num_shards) + copy

    def size_of_evaluation(self, judged: Judged, sampler: Sampler, model: ModelLayers | None) -> int:
        """Double the training batch as long as the neighbourhood of a batch fits all ranks' budgets. Collective.

        Trees by time share no nodes: a batch of them is never larger than in training, and halved where it must be.
        """
        size, most = self.running.settings.batch_size, judged.most
        if self.running.settings.evaluation.sampler is not None or model is not None:
            return size
        share, of_nodes = judged.share(self.place), self.running.sampler_of_evaluation()
        if isinstance(of_nodes, SeesByTime):
            while size > 1 and not self._fits(share[:size], sampler):
                size //= 2
            return size
        while size < most and self._fits(judged.nodes_of(share[: 2 * size]), of_nodes):
            size *= 2
        return size

    def ready_rows(self, judged: Judged, batch_size: int, model: ModelLayers | None) -> ReadyRows | None:
        if model is None:
            return None
        run, folder = self.running, self.path.resolve().parent
        if model.norm is not None and judged.num_ranks > 1:
            raise ValueError(
                f"{model.norm} takes the rows of all nodes at once, and no rank has those of a sharded graph: choose a "
                "norm of single rows such as BatchNorm, or give every host the whole graph."
            )

        def pass_of(model: ModelLayers, channel: Channel, own: Callable[[], Tensor]) -> FarPass:
            most = run.bytes_of_evaluation // SHARE_OF_INPUTS
            nodes = ShardNodes(self.graph().shard, model.layers, channel, most, folder, widen=run.widen)
            seeds = own() if model.norm is None else torch.arange(nodes.most_rows)
            return FarPass(nodes, channel, run.work, model.norm, folder).plan_for(seeds, len(model.layers))

        assert run.trainer is not None
        return ReadyRows(run.trainer, pass_of, judged.num_ranks)

    def bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        sizes = dict[int, int]()
        small, num_hops = list(range(len(some))), self.running.sampler_of_evaluation(1).num_hops
        for hops in range(1, num_hops + 1):  # hop by hop, so that what is large is never drawn whole
            samples = self._drawn([some[at] for at in small], NeighborSampler([-1] * hops))
            grown = {at: sample for at, sample in zip(small, samples, strict=True) if sample.num_sampled_edges[-1]}
            sizes = {at: size for at, sample in grown.items() if (size := self._bytes_of(sample)) <= most}
            small = list(sizes)
        return [sizes.get(at) for at in range(len(some))]

    def _fits(self, seeds: Tensor, sampler: Sampler) -> bool:
        """Return whether batches of each rank's seeds fit the budgets of all ranks. Collective."""
        (sample,) = self._drawn([seeds], sampler)
        return int(all_gather_rows(torch.tensor([self._bytes_of(sample)])).max()) <= self.running.bytes_of_evaluation

    def _drawn(self, seeds: list[Tensor], sampler: Sampler) -> list[Sample]:
        graph, keys = self.graph(), [BatchKey(0, 0, 0)] * len(seeds)
        return graph.answered(graph.draw(sampler, seeds, keys))

    def _bytes_of(self, sample: Sample) -> int:
        rows, widest = self.graph().shard.rows, widest_row(self.running.module)
        return bytes_of_batch(rows, widest, len(sample.nodes), len(sample.indices))

    # Rows of nodes outside the part.

    def with_senders(self, part: Graph, layers: list[Layer]) -> tuple[Graph, Tensor, Owners]:
        shard = self.graph().shard
        found, ids = read_part(self.graph(), self.boundary, None, self.running.settings.seed_of_parts)
        own, seeds = whole_graph_arrays(layers, shard.rows, shard.first_node), self._own_seeds(found)
        return (
            with_arrays(found, self.graph().rows_of(own, ids) if own else own),
            seeds,
            Owners(ids, self.types.owners(ids)[0]),
        )


def _check_shards(bounds: Bounds, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse settings, boundaries and samplers that do not work without the whole graph, or not with its types."""
    if not boundary.takes_shards:
        raise ValueError(f"boundary must be Isolated(), Halo(), Exchange() or Fetch() for shards, got {boundary}.")
    if settings.loading.sample_on != "cpu":
        raise ValueError(f'sample_on must be "cpu" for shards, whose batches are made in RAM, got {settings.loading}.')
    check_typed(bounds.types, settings)
    across = [settings.correction_sampler]  # these are asked of the ranks that own what they draw
    across += [settings.of_evaluation()] if bounds.types.have_names else []
    across += [settings.training_sampler] if boundary.sees_whole_graph else []
    for sampler in across:
        check_sampler(sampler, bounds.types)


def _check_on_all_ranks(check: Callable[[], None], shard: int) -> None:
    """Check the own shard. All ranks raise or none: whose shard is right says why another is refused. Collective.

    Args:
        check: Raises a ValueError if the shard is refused.
        shard: The number of the own shard.
    """
    refusal: ValueError | None = None
    try:
        check()
    except ValueError as error:
        refusal = error
    texts = gather_objects("" if refusal is None else f"Shard {shard}: {refusal}", everywhere=True) or []
    if refusal is not None:
        raise refusal
    if others := [text for text in texts if text]:
        raise ValueError(others[0])
