"""What data modules of nodes and of links share: ranks train on parts, and are judged by the whole graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.global_batches import GlobalBatches
from lightning_gnn_dist.batches.loader import BatchLoader, batches_of_ranks
from lightning_gnn_dist.batches.placement import Placement, SampleOn, check_sample_on, device_of, release, stream_to
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.checks import (
    check_at_least,
    check_at_least_if_given,
    check_below,
    check_folder,
    check_true_or_false,
)
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.depth import DepthCheck
from lightning_gnn_dist.data.plan import PartPlan
from lightning_gnn_dist.data.residency import Residency, default_period
from lightning_gnn_dist.data.settings_checks import check_cut, check_objects, check_settings, explain_features
from lightning_gnn_dist.data.surroundings import ExtraNodes, Halo, Scope, check_scope
from lightning_gnn_dist.data.switcher import PartSwitcher
from lightning_gnn_dist.data.train_loader import TrainLoader
from lightning_gnn_dist.engine.rng import Purpose
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.device import draws_anywhere
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler


class GraphDataModule(LightningDataModule):
    """Training batches of a rank's own part; evaluation on the whole graph, shared by the ranks without overlap.

    A subclass says what the seeds are, in ``_most_seeds``, ``_all_seeds`` and ``_batches_of``, and evaluates them.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        partitioner: Partitioner | Partition | None,
        sampler: Sampler | None,
        batch_size: int,
        eval_batch_size: int | None,
        seed: int,
        bulk_size: int,
        num_threads: int,
        widen_features: bool,
        sample_on: SampleOn,
        residency: Residency,
        repartition_every: int | None,
        extra: ExtraNodes,
        halo: Halo,
        coverage: Coverage | None,
        correction_batch_size: int | None,
        correction_sampler: Sampler | None,
        cache_dir: str | Path | None,
    ) -> None:
        super().__init__()
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
        check_objects(coverage, sampler=sampler, correction_sampler=correction_sampler)
        check_cut(partitioner, residency, repartition_every)
        halo.check_fits(graph)
        self.graph = graph
        self.partitioner: Partitioner | Partition = MetisPartitioner() if partitioner is None else partitioner
        self.sampler: Sampler = NeighborSampler([15, 10]) if sampler is None else sampler
        check_sample_on(sample_on, self.sampler, correction_sampler)
        self.sample_on: SampleOn = sample_on
        directory = None if cache_dir is None else check_folder("cache_dir", cache_dir)
        self._cut = PartPlan(graph, self.partitioner, residency, extra, halo, coverage, int(seed), directory)
        self.repartition_every = repartition_every
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.correction_batch_size = correction_batch_size
        self.correction_sampler = correction_sampler
        self.seed = int(seed)
        self.bulk_size, self.num_threads = bulk_size, num_threads
        self.widen_features = widen_features
        self._loaders: list[BatchLoader | TrainLoader] = []
        self._parts: PartSwitcher | None = None
        self._anchors: tuple[Graph, BatchLoader] | None = None
        self._train_loader: TrainLoader | None = None
        self._period: int | None = None
        self._whole: GlobalBatches | None = None
        self._depth = DepthCheck()

    # What a subclass says.

    def _most_seeds(self, world_size: int) -> int:
        """The seeds of the rank that has most. All ranks find the same number."""
        raise NotImplementedError

    def _all_seeds(self) -> Tensor:
        """The seeds of the whole graph."""
        raise NotImplementedError

    def _batches_of(
        self, part: Graph, num_batches: int, seed: int, rank: int, num_ranks: int, *, in_background: bool = True
    ) -> BatchLoader:
        """The training batches of a part."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """Identifies the graph, so that a strategy can tell whether all ranks have the same."""
        return self.graph.fingerprint

    @property
    def digests(self) -> dict[str, Any]:
        """Of what else ranks must have alike: the graph's arrays, and who holds which part."""
        return self._cut.digests(self._world_size())

    @property
    def num_nodes(self) -> int:
        """Nodes of the whole graph."""
        return self.graph.num_nodes

    def __str__(self) -> str:
        # Lightning's own would take every loader apart.
        return f"{type(self).__name__}({self.graph}, {self.partitioner}, {self.sampler}, batch_size={self.batch_size})"

    __repr__ = __str__

    # What Lightning calls.

    def prepare_data(self) -> None:
        """One process of every host computes the partition; the others find it in the cache."""
        if self._trainer_fn() == TrainerFn.FITTING and self._world_size() > 1:
            # What is wrong here would stop this rank alone. In setup() all ranks find it, and stop together.
            with suppress(ValueError, TypeError):
                self.partition(self._world_size())

    def setup(self, stage: str) -> None:
        if stage == "fit":
            self._num_batches()

    def train_dataloader(self) -> TrainLoader:
        rank, num_ranks = self._rank(), self._world_size()  # now: later they may be others
        parts = self._own_parts() if self._is_cut() else None
        self._train_loader = TrainLoader(
            parts.at if parts is not None else lambda _: self.graph,
            lambda part, num_batches: self._local_batches(part, num_batches, rank, num_ranks),
            self._num_batches(),
            every=self._every() if parts is not None else None,
            num_ranks=num_ranks,
            batch_level=parts is not None and self._cut.coverage is not None and self._cut.coverage.level == "batch",
            overfits=self.trainer is not None and self.trainer.overfit_batches > 0,  # type: ignore[attr-defined]
            num_used=lambda: self.trainer.num_training_batches if self.trainer is not None else math.inf,
        )
        self._loaders.append(self._train_loader)
        return self._train_loader

    def predict_dataloader(self) -> BatchLoader:
        """All nodes, in order: rank 0 has the first ones."""
        loader = self._nodes_loader(torch.arange(self.graph.num_nodes), "the graph has")
        loader.spare_memory()
        return loader

    # What strategies ask for.

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        """Batches ``start`` to ``stop`` of the whole graph in a round: this rank's slices of them, or all of each.

        A function of the seed, the round and the rank, so that a resumed run sees the same ones.
        """
        check_at_least(0, round_idx=round_idx, start=start)
        check_at_least_if_given(0, stop=stop)
        check_true_or_false(sliced=sliced)
        rank, num_slices = (self._rank(), self._world_size()) if sliced else (0, 1)
        return self._global_batches().of_round(round_idx, rank, num_slices, start, stop)

    def anchor_batches(self, round_idx: int, *, of: Scope = "part", start: int | None = None) -> Iterator[Data]:
        """One pass over the rank's own part, or its slices of one over the graph, with draws that belong to the round.

        Those of the graph are also the round's first correction batches. ``start`` is the number of training batches
        before the round: the part is that of the next one, which may be another. Default: the running part.
        """
        check_at_least(0, round_idx=round_idx)
        check_at_least_if_given(0, start=start)
        check_scope("of", of)
        if of == "graph":
            return self.correction_batches(round_idx, stop=self._global_batches().num_batches)
        if start is not None and self._train_loader is not None:
            self._train_loader.move_to(start)
        part = self._own_parts().current() if self._is_cut() else self.graph
        if self._anchors is None or self._anchors[0] is not part:
            # Few batches at a time, so nothing in the background.
            rank, num_ranks = self._rank(), self._world_size()
            seed, size = self.seed + Purpose.ANCHORS, self._num_batches()
            loader = self._batches_of(part, size, seed, rank, num_ranks, in_background=False)
            self._anchors = part, loader
        self._anchors[1].set_epoch(round_idx)
        return iter(self._anchors[1])

    def teardown(self, stage: str) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        if self._parts is not None:
            self._parts.close()
        self._parts = self._anchors = self._whole = None
        release(self.graph)

    def on_exception(self, exception: BaseException) -> None:
        """End what runs in the background: after an exception or Ctrl-C Lightning tears nothing down."""
        explain_features(exception, self.graph.node_arrays.get("x"))
        self.teardown("fit")

    def state_dict(self) -> dict[str, Any]:
        """How long super-epochs are: a fit that is resumed with more epochs keeps to it."""
        return {} if self._every() is None else {"repartition_every": self._every()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.repartition_every is None:
            self._period = state_dict.get("repartition_every")

    # What it is made of.

    def partition(self, num_parts: int) -> Partition:
        """The chunks for so many ranks: from the cache, or computed and put there."""
        check_at_least(1, num_parts=num_parts)
        return self._cut.partition(num_parts)

    def parts_of_ranks(self, num_ranks: int) -> Partition:
        """Which rank learns from each node, in the first super-epoch."""
        check_at_least(1, num_ranks=num_ranks)
        return self._cut.by_rank(num_ranks)

    def part(self, rank: int, num_parts: int, super_epoch: int = 0) -> Graph:
        """What rank ``rank`` trains on: the nodes of its part and the edges among them, in RAM."""
        check_at_least(1, num_parts=num_parts)
        check_below(num_parts, "parts", rank=rank)
        check_at_least(0, super_epoch=super_epoch)
        if num_parts == 1:
            return self.graph
        return self._cut.reader(rank, num_parts).read(super_epoch).graph

    @property
    def figures(self) -> dict[str, float]:
        """What a strategy may log: the time a fit waited for data, what parts cost, the running one's coverage."""
        loader = self._train_loader
        waited = (loader.waited_seconds, loader.waited_share) if loader is not None else (0.0, 0.0)
        figures = dict(zip(("data/waited_seconds", "data/waited_share"), waited, strict=True))
        if self._parts is not None:
            figures |= {
                "data/switches": float(self._parts.switches),
                "data/switch_bytes": float(self._parts.bytes_read),
                "data/switch_waited_seconds": self._parts.waited_seconds,
            }
            figures |= {} if self._parts.coverage is None else {"data/coverage": self._parts.coverage}
        return figures

    @property
    def uncovered(self) -> tuple[int, int]:
        """Seeds of the running part that have weight 0, and all of them, where each node has a weight."""
        if self._parts is None or self._cut.coverage is None or self._cut.coverage.level == "batch":
            return 0, 0
        part = self._parts.current()
        coverage = part.node_arrays["coverage"][part.split("train")]
        return int((coverage == 0).sum()), coverage.numel()

    def _own_parts(self) -> PartSwitcher:
        if self._parts is None:
            reader = self._cut.reader(self._rank(), self._world_size())
            self._parts = PartSwitcher(reader, in_background=self.num_threads > 0)
        return self._parts

    def _local_batches(self, part: Graph, num_batches: int, rank: int, num_ranks: int) -> BatchLoader:
        if self._anchors is not None and self._anchors[0] is not part:
            self._anchors = None  # or the part before would be held, and its copy
        return self._batches_of(part, num_batches, self.seed, rank, num_ranks)

    def _is_cut(self) -> bool:
        """Whether this rank trains on less than the whole graph."""
        return self._world_size() > 1

    def _every(self) -> int | None:
        """Passes in a super-epoch. None: what a rank holds never changes."""
        sweep = self._cut.residency.sweep(self._world_size())
        if sweep == 1:
            return None
        max_epochs = self.trainer.max_epochs if self.trainer is not None else None
        return self.repartition_every or self._period or default_period(max_epochs, sweep)

    def _num_super_epochs(self) -> float:
        """What this run takes, as far as it is known: a clock may make rounds longer or shorter than passes."""
        every, trainer = self._every(), self.trainer
        if every is None or trainer is None:
            return 1
        steps = math.inf if trainer.max_steps < 0 else trainer.max_steps
        passes = steps * trainer.accumulate_grad_batches / self._num_batches()
        epochs = trainer.max_epochs
        return min(passes, math.inf if epochs is None or epochs < 0 else epochs) / every

    def _global_batches(self) -> GlobalBatches:
        if self._whole is None:
            size = self.correction_batch_size or self.batch_size * self._world_size()
            source = self._source(self.graph, self._whole_sampler())
            self._whole = GlobalBatches(source, self._all_seeds(), size, self.seed)
        return self._whole

    def _whole_sampler(self) -> Sampler:
        """How the whole graph is sampled for corrections."""
        if self.correction_sampler is not None:
            return self.correction_sampler
        is_whole = isinstance(self.sampler, WholePartSampler)
        return NeighborSampler([-1] * self.sampler.num_hops) if is_whole else self.sampler

    def _num_batches(self) -> int:
        """Batches of a pass, the same for all ranks and parts."""
        return -(-self._most_seeds(self._world_size()) // self.batch_size)

    def _nodes_loader(self, nodes: Tensor, whose: str) -> BatchLoader:
        return self._eval_loader(NeighborSampler([-1] * self.sampler.num_hops), nodes, f"{whose} {nodes.numel()} nodes")

    def _eval_loader(self, sampler: Sampler, seeds: Tensor, whose: str, num_ids: int | None = None) -> BatchLoader:
        """This rank's share of ``seeds``, sampled in the whole graph."""
        self._depth.check(self.trainer, self.sampler)
        world_size, count = self._world_size(), seeds.numel()
        if count < world_size:
            raise ValueError(f"{whose}, but {world_size} ranks share the evaluation: each needs one at least.")
        share = seeds.tensor_split(world_size)[self._rank()]
        num_batches = batches_of_ranks(count, world_size, self.eval_batch_size)
        bulk_size = self.bulk_size if self.sample_on == "cpu" else 1  # full neighbourhoods are large for a device
        source = self._source(self.graph, sampler, num_ids)
        loader = self._loader(source, share, num_batches, self.seed, shuffle=False, bulk_size=bulk_size)
        self._loaders.append(loader)
        return loader

    def _loader(
        self,
        source: BatchSource,
        seeds: Tensor,
        num_batches: int,
        seed: int,
        *,
        shuffle: bool = True,
        bulk_size: int | None = None,
        in_background: bool = True,
    ) -> BatchLoader:
        return BatchLoader(
            source,
            seeds,
            num_batches,
            seed=seed,
            shuffle=shuffle,
            bulk_size=(bulk_size or self.bulk_size) if in_background else 1,
            num_threads=self.num_threads if in_background else 0,
            num_ranks=self._world_size(),
        )

    def _source(self, graph: Graph, sampler: Sampler, num_ids: int | None = None) -> GraphSource:
        """Batches of a part or of the whole graph, made where ``sample_on`` says."""
        device, is_fit = device_of(self.trainer), self._trainer_fn() == TrainerFn.FITTING
        # A part comes first, though it may be asked for later; it has no more than the whole graph.
        waits = graph is self.graph and is_fit and self._is_cut() and draws_anywhere(self.sampler)
        placement = Placement(device, self.sample_on, expected_bytes=graph.num_bytes if waits else 0)
        return GraphSource(
            graph,
            sampler,
            widen=self.widen_features,
            num_ids=num_ids,
            placement=placement,
            stream=stream_to(device),
        )

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _trainer_fn(self) -> TrainerFn | None:
        return self.trainer.state.fn if self.trainer is not None else None
