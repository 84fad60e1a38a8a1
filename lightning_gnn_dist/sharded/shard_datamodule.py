"""The base of data modules of shards: a rank has its own, and asks others for what batches need of theirs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.ahead.row_cache import figures_of
from lightning_gnn_dist.batches.placement import device_of, stream_to
from lightning_gnn_dist.batches.precision import type_that_stays
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Fetch, Halo, Isolated, check_boundary
from lightning_gnn_dist.boundary.exchange_plan import Owners
from lightning_gnn_dist.checks import check_at_least, check_path, check_true_or_false
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.exchanging import ExchangingDataModule
from lightning_gnn_dist.data.settings import BatchSettings
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.evaluation.choice import Evaluated, bytes_of_batch, widest_row
from lightning_gnn_dist.evaluation.layered_loader import ReadyRows
from lightning_gnn_dist.evaluation.model_layers import ModelLayers
from lightning_gnn_dist.evaluation.shard_nodes import SHARE_OF_INPUTS, ShardNodes
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.layerwise.layers import Layer
from lightning_gnn_dist.layerwise.ready_made import whole_graph_arrays
from lightning_gnn_dist.prepare.shard import Bounds, Shard, check_ranks, check_same
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.part import read_part
from lightning_gnn_dist.sharded.refusals import check_on_all_ranks
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import check_sampler, sample_bulk
from lightning_gnn_dist.sharded.source import ShardedSource
from lightning_gnn_dist.sharded.typed.checks import check_typed_shards
from lightning_gnn_dist.wire.channel import Channel, open_channel
from lightning_gnn_dist.wire.collectives import all_gather_rows


class ShardDataModule(ExchangingDataModule):
    """Training batches of the rank's own shard, and of the whole graph across all shards.

    Args:
        path: The folder of this host's shards.
        bounds_at: Reads where each shard begins, and refuses shards that are for others.
        settings: How batches are made.
        boundary: What becomes of senders outside the own shard.
        coverage: Gives each batch weights for the loss. With None there are none.
        cache_bytes: Memory for rows of other shards.
    """

    def __init__(
        self,
        path: str | Path,
        bounds_at: Callable[[Path], Bounds],
        settings: BatchSettings,
        boundary: Boundary,
        coverage: Coverage | None,
        cache_bytes: int,
    ) -> None:
        super().__init__(settings, coverage, boundary)
        check_at_least(0, cache_bytes=cache_bytes)
        self._check_settings()
        self.path = check_path("path", path)
        self.bounds = bounds_at(self.path)
        self._check_samplers()
        self.cache_bytes = cache_bytes
        self._graph: ShardedGraph | None = None
        self._part: Graph | None = None
        self._part_ids = torch.empty(0, dtype=torch.int64)  # of its nodes in the whole graph
        # What the rank learns that has most, and all that shards before the own one, and all ranks, can learn.
        self._most = self._marked_before = self._num_marked = 0

    # What a subclass says.

    @abstractmethod
    def _own_seeds(self) -> Tensor:
        """Return what this rank learns: nodes by their ids in the shard, or positions of edges of its part."""

    @abstractmethod
    def _marked(self) -> Tensor:
        """Return all nodes or edges that ranks with the own shard can learn from, for corrections."""

    @abstractmethod
    def _check_seeds(self, counts: Tensor) -> None:
        """Refuse ranks without anything to learn, given how much each has: all ranks raise or none."""

    @abstractmethod
    def _check_times(self, rows: Graph) -> None:
        """Refuse a shard without the times that samplers draw by. Not collective."""

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
        return types.nodes_of(types.seed_type())

    def _nodes_to_predict(self) -> Tensor:
        return torch.arange(self._ids().start, self._ids().stop)

    def _title(self) -> str:
        return repr(str(self.path))

    def _features(self) -> Tensor | None:
        is_known = self._graph is not None and not have_names(self.bounds.types)
        return self._whole_graph().shard.rows.node_arrays.get("x") if is_known else None

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        """Open the own shard, and connections to the other ranks. Collective."""
        super().setup(stage)
        if self._graph is None:
            self._graph = self._connect()
        shard = self._graph.shard
        check_on_all_ranks(lambda: self._check_times(shard.rows), shard.index)
        if stage == "fit":
            self._check_copies()
            self._running_part()  # now, as all ranks are here
            counts = all_gather_rows(torch.tensor([len(self._own_seeds()), len(self._marked())]))
            self._check_seeds(counts[:, 0])
            self._most = int(counts[:, 0].max())
            self._num_marked = int(counts[: self.bounds.num_shards, 1].sum())
            self._marked_before = int(counts[: self._rank() % self.bounds.num_shards, 1].sum())

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
                'Correction(way="rank0") computes a batch of the whole graph on one rank, and no rank can '
                'make one of a sharded graph alone: use way="sliced".'
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

    def _close(self) -> None:
        super()._close()
        if self._graph is not None:
            self._graph.close()

    def _at_rest(self) -> dict[str, Any]:
        return super()._at_rest() | {"_graph": None, "_part": None}

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
        check_sampler(self._settings.of_corrections(), types)
        if have_names(types):
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

    def _connect(self) -> ShardedGraph:
        num_shards = self.bounds.num_shards
        check_ranks(self.path, self.bounds, self._world_size())
        shard, types = Shard.open(self.path, self._rank() % num_shards), self.bounds.types
        check_same(all_gather_rows(torch.tensor([self.bounds.mark])).view(-1).tolist())
        return self._opened(self._shown_in_batches(shard.with_seeds(types.seed_type()) if have_names(types) else shard))

    def _shown_in_batches(self, shard: Shard) -> Shard:
        """Return the own shard as batches show it."""
        return shard

    def _opened(self, shard: Shard) -> ShardedGraph:
        """Return the whole graph across shards. Collective."""
        return ShardedGraph(shard, open_channel(self.bounds.num_shards), cache_bytes=self.cache_bytes)

    def _whole_graph(self) -> ShardedGraph:
        if self._graph is None:
            raise RuntimeError(
                f"{type(self).__name__} has no batches before its ranks have met: give it to trainer.fit(model, data), "
                'or without a trainer, in one process, call setup("fit") first.'
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
            self._part, self._part_ids = self._read_part(self._whole_graph())
        return self._part

    def _read_part(self, graph: ShardedGraph) -> tuple[Graph, Tensor]:
        """Return the part and the ids of its nodes in the whole graph. Collective."""
        return read_part(graph, self.boundary, self.coverage, self._settings.seed_of_parts)

    def _around(self, part: Graph, num_ranks: int) -> tuple[Graph, Owners]:
        found, ids = read_part(self._whole_graph(), self.boundary, None, self._settings.seed_of_parts)
        return found, Owners(ids, torch.searchsorted(self.bounds.nodes, ids, right=True) - 1)

    def _whole_arrays(self, layers: list[Layer], owners: Owners) -> dict[str, Tensor]:
        graph = self._whole_graph()
        own = whole_graph_arrays(layers, graph.shard.rows, graph.shard.first_node)
        return graph.extended(own, owners.ids[graph.shard.rows.num_nodes :])

    def _of_copy(self) -> slice:
        """Return which of the shard's seeds this rank takes; ranks with the same shard take turns."""
        copies = self._world_size() // self.bounds.num_shards
        return slice(self._rank() // self.bounds.num_shards, None, copies)

    def _most_seeds(self, world_size: int) -> int:
        return self._most

    def _whole_source(self, sampler: Sampler, num_ids: int | None = None) -> ShardedSource:
        stream, stays = stream_to(device_of(self.trainer)), type_that_stays(self.trainer)
        return ShardedSource(self._whole_graph(), sampler, self.loading, num_ids=num_ids, stream=stream, stays=stays)

    def _part_source(self, part: Graph, sampler: Sampler, num_ids: int | None = None) -> GraphSource:
        """Return the source of batches of a part in RAM."""
        how: dict[str, Any] = {"widen": self._widening(), "all_labels": self.loading.all_labels}
        return GraphSource(part, sampler, num_ids=num_ids, stream=stream_to(device_of(self.trainer)), **how)

    def _eval_batch_size(self, evaluated: Evaluated, sampler: Sampler) -> int:
        """Double the training batch as long as the neighbourhood of a batch fits all ranks' budgets. Collective.

        Trees by time share no nodes: a batch of them is never larger than in training, and halved where it must be.
        """
        size, most = self.batch_size, evaluated.most
        if self.evaluation.sampler is not None or self._model_layers() is not None:
            return size
        share, nodes_of = evaluated.share(self._eval_place()), evaluated.nodes_of
        of_nodes = self._eval_sampler()
        if isinstance(of_nodes, TemporalSampler):
            while size > 1 and not self._fits(share[:size], sampler):
                size //= 2
            return size
        while size < most and self._fits(nodes_of(share[: 2 * size]), of_nodes):
            size *= 2
        return size

    def _fits(self, seeds: Tensor, sampler: Sampler) -> bool:
        """Return whether batches of each rank's seeds fit the budgets of all ranks. Collective."""
        (sample,) = self._drawn([seeds], sampler)
        return int(all_gather_rows(torch.tensor([self._bytes_of(sample)])).max()) <= self._eval_bytes

    def _drawn(self, seeds: list[Tensor], sampler: Sampler) -> list[Sample]:
        graph, keys = self._whole_graph(), [BatchKey(0, 0, 0)] * len(seeds)
        return graph.answered(sample_bulk(graph, check_sampler(sampler, self.bounds.types), seeds, keys))

    def _bytes_of(self, sample: Sample) -> int:
        rows, widest = self._whole_graph().shard.rows, widest_row(self._module())
        return bytes_of_batch(rows, widest, len(sample.nodes), len(sample.indices))

    def _bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        sizes = dict[int, int]()
        small, num_hops = list(range(len(some))), self._eval_sampler(1).num_hops
        for hops in range(1, num_hops + 1):  # hop by hop, so that what is large is never drawn whole
            samples = self._drawn([some[at] for at in small], NeighborSampler([-1] * hops))
            grown = {at: sample for at, sample in zip(small, samples, strict=True) if sample.num_sampled_edges[-1]}
            sizes = {at: size for at, sample in grown.items() if (size := self._bytes_of(sample)) <= most}
            small = list(sizes)
        return [sizes.get(at) for at in range(len(some))]

    def _ready_rows(self, evaluated: Evaluated, batch_size: int) -> ReadyRows | None:
        model = None if have_names(self.bounds.types) else self._model_layers()
        if model is None:
            return None
        world_size, folder = evaluated.num_ranks, self.path.resolve().parent
        if model.norm is not None and world_size > 1:
            raise ValueError(
                f"{model.norm} takes the rows of all nodes at once, and no rank has those of a sharded graph: choose a "
                "norm of single rows such as BatchNorm, or give every host the whole graph."
            )

        def nodes_of_rank(model: ModelLayers, channel: Channel) -> ShardNodes:
            most = self._eval_bytes // SHARE_OF_INPUTS
            return ShardNodes(self._whole_graph().shard, model.layers, channel, most, folder, widen=self._widening())

        assert self.trainer is not None
        return ReadyRows(self.trainer, nodes_of_rank, world_size, self._eval_bytes, folder, self._dtype())

    def _eval_place(self) -> int:
        """Return the place of the share that lies mostly in its own shard."""
        num_shards = self.bounds.num_shards
        return self._rank() % num_shards * (self._world_size() // num_shards) + self._rank() // num_shards
