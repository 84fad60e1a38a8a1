"""What every rank reads where no host has the whole graph: its shard, and of the others what it asks them for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.loader import BatchLoader, batches_of_ranks
from lightning_gnn_dist.batches.placement import device_of, stream_to
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.checks import check_at_least, check_at_least_if_given, check_path, check_true_or_false
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.depth import DepthCheck
from lightning_gnn_dist.data.settings_checks import check_objects, check_settings, explain_features
from lightning_gnn_dist.data.surroundings import Scope, check_scope
from lightning_gnn_dist.data.train_loader import TrainLoader
from lightning_gnn_dist.engine.rng import Purpose
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.values import ValueCheck
from lightning_gnn_dist.prepare.shard import Bounds, Shard, check_ranks, check_same
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sharded.graph import ShardedGraph
from lightning_gnn_dist.sharded.sampling import check_sampler
from lightning_gnn_dist.sharded.source import ShardedSource
from lightning_gnn_dist.wire.collectives import all_gather_rows, open_channel


class ShardedDataModule(LightningDataModule):
    """Like :class:`PartitionedDataModule`, for a graph of which every host has a shard and none has all.

    Training batches come from the rank's own shard alone. Corrections on the whole graph, evaluation and prediction
    sample across all shards: neighbours are drawn by the ranks that own the rows, features are fetched once for all
    nodes of a bulk. The batches are the same as if every rank had the whole graph, with nodes and edges in the order of
    the shards, and so is what they measure.

    With more ranks than shards, several ranks hold the same shard: ``2 n`` ranks of ``n`` shards form two groups that
    never ask each other, and divide the training nodes of a shard among them.

    Args:
        path: A folder that :func:`save_shards` wrote. Rank ``r`` needs ``shares.json`` and shard ``r % n``.
        sampler: How training batches are drawn. Default: ``NeighborSampler([15, 10])``.
        batch_size: Training seeds in a batch, at most.
        eval_batch_size: Nodes evaluated at once. Default: ``batch_size``. Full neighbourhoods are large.
        seed: Everything random is drawn from it: order of seeds, neighbours.
        bulk_size: Batches sampled together, also for corrections. Does not change what is drawn, but how often rows are
            sent.
        num_threads: Background threads that sample the own shard while the model trains. 0: none. What needs other
            ranks is never sampled in the background.
        widen_features: Arrays of float16, bfloat16, and of int8 with scales come as float32. They travel as stored.
        train_on: ``"part"``, or ``"graph"``: sample around the shard's training nodes across all shards, which is what
            distributed samplers do (with DDP: the LLCG paper's GGS). Every step then waits for neighbours and features.
        cache_bytes: Memory for rows of other shards that are kept: of those nodes that the own rows name most often.
        coverage: Gives each batch ``batch.coverage``, as weights for the loss. None: no weights.
        correction_batch_size: Seeds of a batch of the whole graph, shared by all ranks. Default: ``batch_size`` for
            each rank.
        correction_sampler: How neighbours are drawn for them: a ``NeighborSampler``, ``LadiesSampler`` or
            ``FastGCNSampler``, which keeps a number for every node of the graph. Default: ``sampler``.
        check_values: Refuse NaN and infinity in ``x`` and in the edges' ``edge_weight`` and ``edge_attr``, in one pass
            over the own shard, and labels of its marked nodes that are NaN or, as classes, negative.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        eval_batch_size: int | None = None,
        seed: int = 0,
        bulk_size: int = 4,
        num_threads: int = 1,
        widen_features: bool = True,
        train_on: Scope = "part",
        cache_bytes: int = 0,
        coverage: Coverage | None = Coverage(),  # noqa: B008  # frozen
        correction_batch_size: int | None = None,
        correction_sampler: Sampler | None = None,
        check_values: bool = True,
    ) -> None:
        super().__init__()
        check_true_or_false(check_values=check_values)
        self._values = ValueCheck(is_on=check_values)
        eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        check_settings(
            seed=seed,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            bulk_size=bulk_size,
            num_threads=num_threads,
            widen_features=widen_features,
            correction_batch_size=correction_batch_size,
        )
        check_at_least(0, cache_bytes=cache_bytes)
        check_scope("train_on", train_on)
        check_objects(coverage, sampler=sampler, correction_sampler=correction_sampler)
        self.path = check_path("path", path)
        self.bounds = Bounds.read(self.path)
        self._depth = DepthCheck()
        self.sampler: Sampler = NeighborSampler([15, 10]) if sampler is None else sampler
        self.correction_sampler = check_sampler(self.sampler if correction_sampler is None else correction_sampler)
        self.batch_size, self.eval_batch_size = batch_size, eval_batch_size
        self.correction_batch_size = correction_batch_size
        self.seed, self.bulk_size, self.num_threads = int(seed), bulk_size, num_threads
        self.widen_features, self.train_on, self.cache_bytes = widen_features, train_on, cache_bytes
        self.coverage = coverage
        self._graph: ShardedGraph | None = None
        self._part: Graph | None = None
        self._num_batches = 0
        self._train_loader: TrainLoader | None = None
        self._anchors: BatchLoader | None = None

    @property
    def fingerprint(self) -> str:
        """Identifies the graph, so that a strategy can tell whether all ranks have the same."""
        return self.bounds.fingerprint

    @property
    def shards_path(self) -> Path:
        """The folder of this host's shards."""
        return self.path

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return int(self.bounds.nodes[-1])

    def __str__(self) -> str:
        # Lightning's own would take every loader apart.
        return f"{type(self).__name__}({str(self.path)!r}, {self.sampler}, batch_size={self.batch_size})"

    __repr__ = __str__

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        """Open the own shard, and connections to the other ranks. Collective."""
        if self._graph is None:
            self._graph = self._connect()
        if stage == "fit":
            self._part = self._own_part()
            own = torch.tensor([self._own_seeds().numel()])
            most = int(all_gather_rows(own).max())
            self._num_batches = -(-most // self.batch_size)

    def train_dataloader(self) -> TrainLoader:
        part = self._own_part()
        is_batch_level = self.coverage is not None and self.coverage.level == "batch" and self.train_on == "part"
        self._train_loader = TrainLoader(
            lambda _: part,
            lambda *_: self._batches_of_part(self.seed, in_background=True),
            self._num_batches,
            every=None,
            num_ranks=self._world_size(),
            batch_level=is_batch_level,
        )
        return self._train_loader

    def val_dataloader(self) -> BatchLoader:
        return self._eval_loader(self._whole().split("val"), "val_mask marks")

    def test_dataloader(self) -> BatchLoader:
        return self._eval_loader(self._whole().split("test"), "test_mask marks")

    def predict_dataloader(self) -> BatchLoader:
        """All nodes, those of the rank's own shard as far as shards are equal; ``batch.n_id`` says which."""
        return self._eval_loader(torch.arange(self.num_nodes), "the graph has")

    def teardown(self, stage: str) -> None:
        if self._train_loader is not None:
            self._train_loader.close()
        if self._graph is not None:
            self._graph.channel.close()
        self._graph = self._part = self._anchors = None

    def on_exception(self, exception: BaseException) -> None:
        """End what runs in the background: after an exception or Ctrl-C Lightning tears nothing down."""
        if self._graph is not None:
            explain_features(exception, self._graph.shard.rows.node_arrays.get("x"))
        self.teardown("fit")

    # What strategies ask for.

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        """Batches ``start`` to ``stop`` of the whole graph in a round: this rank's slices of them."""
        check_at_least(0, round_idx=round_idx, start=start)
        check_at_least_if_given(0, stop=stop)
        check_true_or_false(sliced=sliced)
        if not sliced:
            raise ValueError(
                'correction="rank0" computes a batch of the whole graph on one rank, and of a sharded graph no rank '
                'can make one alone: use correction="sliced".'
            )
        return self._global_batches().of_round(round_idx, self._rank(), self._world_size(), start, stop)

    def anchor_batches(self, round_idx: int, *, of: Scope = "part", start: int | None = None) -> Iterator[Data]:
        """One pass over the rank's own shard, or its slices of one over the graph, with draws that belong to the round.

        Those of the graph are also the round's first correction batches. ``start``, the training batches before the
        round, says nothing here: a shard never changes.
        """
        check_at_least(0, round_idx=round_idx)
        check_at_least_if_given(0, start=start)
        check_scope("of", of)
        if of == "graph":
            return self.correction_batches(round_idx, stop=self._global_batches().num_batches)
        if self._anchors is None:
            self._anchors = self._batches_of_part(self.seed + Purpose.ANCHORS, in_background=False)
        self._anchors.set_epoch(round_idx)
        return iter(self._anchors)

    @property
    def figures(self) -> dict[str, float]:
        """What a strategy may log: the time that training waited for data, and how often rows were in the cache."""
        loader = self._train_loader
        waited = (loader.waited_seconds, loader.waited_share) if loader is not None else (0.0, 0.0)
        figures = dict(zip(("data/waited_seconds", "data/waited_share"), waited, strict=True))
        if self._graph is not None and self.cache_bytes:
            figures["data/cache_hit_rate"] = self._graph.cache.hit_rate
        return figures

    # What it is made of.

    def _connect(self) -> ShardedGraph:
        num_shards = self.bounds.num_shards
        check_ranks(self.path, self.bounds, self._world_size())
        shard = Shard.open(self.path, self._rank() % num_shards)
        check_same(all_gather_rows(torch.tensor([int(self.fingerprint[:12], 16)])).view(-1).tolist())
        return ShardedGraph(shard, open_channel(num_shards), cache_bytes=self.cache_bytes)

    def _whole(self) -> ShardedGraph:
        assert self._graph is not None
        return self._graph

    def _own_part(self) -> Graph:
        """What the rank trains on, in RAM."""
        if self._part is None:
            shard = self._whole().shard
            self._part = shard.part()
            if self.coverage is not None:
                weights = self.coverage.of(self._part, shard.rows.degrees(), self._part.num_nodes)
                self._part.node_arrays["coverage"] = weights
        return self._part

    def _own_seeds(self) -> Tensor:
        """The rank's training nodes, in ids of its shard: those of the shard, divided among all that hold it."""
        copies = self._world_size() // self.bounds.num_shards
        return self._whole().shard.rows.split("train")[self._rank() // self.bounds.num_shards :: copies]

    def _batches_of_part(self, seed: int, *, in_background: bool) -> BatchLoader:
        self._values.of_training(self._own_part(), self._own_seeds())
        seed = seed * self._world_size() + self._rank()  # replicas differ in what they draw
        if self.train_on == "graph":
            ids = self._own_seeds() + self._whole().shard.first_node
            return self._sharded_loader(self.sampler, ids, self._num_batches, seed, shuffle=True)
        source = GraphSource(
            self._own_part(), self.sampler, widen=self.widen_features, stream=stream_to(device_of(self.trainer))
        )
        return BatchLoader(
            source,
            self._own_seeds(),
            self._num_batches,
            seed=seed,
            bulk_size=self.bulk_size if in_background else 1,
            num_threads=self.num_threads if in_background else 0,
            num_ranks=self._world_size(),
        )

    def _global_batches(self) -> GlobalBatches:
        size = self.correction_batch_size or self.batch_size * self._world_size()
        source = self._shards(self.correction_sampler)
        return GlobalBatches(source, self._whole().split("train"), size, self.seed, self.bulk_size)

    def _eval_loader(self, nodes: Tensor, whose: str) -> BatchLoader:
        """This rank's share of ``nodes``, with all their neighbours. Mostly nodes of its own shard."""
        self._depth.check(self.trainer, self.sampler)
        world_size, count = self._world_size(), nodes.numel()
        if count < world_size:
            raise ValueError(
                f"{whose} {count} nodes, but {world_size} ranks share the evaluation: each needs one at least."
            )
        num_shards = self.bounds.num_shards
        place = self._rank() % num_shards * (world_size // num_shards) + self._rank() // num_shards
        everything = NeighborSampler([-1] * self.sampler.num_hops)
        num_batches = batches_of_ranks(count, world_size, self.eval_batch_size)
        own = nodes.tensor_split(world_size)[place]
        return self._sharded_loader(everything, own, num_batches, self.seed, shuffle=False)

    def _sharded_loader(
        self, sampler: Sampler, seeds: Tensor, num_batches: int, seed: int, *, shuffle: bool
    ) -> BatchLoader:
        return BatchLoader(
            self._shards(sampler),
            seeds,
            num_batches,
            seed=seed,
            shuffle=shuffle,
            bulk_size=self.bulk_size,
            num_ranks=self._world_size(),
        )

    def _shards(self, sampler: Sampler) -> ShardedSource:
        stream = stream_to(device_of(self.trainer))
        return ShardedSource(self._whole(), sampler, widen=self.widen_features, stream=stream)

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0
