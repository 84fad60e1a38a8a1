"""The data module of a sharded graph: a rank has its shard, and asks other ranks for what batches need of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.ahead.row_cache import figures_of
from lightning_gnn_dist.batches.global_batches import OwnSeeds
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.placement import device_of, stream_to
from lightning_gnn_dist.batches.precision import type_that_stays
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Fetch, Halo, Isolated, check_boundary
from lightning_gnn_dist.boundary.exchange_plan import Owners
from lightning_gnn_dist.boundary.exchange_refusals import check_whole_part
from lightning_gnn_dist.checks import check_at_least, check_path, check_true_or_false
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.exchanging import ExchangingDataModule
from lightning_gnn_dist.data.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.data.temporal.checks import check_temporal
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.evaluation.choice import Evaluated, bytes_of_batch, widest_row
from lightning_gnn_dist.evaluation.layered_loader import ReadyRows
from lightning_gnn_dist.evaluation.model_layers import ModelLayers
from lightning_gnn_dist.evaluation.shard_nodes import ShardNodes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.layerwise.layers import Layer
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.prepare.shard import Bounds, Shard, check_ranks, check_same
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.part import read_part
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import check_sampler, sample_bulk
from lightning_gnn_dist.sharded.source import ShardedSource
from lightning_gnn_dist.sharded.typed.checks import check_typed_shards, with_seed_type
from lightning_gnn_dist.sharded.typed.graph import TypedShardedGraph
from lightning_gnn_dist.wire.channel import Channel, open_channel
from lightning_gnn_dist.wire.collectives import all_gather_rows


class ShardedDataModule(ExchangingDataModule):
    """Like :class:`PartitionedDataModule`, for a graph of which every host has a shard and none has all.

    Training batches come from the rank's own shard alone, unless ``boundary`` says more. Corrections, evaluation and
    prediction sample across all shards: the ranks that own the rows draw neighbours, and features are fetched once for
    all nodes of a bulk, in the background, before they are due. Batches and metrics are the same as if every rank had
    the whole graph, with nodes and edges in the order of the shards.

    With more ranks than shards, several ranks hold the same shard: ``2 n`` ranks of ``n`` shards form two groups that
    never ask each other, and divide the training nodes of a shard among them. ``boundary=Exchange()`` takes a rank for
    each shard.

    Args:
        path: A folder that :func:`save_shards` wrote. Rank ``r`` needs its ``shares.json`` and shard ``r % n``.
        sampler: How training batches are drawn. Default: ``NeighborSampler([15, 10])``.
        batch_size: Training nodes (seeds) in a batch, at most.
        seed: Decides everything random: the order of seeds, the neighbours.
        loading: How batches are made: bulks, threads, and the memory for batches that are asked for ahead.
        boundary: What becomes of senders outside the own shard: :class:`Isolated`, :class:`Halo`, :class:`Exchange` or
            :class:`Fetch`. What ``Halo`` and ``Exchange`` need of other shards is asked for once, when the fit starts.
        cache_bytes: Memory for rows of other shards, of which those stay that the coming bulks need soonest. 0: none
            is kept.
        coverage: Gives each batch ``batch.coverage``, as weights for the loss. With None there are none.
        evaluation: How the whole graph is sampled to evaluate a model. Default: all neighbours, which is exact.
        global_batching: How the whole graph is sampled for corrections: by a ``NeighborSampler``, a ``LadiesSampler``
            or a ``FastGCNSampler``. The last one keeps a number for every node of the graph.
        seed_type: Of a typed graph the node type that is learned from and evaluated. Default: the one that had a
            ``train_mask``, or that :meth:`Graph.with_seeds` had chosen, when the graph was divided.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        seed: int = 0,
        loading: Loading = Loading(),  # noqa: B008  # frozen, as all of these
        boundary: Boundary = Isolated(),  # noqa: B008
        cache_bytes: int = 1 << 26,
        coverage: Coverage | None = Coverage(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        global_batching: GlobalBatching = GlobalBatching(),  # noqa: B008
        seed_type: str | None = None,
    ) -> None:
        settings = BatchSettings(sampler, batch_size, seed, loading, evaluation, global_batching)
        if isinstance(boundary, Exchange):
            check_whole_part(sampler)
            coverage = None  # nothing is lost
        super().__init__(settings, coverage, boundary)
        check_at_least(0, cache_bytes=cache_bytes)
        self._check_settings()
        self.path = check_path("path", path)
        self.bounds = with_seed_type(Bounds.read(self.path), seed_type, self.path)
        self._check_samplers()
        self.cache_bytes = cache_bytes
        self._graph: ShardedGraph | None = None
        self._part: Graph | None = None
        # Training nodes of the rank that has most, of the shards before, and of all ranks.
        self._most = self._marked_before = self._num_marked = 0

    @property
    def fingerprint(self) -> str:
        """A hash of the graph, by which a strategy sees whether all ranks have the same one."""
        return self.bounds.fingerprint

    @property
    def shards_path(self) -> Path:
        """The folder of this host's shards."""
        return self.path

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph; of a typed one, those of the type that is learned from."""
        return len(self._ids())

    def _ids(self) -> range:
        types = self.bounds.types
        return range(int(self.bounds.nodes[-1])) if types is None else types.nodes_of(types.seed_type())

    def _nodes_to_predict(self) -> Tensor:
        return torch.arange(self._ids().start, self._ids().stop)

    def _title(self) -> str:
        return repr(str(self.path))

    def _features(self) -> Tensor | None:
        is_known = self._graph is not None and self.bounds.types is None
        return self._whole_graph().shard.rows.node_arrays.get("x") if is_known else None

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        """Open the own shard, and connections to the other ranks. Collective."""
        super().setup(stage)
        if self._graph is None:
            self._graph = self._connect()
        if self.bounds.types is not None:
            check_temporal(self._graph.shard.rows, self._settings, self.boundary)
        if stage == "fit":
            self._check_copies()
            self._running_part()  # now, as all ranks are here
            counts = all_gather_rows(torch.tensor([self._own_seeds().numel(), self._marked().numel()]))
            self._check_seeds(counts[:, 0])
            self._most = int(counts[:, 0].max())
            self._num_marked = int(counts[:, 0].sum())
            self._marked_before = int(counts[: self._rank() % self.bounds.num_shards, 1].sum())

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        if self._graph is not None:
            self._graph.close()
        self._graph = self._part = None

    def on_exception(self, exception: BaseException) -> None:
        if self._graph is not None:  # first, as a thread may wait for a rank that will never answer
            self._graph.abort()
        super().on_exception(exception)

    # What strategies ask for.

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        """Yield this rank's slices of batches ``start`` to ``stop`` of the whole graph in a round. Collective."""
        check_true_or_false(sliced=sliced)
        if not sliced:
            raise ValueError(
                'correction="rank0" computes a batch of the whole graph on one rank, and of a sharded graph no rank '
                'can make one alone: use correction="sliced".'
            )
        return super().correction_batches(round_idx, start=start, stop=stop)

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: how long training waited for data, the rows of other shards, and those in the cache."""
        if self._graph is None:
            return super().figures
        cache = self._graph.cache
        return super().figures | figures_of(cache.asked, cache.hits, cache.fetched_bytes)

    # What it is made of.

    def _check_settings(self) -> None:
        """Refuse settings that do not work without the whole graph."""
        given: object = self.boundary
        if not isinstance(given, str) or given != "auto":  # it is refused below, as what it stands for is
            check_boundary(given)
        if not isinstance(self.boundary, Isolated | Halo | Exchange | Fetch):
            raise ValueError(
                f"boundary must be Isolated(), Halo(), Exchange() or Fetch() for shards, got {self.boundary}."
            )
        if self.loading.sample_on != "cpu":
            raise ValueError(f'sample_on must be "cpu" for shards, whose batches are made in RAM, got {self.loading}.')
        if self.loading.cache_bytes is not None:
            raise ValueError(
                f"Loading(cache_bytes={self.loading.cache_bytes}) is for a graph in files on one host: of shards give "
                f"ShardedDataModule(..., cache_bytes={self.loading.cache_bytes})."
            )

    def _check_samplers(self) -> None:
        """Refuse samplers that do not work across shards, or not with the types of the graph."""
        check_typed_shards(self.bounds, self.sampler, self.boundary)
        types = self.bounds.types
        check_sampler(self._whole_sampler(), types)
        if types is not None:
            check_sampler(self._settings.of_evaluation(), types)
        if isinstance(self.boundary, Fetch):
            check_sampler(self.sampler, types)

    def _check_copies(self) -> None:
        """Refuse an exchange among ranks of which several hold the same shard."""
        num_ranks, num_shards = self._world_size(), self.bounds.num_shards
        if self._exchanges() and num_ranks != num_shards:
            raise ValueError(
                f"boundary=Exchange() takes one rank for each shard, and {num_ranks} ranks hold the {num_shards} "
                f"shards of {self.path}: start {num_shards} ranks, divide the graph into {num_ranks} shards, or take "
                "boundary=Halo()."
            )

    def _check_seeds(self, counts: Tensor) -> None:
        """Refuse ranks without training nodes, given how many each has: all ranks raise or none."""
        if not self._exchanges() and bool((counts == 0).any()):
            rank = int(counts.argmin())
            raise ValueError(
                f"Shard {rank % self.bounds.num_shards} of {self.path} has no training nodes for rank {rank} of "
                f'{len(counts)}, which would have nothing to learn from: divide the graph by MetisPartitioner(balance="'
                'train"), or use fewer shards or ranks.'
            )

    def _connect(self) -> ShardedGraph:
        num_shards = self.bounds.num_shards
        check_ranks(self.path, self.bounds, self._world_size())
        shard, types = Shard.open(self.path, self._rank() % num_shards), self.bounds.types
        check_same(all_gather_rows(torch.tensor([self.bounds.mark])).view(-1).tolist())
        if types is not None:
            of_type = shard.with_seeds(types.seed_type())
            return TypedShardedGraph(of_type, open_channel(num_shards), cache_bytes=self.cache_bytes)
        return ShardedGraph(shard, open_channel(num_shards), cache_bytes=self.cache_bytes)

    def _whole_graph(self) -> ShardedGraph:
        if self._graph is None:
            raise RuntimeError(
                "ShardedDataModule has no batches before its ranks have met: give it to trainer.fit(model, data), or "
                'without a trainer, in one process, call setup("fit") first.'
            )
        return self._graph

    def _parts_of_rank(self) -> Callable[[int], Graph]:
        part = self._running_part()
        return lambda _: part

    def _running_part(self) -> Graph:
        """Return the own shard and what the boundary brings along, in RAM. Collective, the first time.

        With an exchange these are the own rows as they are on disk: its batch holds what it needs, once.
        """
        if self._exchanges():
            return self._whole_graph().shard.rows
        if self._part is None:
            self._part, _ = read_part(self._whole_graph(), self.boundary, self.coverage, self.seed)
        return self._part

    def _around(self, part: Graph, num_ranks: int) -> tuple[Graph, Owners]:
        found, ids = read_part(self._whole_graph(), self.boundary, None, self.seed)
        return found, Owners(ids, torch.searchsorted(self.bounds.nodes, ids, right=True) - 1)

    def _whole_arrays(self, layers: list[Layer], owners: Owners) -> dict[str, Tensor]:
        graph = self._whole_graph()
        own = whole_graph_arrays(layers, graph.shard.rows, graph.shard.first_node)
        return graph.extended(own, owners.ids[graph.shard.rows.num_nodes :])

    def _own_seeds(self) -> Tensor:
        """Return this rank's share of its shard's training nodes, by their ids in the shard."""
        return self._marked()[self._of_copy()]

    def _marked(self) -> Tensor:
        """Return all training nodes of the shard."""
        return self._whole_graph().shard.rows.split("train")

    def _of_copy(self) -> slice:
        """Return which of the shard's training nodes this rank takes; ranks with the same shard take turns."""
        copies = self._world_size() // self.bounds.num_shards
        return slice(self._rank() // self.bounds.num_shards, None, copies)

    def _inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        return self._marked_before + torch.arange(self._marked().numel())[self._of_copy()]

    def _most_seeds(self, world_size: int) -> int:
        return self._most

    def _all_seeds(self) -> Tensor:
        return self._whole_graph().split("train")

    def _correction_seeds(self) -> Tensor | OwnSeeds:
        if self.global_batching.deal == "any":
            return self._all_seeds()
        own, inputs = self._own_seeds(), self._inputs_of(self._running_part(), self._own_seeds())
        return OwnSeeds(self._whole_graph().ids_of_own(own), inputs, self._num_marked, self._rank(), self._world_size())

    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, BatchSource]:
        seeds = self._own_seeds()
        if part.types is not None:  # nodes of other shards stand between the own ones
            seeds, _ = Lookup(part.node_arrays["n_id"])(self._whole_graph().ids_of_own(seeds))
        self._values.of_training(part, seeds)
        if isinstance(self.boundary, Fetch):
            return self._whole_graph().ids_of_own(seeds), self._whole_source(self.sampler)
        if part.types is not None:
            self.sampler.sample_bulk(part, [], [])  # refuses the part, or draws nothing
        stream = stream_to(device_of(self.trainer))
        return seeds, GraphSource(
            part, self.sampler, widen=self._widening(), all_labels=self.loading.all_labels, stream=stream
        )

    def _whole_source(self, sampler: Sampler, num_ids: int | None = None) -> ShardedSource:
        stream, stays = stream_to(device_of(self.trainer)), type_that_stays(self.trainer)
        return ShardedSource(self._whole_graph(), sampler, self.loading, stream=stream, stays=stays)

    def _eval_batch_size(self, evaluated: Evaluated, sampler: Sampler) -> int:
        """Double the training batch as long as the neighbourhood of a batch fits all ranks' budgets. Collective.

        Trees by time share no nodes: a batch of them is never larger than in training, and halved where it must be.
        """
        size, most = self.batch_size, -(-evaluated.ids.numel() // evaluated.num_ranks)
        if self.evaluation.sampler is not None or self._model_layers() is not None:
            return size
        share = evaluated.ids.tensor_split(evaluated.num_ranks)[self._eval_place()]
        sampler = self._settings.of_evaluation()
        if isinstance(sampler, TemporalSampler):
            while size > 1 and not self._fits(share[:size], sampler):
                size //= 2
            return size
        while size < most and self._fits(share[: 2 * size], sampler):
            size *= 2
        return size

    def _fits(self, seeds: Tensor, sampler: Sampler) -> bool:
        """Return whether batches of each rank's seeds fit the budgets of all ranks. Collective."""
        graph = self._whole_graph()
        drawn = sample_bulk(graph, check_sampler(sampler, self.bounds.types), [seeds], [BatchKey(0, 0, 0)])
        (sample,) = graph.answered(drawn)
        needed = bytes_of_batch(graph.shard.rows, widest_row(self._module()), len(sample.nodes), len(sample.indices))
        return int(all_gather_rows(torch.tensor([needed])).max()) <= self._eval_bytes

    def _ready_rows(self, evaluated: Evaluated, batch_size: int) -> ReadyRows | None:
        model = None if self.bounds.types is not None else self._model_layers()
        if model is None:
            return None
        world_size = evaluated.num_ranks
        if model.norm is not None and world_size > 1:
            raise ValueError(
                f"{model.norm} takes the rows of all nodes at once, and no rank has those of a sharded graph: choose a "
                "norm of single rows such as BatchNorm, or give every host the whole graph."
            )

        def nodes_of_rank(model: ModelLayers, channel: Channel) -> ShardNodes:
            shard = self._whole_graph().shard
            more = whole_graph_arrays(model.layers, shard.rows, shard.first_node)
            most = self._eval_bytes // 4
            return ShardNodes(shard, channel, most, self.path.resolve().parent, widen=self._widening(), more=more)

        assert self.trainer is not None
        folder = self.path.resolve().parent
        return ReadyRows(self.trainer, nodes_of_rank, world_size, self._eval_bytes, folder, self._dtype())

    def _judging_loader(self, name: str) -> BatchLoader:
        return self._nodes_loader(self._whole_graph().split(name), f"{name}_mask marks")

    def _eval_place(self) -> int:
        """Return the place of the share that lies mostly in its own shard."""
        num_shards = self.bounds.num_shards
        return self._rank() % num_shards * (self._world_size() // num_shards) + self._rank() // num_shards
