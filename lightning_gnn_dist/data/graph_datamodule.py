"""The base of all data modules: training on a rank's part, evaluation and corrections on the whole graph."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.global_batches import GlobalBatches, OwnSeeds, batches_of
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.precision import type_of_model
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.boundary import Boundary, Fetch
from lightning_gnn_dist.checks import (
    check_at_least,
    check_at_least_if_given,
    check_choice,
    check_instance,
    check_true_or_false,
)
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.explained_errors import explain_features, explain_labels, guard_plain_ddp
from lightning_gnn_dist.data.settings import BatchSettings
from lightning_gnn_dist.data.train_loader import PassLoader, TrainLoader, passes_left
from lightning_gnn_dist.engine.rng import Purpose
from lightning_gnn_dist.evaluation.budget import DEFAULT_BYTES
from lightning_gnn_dist.evaluation.choice import Evaluated, is_limited
from lightning_gnn_dist.evaluation.layered_loader import EvaluationLoader, ReadyRows, Targets
from lightning_gnn_dist.evaluation.model_layers import ModelLayers, layers_as_they_are
from lightning_gnn_dist.evaluation.probe import Exactness, Outlook
from lightning_gnn_dist.evaluation.sight import hops_of_evaluation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.sampling.base import Sampler


class GraphDataModule(LightningDataModule, ABC):
    """Batches of a rank's own part for training, and of the whole graph for evaluation and corrections.

    A subclass defines the abstract methods: what the part is, which nodes or edges are seeds, and who makes batches.
    """

    _has_inputs = True  # whether training batches have an input_id

    def __init__(self, settings: BatchSettings, coverage: Coverage | None, boundary: Boundary) -> None:
        super().__init__()
        if coverage is not None:
            check_instance("coverage", coverage, Coverage, 'an object such as Coverage() or Coverage("batch"), or None')
        self._settings = settings
        self.sampler, self.batch_size = settings.of_parts(), settings.batch_size
        self.loading, self.evaluation = settings.loading, settings.evaluation
        self.global_batching = settings.global_batching
        self.coverage, self.boundary = coverage, boundary
        self._values = ValueCheck(is_on=settings.loading.check_values)
        self.exactness = self._new_exactness()
        self._loaders: list[BatchLoader | TrainLoader] = []
        self._train_loader: TrainLoader | None = None
        self._anchors: tuple[Graph, BatchLoader] | None = None
        self._whole: GlobalBatches | None = None
        self._eval_bytes = DEFAULT_BYTES
        self._seed_of_fit: int | None = None

    @property
    def seed(self) -> int:
        """The seed of batches: as given; else the checkpoint's, or that of ``seed_everything`` as the fit began."""
        return self._settings.seed_of_batches if self._seed_of_fit is None else self._seed_of_fit

    # What a subclass says.

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the graph, by which a strategy sees whether all ranks have the same one."""

    @property
    @abstractmethod
    def num_nodes(self) -> int:
        """The number of nodes of the whole graph."""

    @abstractmethod
    def _title(self) -> str:
        """Return what ``repr`` shows of the data that is read."""

    @abstractmethod
    def _features(self) -> Tensor | None:
        """Return the features ``x`` that this rank has, or None."""

    @abstractmethod
    def _parts_of_rank(self) -> Callable[[int], Graph]:
        """Return a function from a super-epoch to the part that this rank trains on in it."""

    @abstractmethod
    def _running_part(self) -> Graph:
        """Return the part that this rank trains on now."""

    @abstractmethod
    def _most_seeds(self, world_size: int) -> int:
        """Return the number of seeds of the rank that has most, the same on all ranks."""

    @abstractmethod
    def _correction_seeds(self) -> Tensor | OwnSeeds:
        """Return all training nodes of the whole graph or the rank's own, or the positions of all training edges."""

    @abstractmethod
    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, BatchSource]:
        """Return the seeds of a rank in a part, after a check of its values, and the source of its batches."""

    @abstractmethod
    def _whole_source(self, sampler: Sampler, num_ids: int | None = None) -> BatchSource:
        """Return the source of batches of the whole graph."""

    @abstractmethod
    def _judging_loader(self, name: str) -> BatchLoader:
        """Return the loader of this rank's share of the ``"val"`` or ``"test"`` nodes or edges."""

    def _inputs_of(self, part: Graph, seeds: Tensor) -> Tensor | None:
        """Return where each seed of a part stands among all training nodes of the graph, or None for edges."""
        return None

    def _seeds_around(self, part: Graph, rank: int, num_ranks: int) -> Tensor:
        """Return the seeds of other ranks that this one learns from too, by their ids in a part, after a check."""
        return torch.empty(0, dtype=torch.int64)

    def _every(self) -> int | None:
        """Return the passes in a super-epoch, or None if a rank's part never changes."""
        return None

    def _nodes_to_predict(self) -> Tensor:
        """Return the nodes of which a prediction is made."""
        return torch.arange(self.num_nodes)

    def _eval_place(self) -> int:
        """Return the place of this rank's share among the equal shares of the evaluation."""
        return self._rank()

    def __str__(self) -> str:
        # Lightning's own would take every loader apart.
        return f"{type(self).__name__}({self._title()}, {self.sampler}, batch_size={self.batch_size})"

    __repr__ = __str__

    # What Lightning calls.

    def train_dataloader(self) -> TrainLoader:
        guard_plain_ddp(self.trainer)
        rank, num_ranks, size = self._rank(), self._world_size(), self._num_batches()  # now: later they may be others
        self._train_loader = TrainLoader(
            self._parts_of_rank(),
            lambda part, num_batches: self._local_batches(part, num_batches, rank, num_ranks),
            size,
            every=self._every() if self._is_cut() else None,
            num_ranks=num_ranks,
            batch_level=self._is_cut() and self.coverage is not None and self.coverage.level == "batch",
            overfits=self.trainer is not None and self.trainer.overfit_batches > 0,  # type: ignore[attr-defined]
            num_used=lambda: self.trainer.num_training_batches if self.trainer is not None else math.inf,
            num_left=lambda: passes_left(self.trainer, size),
        )
        self._loaders.append(self._train_loader)
        return self._train_loader

    def val_dataloader(self) -> BatchLoader:
        return self._judging_loader("val")

    def test_dataloader(self) -> BatchLoader:
        return self._judging_loader("test")

    def predict_dataloader(self) -> BatchLoader:
        """Return a loader of this rank's share of all nodes in order; with shards, nearly all are of its own."""
        loader = self._nodes_loader(self._nodes_to_predict(), "the graph has")
        loader.spare_memory()
        return loader

    def teardown(self, stage: str) -> None:
        self._close()
        vars(self).update(self._at_rest())
        self.exactness.forget()

    def on_exception(self, exception: BaseException) -> None:
        """Explain the error and end what runs in the background: after an exception Lightning tears nothing down."""
        explain_features(exception, self._features())
        explain_labels(exception)
        self.teardown("fit")

    # What strategies ask for.

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        """Yield batches ``start`` to ``stop`` of the whole graph in a round: this rank's slice of each, or all of it.

        They depend on the seed, the round and the rank alone, so that a resumed run sees the same ones.
        """
        check_at_least(0, round_idx=round_idx, start=start)
        check_at_least_if_given(0, stop=stop)
        check_true_or_false(sliced=sliced)
        rank, num_slices = (self._rank(), self._world_size()) if sliced else (0, 1)
        return self._global_batches().of_round(round_idx, rank, num_slices, start, stop)

    def anchor_batches(self, round_idx: int, *, of: Scope = "part", start: int | None = None) -> Iterator[Data]:
        """Yield one pass over the rank's own part, or its slices of one over the graph, drawn for this round.

        With ``of="graph"`` these are also the round's first correction batches. With ``start``, the number of training
        batches before the round, the part is that of the batch that follows; without, it is the running part.
        """
        check_at_least(0, round_idx=round_idx)
        check_at_least_if_given(0, start=start)
        check_choice("of", of, Scope)
        if of == "graph":
            return self.correction_batches(round_idx, stop=self._global_batches().num_batches)
        if start is not None and self._train_loader is not None:
            self._train_loader.move_to(start)
        part = self._running_part()
        if self._anchors is None or self._anchors[0] is not part:
            # Few batches at a time, so nothing in the background.
            rank, num_ranks = self._rank(), self._world_size()
            seed, size = self.seed + Purpose.ANCHORS, self._num_batches()
            self._anchors = part, self._batches_of(part, size, seed, rank, num_ranks, in_background=False)
        self._anchors[1].set_epoch(round_idx)
        return iter(self._anchors[1])

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: the seconds that training waited for data, and their share of its time."""
        loader = self._train_loader
        waited = (loader.waited_seconds, loader.waited_share) if loader is not None else (0.0, 0.0)
        return dict(zip(("data/waited_seconds", "data/waited_share"), waited, strict=True))

    # What it is made of.

    def _new_exactness(self) -> Exactness:
        return Exactness(self.sampler, self.evaluation.sampler, probes=self._settings.probes)

    def _close(self) -> None:
        """End what runs in the background, and free what it has taken."""
        for loader in self._loaders:
            loader.close()
        if self._whole is not None:
            self._whole.close()

    def _at_rest(self) -> dict[str, Any]:
        """Return, by name, the attributes that only a run has, as they are outside of one."""
        return {"_loaders": [], "_anchors": None, "_whole": None}

    def __getstate__(self) -> dict[str, Any]:
        # A copy is one at rest, as for a process that Lightning spawns: of a run there are threads and connections.
        checks = {"_values": ValueCheck(is_on=self._values.is_on), "exactness": self._new_exactness()}
        return vars(self) | self._at_rest() | checks | {"trainer": None, "_train_loader": None}

    def _is_cut(self) -> bool:
        """Return whether this rank trains on less than the whole graph."""
        return self._world_size() > 1 and not isinstance(self.boundary, Fetch)

    def _local_batches(self, part: Graph, num_batches: int, rank: int, num_ranks: int) -> PassLoader:
        if self._anchors is not None and self._anchors[0] is not part:
            self._anchors = None  # else the part before would stay in memory
        return self._batches_of(part, num_batches, self.seed, rank, num_ranks)

    def _batches_of(
        self, part: Graph, num_batches: int, seed: int, rank: int, num_ranks: int, *, in_background: bool = True
    ) -> BatchLoader:
        """Return a loader of training batches of a part."""
        own, source = self._seeds_and_source(part, rank, num_ranks)
        seeds = torch.cat([own, self._seeds_around(part, rank, num_ranks)])
        loading = self.loading if in_background else replace(self.loading, bulk_size=1, num_threads=0)
        make, inputs = partial(BatchLoader, num_taken=own.numel()), self._inputs_of(part, seeds)
        seed_of_rank = seed * num_ranks + rank  # replicas differ in what they draw
        return self._loader(source, seeds, num_batches, seed_of_rank, loading, inputs=inputs, make=make)

    def _global_batches(self) -> GlobalBatches:
        if self._whole is None:
            size = self.global_batching.batch_size or self.batch_size * self._world_size()
            source = self._whole_source(self._whole_sampler())
            bulk_size = self.loading.bulk_size if source.is_remote else 1  # one question for many batches
            more = self._dtype(), self._has_inputs, self.loading.num_threads > 0, lambda: passes_left(self.trainer) > 0
            self._whole = batches_of(source, self._correction_seeds(), size, self.seed, bulk_size, *more)
        return self._whole

    def _whole_sampler(self) -> Sampler:
        """Return the sampler of the whole graph for corrections."""
        return self._settings.of_corrections()

    def _num_batches(self) -> int:
        """Return the number of batches of a pass, the same for all ranks and parts."""
        return -(-self._most_seeds(self._world_size()) // self.batch_size)

    def _nodes_loader(self, nodes: Tensor, whose: str) -> BatchLoader:
        return self._eval_loader(self._eval_sampler, nodes, f"{whose} {nodes.numel()} nodes")

    def _eval_sampler(self, more_hops: int = 0) -> Sampler:
        """Return the sampler of an evaluation: of whole rows, as many hops as the layers of the model say, and more."""
        module, num_hops = self._module(), self.sampler.num_hops
        hops = num_hops if module is None else hops_of_evaluation(module, num_hops)
        return self._settings.of_evaluation(hops - num_hops + more_hops)

    def _eval_loader(
        self,
        sampler_of: Callable[[int], Sampler],
        seeds: Tensor | range,
        whose: str,
        num_ids: int | None = None,
        targets: Callable[[Tensor], Targets] = Targets,
    ) -> BatchLoader:
        """Return a loader of this rank's share of ``seeds``, sampled in the whole graph by one of some samplers."""
        sampler = sampler_of(0)
        self.exactness.check(self.trainer)
        world_size, count = self._world_size(), len(seeds)
        if count < world_size:
            raise ValueError(
                f"{whose}, but {world_size} ranks share the evaluation: mark more or leave it out, limit_val_batches=0."
            )
        evaluated = Evaluated(seeds, lambda ids: targets(ids).nodes.unique(), world_size)
        size = self.evaluation.batch_size or self.batch_size
        if self.evaluation.batch_size is None and not is_limited(self.trainer):
            size = self._eval_batch_size(evaluated, sampler)
        loading, source = self.loading, self._whole_source(sampler, num_ids)
        if loading.sample_on != "cpu":
            loading = replace(loading, bulk_size=1)  # full neighbourhoods are large for a device
        rows, num_batches = self._ready_rows(evaluated, size), evaluated.num_batches(size)
        outlook = Outlook(
            evaluated,
            lambda more_hops: self._whole_source(sampler_of(more_hops), num_ids),
            self._bytes_around,
            lambda: num_batches == 1 and world_size == 1 and self._is_whole_graph(evaluated.nodes),
        )
        look = partial(self.exactness.look, self.trainer, outlook)
        make = partial(EvaluationLoader, self.sampler.num_hops, look, rows, targets)
        share, places = (replace(evaluated, ids=ids).share(self._eval_place()) for ids in (seeds, range(count)))
        loader = self._loader(source, share, num_batches, self.seed, loading, shuffle=False, inputs=places, make=make)
        self._loaders.append(loader)
        return loader

    def _eval_batch_size(self, evaluated: Evaluated, sampler: Sampler) -> int:
        """Return how many seeds a batch of an evaluation has, the same on all ranks."""
        return self.batch_size

    @abstractmethod
    def _bytes_around(self, some: Sequence[Tensor], most: int) -> list[int | None]:
        """Return the bytes of a batch around each of some lists of nodes, with one hop more than an evaluation has.

        None where these are more than ``most``, or where that hop brings no edge.
        """

    def _is_whole_graph(self, seeds: Tensor) -> bool:
        """Return whether a batch of an evaluation around these nodes is known to be the whole graph."""
        return False

    def _ready_rows(self, evaluated: Evaluated, batch_size: int) -> ReadyRows | None:
        """Return what computes the rows of all seeds layer by layer, or None where batches do it at less cost."""
        return None

    def _model_layers(self) -> ModelLayers | None:
        """Return the layers of the model, if it has as many as the batches have hops, and these take whole rows."""
        module = self._module()
        if module is None or not self._settings.evaluates_whole_rows:
            return None
        return layers_as_they_are(module, self, self.sampler.num_hops)

    def _loader(
        self,
        source: BatchSource,
        seeds: Tensor,
        num_batches: int,
        seed: int,
        loading: Loading,
        *,
        shuffle: bool = True,
        make: Callable[..., BatchLoader] = BatchLoader,
        inputs: Tensor | None = None,
    ) -> BatchLoader:
        how = {"bulk_size": loading.bulk_size, "num_threads": loading.num_threads, "num_ranks": self._world_size()}
        return make(source, seeds, num_batches, seed=seed, shuffle=shuffle, dtype=self._dtype(), inputs=inputs, **how)

    def _module(self) -> LightningModule | None:
        """Return the model that is trained or evaluated."""
        return None if self.trainer is None else getattr(self.trainer, "lightning_module", None)

    def _dtype(self) -> torch.dtype | None:
        return type_of_model(self.trainer)

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0
