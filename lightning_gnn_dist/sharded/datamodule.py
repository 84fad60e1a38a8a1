"""The data module of a sharded graph: a rank has its shard, and asks other ranks for what batches need of theirs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.batches.global_batches import OwnSeeds
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Fetch, Isolated
from lightning_gnn_dist.boundary.exchange_refusals import check_whole_part
from lightning_gnn_dist.boundary.halo_seeds import seed_hops, seeds_around
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.explained_errors import knows_words_of_pyg
from lightning_gnn_dist.data.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.data.temporal.checks import check_temporal, check_units, spans_of
from lightning_gnn_dist.engine.temporal.times import sources_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.prepare.shard import Bounds
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler
from lightning_gnn_dist.sharded.shard_datamodule import ShardDataModule
from lightning_gnn_dist.sharded.typed.checks import with_seed_type
from lightning_gnn_dist.wire.collectives import all_gather_rows


class ShardedDataModule(ShardDataModule):
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
        seed: Decides everything random: the order of seeds, the neighbours. Default: the seed of Lightning's
            ``seed_everything`` as the fit begins, and 0 without one. A resumed fit keeps its seed.
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

    @knows_words_of_pyg
    def __init__(
        self,
        path: str | Path,
        *,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        seed: int | None = None,
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
        self._places = torch.empty(0, dtype=torch.int64)  # of the part's training nodes among those of all ranks
        super().__init__(path, lambda at: _bounds_of_nodes(at, seed_type), settings, boundary, coverage, cache_bytes)

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self._check_units()
        if stage == "fit" and seed_hops(self.boundary):
            own = self._whole_graph().shard.rows
            places = {"places": self._marked_before + own.node_arrays["train_mask"].cumsum(0) - 1}
            self._places = self._whole_graph().extended(places, self._part_ids[own.num_nodes :])["places"]

    def _check_times(self, rows: Graph) -> None:
        check_temporal(rows, self._settings, self.boundary)

    def _check_units(self) -> None:
        """Refuse times of which no seed of any shard is later than any event. Collective."""
        sampler, rows = self._settings.of_parts(), self._whole_graph().shard.rows
        if not isinstance(sampler, TemporalSampler):
            return
        of_seeds, of_types = spans_of(rows, sampler)
        row = [(*(span or (0, 0)), span is not None) for span in (of_seeds, *of_types.values())]
        floating = any(
            source.times.is_floating_point() for source in sources_of(rows, sampler.time) if source is not None
        )
        of_ranks = all_gather_rows(torch.tensor(row, dtype=torch.float64 if floating else torch.int64))
        seeds, *events = (_span(ranks[ranks[:, 2] > 0]) for ranks in of_ranks.unbind(1))
        check_units(sampler, seeds, dict(zip(of_types, events, strict=True)))

    def _check_seeds(self, counts: Tensor) -> None:
        """Refuse ranks without training nodes, given how many each has: all ranks raise or none."""
        if not self._exchanges() and bool((counts == 0).any()):
            rank = int(counts.argmin())
            raise ValueError(
                f"Shard {rank % self.bounds.num_shards} of {self.path} has no training nodes for rank {rank} of "
                f'{len(counts)}, which would have nothing to learn from: divide the graph by MetisPartitioner(balance="'
                'train"), or use fewer shards or ranks.'
            )

    def _own_seeds(self) -> Tensor:
        """Return this rank's share of its shard's training nodes, by their ids in the shard."""
        return self._marked()[self._of_copy()]

    def _marked(self) -> Tensor:
        """Return all training nodes of the shard."""
        return self._whole_graph().shard.rows.split("train")

    def _inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        if seed_hops(self.boundary):
            return self._places[seeds]
        return self._marked_before + torch.arange(self._marked().numel())[self._of_copy()]

    def _all_seeds(self) -> Tensor:
        return self._whole_graph().split("train")

    def _correction_seeds(self) -> Tensor | OwnSeeds:
        if self.global_batching.deal == "any":
            return self._all_seeds()
        own, inputs = self._own_seeds(), self._inputs_of(self._running_part(), self._own_seeds())
        return OwnSeeds(self._whole_graph().ids_of_own(own), inputs, self._num_marked, self._rank(), self._world_size())

    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, BatchSource]:
        seeds = self._own_seeds()
        if have_names(part.types):  # nodes of other shards stand between the own ones
            seeds, _ = Lookup(part.node_arrays["n_id"])(self._whole_graph().ids_of_own(seeds))
        self._values.of_training(part, seeds)
        if isinstance(self.boundary, Fetch):
            return self._whole_graph().ids_of_own(seeds), self._whole_source(self.sampler)
        if have_names(part.types):
            self.sampler.sample_bulk(part, [], [])  # refuses the part, or draws nothing
        return seeds, self._part_source(part, self.sampler)

    def _seeds_around(self, part: Graph, rank: int, num_ranks: int) -> Tensor:
        if not seed_hops(self.boundary):
            return super()._seeds_around(part, rank, num_ranks)
        own = torch.arange(self._whole_graph().shard.rows.num_nodes)
        seeds = seeds_around(part, own, part.node_arrays["train_mask"], seed_hops(self.boundary))
        self._values.of_labels(part, seeds, "train_mask")
        return seeds

    def _judging_loader(self, name: str) -> BatchLoader:
        return self._nodes_loader(self._whole_graph().split(name), f"{name}_mask marks")


def _span(ranks: Tensor) -> tuple[float, float] | None:
    return (ranks[:, 0].min().item(), ranks[:, 1].max().item()) if len(ranks) else None


def _bounds_of_nodes(path: Path, seed_type: str | None) -> Bounds:
    """Return where shards begin; of a graph with types the type is chosen whose nodes are learned from."""
    bounds = with_seed_type(Bounds.read(path), seed_type, path)
    if bounds.links is not None:
        raise ValueError(
            f"{path} holds a split ({bounds.links}): learn edges with ShardedLinkDataModule(path), or for nodes divide "
            "the graph that was split, which has its masks."
        )
    return bounds
