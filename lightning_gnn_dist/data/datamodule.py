"""The data module of nodes: each rank trains on its part of a graph, and evaluates on the whole graph."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import model_helpers, rank_zero_info
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.batches import Batches, GlobalBatches, Learning
from lightning_gnn_dist.boundary.boundary import Auto, Boundary, Isolated, boundary_of
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import (
    check_at_least,
    check_at_least_if_given,
    check_below,
    check_choice,
    check_instance,
    check_true_or_false,
    shown,
)
from lightning_gnn_dist.data.plain_ddp import guard_plain_ddp
from lightning_gnn_dist.data.task import NodeTask, Task, evaluation_of
from lightning_gnn_dist.engine.rng import Purpose
from lightning_gnn_dist.graph.convert import distinct_ids
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import check_arrays
from lightning_gnn_dist.homes.access import check_typed, folder_of, graph_of, with_seeds_of
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.run import ForgetsRun, RunContext, warn_of_slow_bfloat16
from lightning_gnn_dist.homes.settings import BatchSettings, Evaluation, GlobalBatching, Loading
from lightning_gnn_dist.joint import BringsHooks, GivesBatches, Scope
from lightning_gnn_dist.layers.choice import Judged
from lightning_gnn_dist.layers.exactness import Exactness
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.base import Cut, Partition, Partitioner
from lightning_gnn_dist.sampling.base import Sampler

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.user_ids import Columns


class GraphDataModule(ForgetsRun, LightningDataModule):
    """Batches of a rank's own part for training, and of the whole graph for evaluation and corrections.

    Its home says where the graph lives, and its task what is learned of it.

    Args:
        task: What is learned.
        judging: What is judged and predicted, where that is another graph. Default: what is learned.
    """

    sampler: Sampler
    batch_size: int
    loading: Loading
    evaluation: Evaluation
    global_batching: GlobalBatching

    def __init__(self, task: Task, judging: Task | None = None) -> None:
        self._task, self._home = task, task.home
        self._judging = task if judging is None else judging
        self._tasks = [task] if judging is None else [task, judging]
        super().__init__()
        settings = self._home.running.settings
        vars(self).update(sampler=settings.training_sampler, batch_size=settings.batch_size, loading=settings.loading)
        vars(self).update(evaluation=settings.evaluation, global_batching=settings.global_batching)
        self.predicted: Tensor | None = None  # nodes of the graph; None is all
        self._train_batches: Batches | None = None
        self._anchors: tuple[Graph, Batches] | None = None  # of the running part

    # What it was made of.

    def __setattr__(self, name: str, value: Any) -> None:
        is_settled = name in BatchSettings.__dataclass_fields__ and "_home" in vars(self)
        now = getattr(self, name, value) if is_settled else value
        if value is not now and (type(value) is not type(now) or value != now):
            said = f"{name} is {shown(now)} for good: batches are made as a data module was told when it was made."
            raise AttributeError(f"{said} Make another, {type(self).__name__}(..., {name}={shown(value)}).")
        super().__setattr__(name, value)

    @property
    def trainer(self) -> Trainer | None:
        """The trainer of the run, which Lightning sets."""
        return self._home.running.trainer

    @trainer.setter
    def trainer(self, trainer: Trainer | None) -> None:
        self._enter(self._home.running.within(trainer))

    def _enter(self, run: RunContext) -> None:
        """Let all that is made from here on be of this run."""
        for home in [task.home for task in self._tasks]:
            if (run.rank, run.num_ranks) != (home.running.rank, home.running.num_ranks):
                home.rest()  # of what another rank holds
            home.running = run

    @property
    def seed(self) -> int:
        """The seed of batches: as given; else the checkpoint's, or that of ``seed_everything`` as the fit began."""
        return self._home.running.seed

    @property
    def boundary(self) -> Boundary:
        """What becomes of senders outside the part; in a fit what ``"auto"`` has chosen."""
        return self._home.boundary

    @property
    def coverage(self) -> Coverage | None:
        """What gives batches weights for the loss; None where there are none, or where nothing is lost."""
        return self._home.coverage

    @cached_property
    def exactness(self) -> Exactness:
        """Says whether figures of evaluations are those of the whole graph."""
        settings = self._home.running.settings
        probes = self._judging.probes and settings.evaluation.probe and settings.evaluates_whole_rows
        return Exactness(settings.training_sampler, settings.evaluation.sampler, probes=probes)

    def __str__(self) -> str:
        # Lightning's own would take every loader apart.
        return f"{type(self).__name__}({self._home}, {self.sampler}, batch_size={self.batch_size})"

    __repr__ = __str__

    # The graph.

    @property
    def fingerprint(self) -> str:
        """A hash of what is learned and judged, by which a strategy sees whether all ranks have the same."""
        found = [task.home.fingerprint for task in self._tasks]
        return found[0] if len(found) == 1 else hashlib.blake2b(" ".join(found).encode(), digest_size=16).hexdigest()

    @property
    def digests(self) -> dict[str, Any]:
        """Digests of what else ranks must have alike: the graph's arrays, and which rank holds what."""
        return self._home.digests

    @property
    def num_nodes(self) -> int:
        """The number of nodes of the graph that is predicted, of the type that is learned from."""
        return len(self._judging.home.types.seed_ids)

    def counts_of_nodes(self) -> frozenset[int]:
        """Return how many nodes the graph has, and how many there are of each type."""
        types = self._home.types
        return frozenset({types.offsets[-1], *(len(types.nodes_of(kind)) for kind in types.node_types)})

    @property
    def shards_path(self) -> Path | None:
        """The folder of this host's shards; None where every host has the graph."""
        return self._home.folder

    @property
    def graph(self) -> Graph:
        """The graph, as batches show it. Of shards no rank has one."""
        return self._whole("graph").graph

    @property
    def holding(self) -> Holding:
        """What a rank holds. Of shards each holds one."""
        return self._whole("holding").holding

    @property
    def partitioner(self) -> Partitioner | Partition | None:
        """What cuts the graph, None of shards. Where none was named, it depends on the strategy: before a fit METIS."""
        return self._home.plan.partitioner if isinstance(self._home, LocalGraph) else None

    def partition(self, num_parts: int) -> Partition:
        """Return the partition for ``num_parts`` ranks, from the cache or computed and put there. Shards have none."""
        check_at_least(1, num_parts=num_parts)
        return self._home.partition(num_parts)

    def parts_of_ranks(self, num_ranks: int) -> Partition:
        """Return the partition that maps each node to the rank that learns from it in super-epoch 0."""
        check_at_least(1, num_ranks=num_ranks)
        return self._whole("parts_of_ranks()").plan_for(num_ranks).by_rank()

    @property
    def num_parts(self) -> int:
        """How many parts there are in this run: one for each rank."""
        return self._home.running.num_ranks

    def part(self, rank: int, num_parts: int, super_epoch: int = 0) -> Graph:
        """Return what rank ``rank`` trains on: the nodes of its part and the edges among them, in RAM."""
        check_at_least(1, num_parts=num_parts)
        check_below(num_parts, "parts", rank=rank)
        check_at_least(0, super_epoch=super_epoch)
        return self._whole("part()").part(rank, num_parts, super_epoch)

    def _whole(self, name: str) -> LocalGraph:
        if isinstance(self._home, LocalGraph):
            return self._home
        raise AttributeError(  # so that hasattr(data, "graph") says whether there is one
            f"{type(self).__name__}.{name} is of a graph that every host has, and {self._home} holds shards: "
            "give the data module the graph or the path of a saved one."
        )

    def check_before_ranks(self, trainer: Trainer, module: LightningModule) -> None:
        """Refuse what lacks, or is wrong, for a call of the trainer with a module. Shards are looked at in ranks."""
        is_fit, learns, judges = trainer.state.fn == TrainerFn.FITTING, self._task.home, self._judging.home
        judged = {"fit": "val", "validate": "val", "test": "test"}.get(trainer.state.fn or "")
        validates = trainer.limit_val_batches != 0 and model_helpers.is_overridden("validation_step", module)
        if is_fit and isinstance(learns, LocalGraph):
            self._task.check_whole(learns.whole)
            if self._task.checks_values and learns.whole.path is None:  # of files ranks read their own rows alone
                check_arrays(learns.whole)
        if judged is not None and (validates or not is_fit) and isinstance(judges, LocalGraph):
            self._judging.judged(judged).check_shared(trainer.world_size)

    # What Lightning calls.

    def prepare_data(self) -> None:
        """One process of every host computes the partition; the others find it in the cache."""
        self._enter(self._home.running.within(self.trainer))  # whose ranks are there now
        self._home.prepare()

    def setup(self, stage: str) -> None:
        """Open the graph, and find out what all ranks have alike. Collective.

        Ranks meet in this order: to find out who shares a host, and to agree on the memory of an evaluation and on the
        seed, to choose what ``boundary="auto"`` is, to connect shards, to read the part of a shard, and to count what
        each of them learns.
        """
        is_fit, trainer, home = stage == "fit", self.trainer, self._home
        self._enter(home.running.within(trainer).agreed(is_fit=is_fit))
        if trainer is not None:
            warn_of_slow_bfloat16(trainer)
            if is_fit and self.num_parts > 1:
                home.asked.check_in_fit(trainer)
                guard_plain_ddp(trainer)  # before DDP takes rows that are not made
        for task in self._tasks:
            task.home.open(task.check, task.check_of_all)
        if not is_fit:
            return
        home.begin_fit()
        self._task.begin_fit()
        # To count them refuses ranks with nothing to learn from; who exchanges in every step has one batch.
        most = self.batch_size if home.exchanges else self._task.most()
        if most < self.batch_size:
            rank_zero_info(f"batch_size={self.batch_size} is above a rank's {most} seeds: a pass is one batch of all.")

    def train_dataloader(self) -> Batches:
        home, size = self._home, self._task.num_batches()
        run, trainer, parts = home.running, home.running.trainer, home.parts
        if trainer is not None and run.num_ranks > 1:
            guard_plain_ddp(trainer)

        def learning(phase: int) -> Learning:
            part = parts.at(phase)
            if self._anchors is not None and self._anchors[0] is not part:
                self._anchors = None  # else the part before would stay in memory
            # No two parts are dealt alike. The seed may come from a checkpoint, and later ranks may be others.
            return self._task.learned(part, size, home.running.seed * run.num_ranks + run.rank)

        made = self._train_batches = Batches(
            learning,
            size,
            every=home.every() if home.is_cut else None,
            turns=home.turns,
            weigh="batch" if home.is_cut and home.coverage is not None and home.coverage.level == "batch" else "node",
            num_used=lambda: self.trainer.num_training_batches if self.trainer is not None else math.inf,
            overfits=trainer is not None and trainer.overfit_batches > 0,  # type: ignore[attr-defined]
            **run.options_of_batches,
        )
        if home.exchanges:
            made.move_to(0)  # now, as all ranks are here
        self._loaders.append(made)
        return made

    def val_dataloader(self) -> Batches:
        return self._evaluates(self._judging.judged("val"))

    def test_dataloader(self) -> Batches:
        return self._evaluates(self._judging.judged("test"))

    def predict_dataloader(self) -> Batches:
        """Return a loader of this rank's share of the nodes in order; of shards, of all nodes nearly all its own."""
        return self._evaluates(self._judging.predicted(self.predicted))

    def node_columns(self, ids_of: Path | None) -> Columns:
        """Return how a table names the rows of what is predicted, by the ids of a prepared graph."""
        return self._judging.columns(self.predicted, ids_of)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed fit keeps: the seed, passes in a super-epoch, and what "auto" has chosen."""
        return {"seed": self.seed} | self._home.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if (kept := state_dict.get("seed")) is not None and self._home.running.stage in (None, TrainerFn.FITTING):
            self._enter(self._home.running.with_seed(kept))
        self._home.restore(state_dict)

    def teardown(self, stage: str) -> None:
        """End what runs in the background, and free what it has taken."""
        for loader in self._loaders:
            loader.close()
        for task in self._tasks:
            task.close()
        self._anchors = None
        self.rest()

    def on_exception(self, exception: BaseException) -> None:
        """End what runs in the background: after an exception Lightning tears nothing down."""
        self._home.abort()  # first, as a thread may wait for a rank that will never answer
        self.teardown("fit")

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_train_batches": None, "_anchors": None}

    # What strategies ask for.
    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        """Yield batches ``start`` to ``stop`` of the whole graph in a round: this rank's slice of each, or all of it.

        They depend on the seed, the round and the rank alone, so that a resumed run sees the same ones. Of shards they
        are collective, and sliced.
        """
        check_at_least(0, round_idx=round_idx, start=start)
        check_at_least_if_given(0, stop=stop)
        check_true_or_false(sliced=sliced)
        if not sliced and self.shards_path is not None:
            raise ValueError(
                'Correction(way="rank0") computes a batch of the whole graph on one rank, and no rank can '
                'make one of a sharded graph alone: use way="sliced".'
            )
        run = self._home.running
        rank, num_slices = (run.rank, run.num_ranks) if sliced else (0, 1)
        return self._global_batches.of_round(round_idx, rank, num_slices, start, stop)

    def anchor_batches(self, round_idx: int, *, of: Scope = "part", start: int | None = None) -> Iterator[Data]:
        """Yield one pass over the rank's own part, or its slices of one over the graph, drawn for this round.

        With ``of="graph"`` these are also the round's first correction batches. With ``start``, the number of training
        batches before the round, the part is that of the batch that follows; without, it is the running part.
        """
        check_at_least(0, round_idx=round_idx)
        check_at_least_if_given(0, start=start)
        check_choice("of", of, Scope)
        if of == "graph":
            return self.correction_batches(round_idx, stop=self._global_batches.num_batches)
        if start is not None and self._train_batches is not None:
            self._train_batches.move_to(start)
        if self._anchors is None:
            part, run = self._home.parts.current(), self._home.running
            seed = (run.seed + Purpose.ANCHORS) * run.num_ranks + run.rank
            learning = self._task.learned(part, self._task.num_batches(), seed)
            how: Any = {"bulk_size": 1, "num_threads": 0, "dtype": run.dtype}  # each is made when it is due
            self._anchors = part, Batches(lambda _: learning, learning.deal.num_batches, **how)
        anchors = self._anchors[1]
        return anchors.stream(round_idx * len(anchors), (round_idx + 1) * len(anchors))

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log: waiting for data, what switching parts and asking for rows cost, the part's coverage."""
        loader = self._train_batches
        waited, share = (0.0, 0.0) if loader is None else (loader.waited_seconds, loader.waited_share)
        return {"data/waited_seconds": waited, "data/waited_share": share, **self._home.figures}

    @property
    def uncovered(self) -> tuple[int, int]:
        """The counts of seeds of weight 0 and of all seeds in the part that was read; (0, 0) where none has its own."""
        parts = vars(self._home).get("parts")  # which only a run has, and asking would read
        return (0, 0) if parts is None else parts.uncovered

    def against_averaging(self) -> str | None:
        """Return why averaging alone loses accuracy on these parts, and what to do; None where it loses little."""
        return self._home.against_averaging() if self._task.has_inputs else None

    def meeting_hooks(self) -> Sequence[Any]:
        """Return the hooks of meetings that the boundary brings along."""
        return self.boundary.hooks()

    # What it is made of.

    @cached_property
    def _loaders(self) -> list[Batches]:
        """Those of this run."""
        return []

    def _evaluates(self, judged: Judged) -> Batches:
        self._loaders.append(evaluation_of(judged, self._judging.home, self.exactness, self))
        return self._loaders[-1]

    @cached_property
    def _global_batches(self) -> GlobalBatches:
        run, task = self._home.running, self._task
        size = self.global_batching.batch_size or self.batch_size * run.num_ranks
        source = self._home.whole_source(task.across(run.settings.correction_sampler))
        bulk_size = self.loading.bulk_size if source.is_remote else 1  # one question for many batches
        more = run.dtype, task.has_inputs, self.loading.num_threads > 0
        return GlobalBatches(source, task.of_corrections(), size, self.seed, bulk_size, *more)


class PartitionedDataModule(GraphDataModule):
    """Cut a graph into one part per rank, and hand out batches of the rank's own part.

    Training batches come from the part alone (unless ``boundary`` adds nodes): its nodes, the edges among them, and
    their features, copied into RAM. Validation, testing and prediction see the whole graph with all neighbours, and
    the ranks divide the nodes among themselves, so metrics are exact. On one rank batches come from the whole graph.

    A batch is a PyG ``Data``: the first ``batch.batch_size`` nodes are the seeds, ``batch.y`` holds their labels and
    no others (``Loading(all_labels=True)`` gives all), ``batch.n_id`` holds the nodes' ids
    in the whole graph, ``batch.blocks`` one bipartite adjacency per layer (outermost first), ``batch.edge_index`` the
    edges of all layers. Batches of a typed graph are ``HeteroData``, whose seeds are of the type that has the
    ``train_mask``; of several, choose one by ``task``.

    Given the folder of shards that :func:`save_shards` wrote, every host has a shard of the graph and none has all.
    Rank ``r`` needs its ``shares.json`` and shard ``r % n``, and its part is the shard. Corrections, evaluation and
    prediction sample across all shards: the ranks that own the rows draw neighbours, and features are fetched once for
    all nodes of a bulk, in the background, before they are due. Batches and metrics are the same as if every rank had
    the whole graph, with nodes and edges in the order of the shards. With more ranks than shards, several ranks hold
    the same shard: ``2 n`` ranks of ``n`` shards form two groups that never ask each other, and divide the training
    nodes of a shard among them.

    Args:
        graph: A :class:`Graph`, a PyG ``Data`` or ``HeteroData``, or the path of a saved graph or of shards. With the
            path of a graph a rank holds no more than its part in RAM, and what its boundary adds; the rest stays on
            disk.
        partitioner: How the graph is cut, or a ready :class:`Partition`. Default: ``MetisPartitioner()``,
            and ``SuperNodePartitioner()`` for strategies of rounds, which average models of different parts (unless
            ``holding`` deals chunks anew). ``"auto"``: the same. Where METIS is not installed, or the graph is
            too large for it, ``StreamingPartitioner()`` takes its place; the log says so. Shards were cut when they
            were divided.
        sampler: How training batches are drawn. Default: ``NeighborSampler([15, 10])``; for a task of a database the
            row that a question is about, and the latest neighbours of two hops before the question.
        batch_size: Training nodes (seeds) in a batch, at most. All ranks have the same number of batches, so batches of
            a part with fewer training nodes are smaller. Each node is a seed once a pass.
            The largest part of the first 16 super-epochs decides the number; a later, larger part has larger batches.
        seed: Decides everything random: the partition, the order of seeds, the neighbours. Default: for
            batches the seed of Lightning's ``seed_everything`` as the fit begins, and 0 without one; 0 for the
            partition, which is not made anew, and for what ranks hold of it. A resumed fit keeps its seed.
        loading: How batches are made: bulks, threads, the device, memory for rows of files and of other shards. It
            never changes what is in them.
        holding: What a rank holds: which chunks of the partition, when that changes, and random nodes of others; and
            where partitions are kept. Of shards a rank holds one.
        boundary: What becomes of senders outside the part: :class:`Isolated`, :class:`Halo`,
            :class:`Exchange`, :class:`History` or :class:`Fetch`; ``"auto"`` or :class:`Auto` chooses one that fits
            into memory. For shards, whose ranks cannot count that beforehand, ``"auto"`` is ``Isolated()``, and there
            is no :class:`History`. What ``Halo`` and ``Exchange`` need of other shards is asked for once, when the fit
            starts.
        evaluation: How the whole graph is sampled to evaluate a model. Default: all neighbours, which is exact.
        global_batching: How the whole graph is sampled for corrections: of shards by a ``NeighborSampler`` or a
            ``LadiesSampler``.
        coverage: Gives each batch ``batch.coverage``, the share of each neighbourhood that the part holds, as
            weights for the loss (:func:`coverage_mean`) and for :class:`GrappaStrategy`. With None there are none.
        task: Of a graph with types what is learned: a task of the database that it was made of, whose columns to hide
            are then left out, or the node type that is learned from and evaluated. Default: the one that has a
            ``train_mask``, or that :meth:`Graph.with_seeds` has chosen.
    """

    def __init__(
        self,
        graph: Graph | Data | HeteroData | str | Path,
        *,
        partitioner: Cut = None,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        seed: int | None = None,
        loading: Loading = Loading(),  # noqa: B008  # frozen, as all of these
        holding: Holding = Holding(),  # noqa: B008
        boundary: Boundary | Literal["auto"] = Auto(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        global_batching: GlobalBatching = GlobalBatching(),  # noqa: B008
        coverage: Coverage | None = Coverage(),  # noqa: B008
        task: str | None = None,
    ) -> None:
        where, given = folder_of(graph, "graph") or graph_of(graph), sampler
        tables = where.types.tables if isinstance(where, Graph) else where.tables
        if tables is not None:
            drawn = extension("task of a database")(tables, task, has_labels=True)
            sampler = drawn if sampler is None else sampler
        settings = BatchSettings(sampler, batch_size, seed, loading, evaluation, global_batching)
        if coverage is not None:
            check_instance("coverage", coverage, Coverage, 'an object such as Coverage() or Coverage("batch"), or None')
        # In shards, whose ranks cannot count beforehand what fits, nothing is chosen.
        asked = boundary_of(boundary, Auto() if isinstance(where, Graph) else Isolated())
        check_instance("boundary", asked, Boundary, "an object such as Isolated(), Halo() or Exchange()")
        asked.check_settings(settings)
        running = RunContext(settings)
        self._given: dict[str, Any] = {"sampler": given, "batch_size": batch_size, "seed": seed, "loading": loading}
        self._given |= {"holding": holding, "boundary": boundary, "global_batching": global_batching}
        self._given |= {"evaluation": evaluation, "coverage": coverage, "task": task}
        if isinstance(where, Graph):
            whole = with_seeds_of(where, task)
            check_typed(whole.types, settings, whole)
            learned: Task = NodeTask(LocalGraph(whole, running, partitioner, holding, asked, coverage))
            learned.check(whole)
        else:
            cut: Any = {"task": task, "partitioner": partitioner, "holding": holding}
            learned = where.nodes(running, asked, coverage, **cut)
        on = evaluation.on
        judging = None if on is None else extension("another graph").task(on, running, learned.home.types)
        super().__init__(learned, judging)

    def on(self, graph: Graph | Data | HeteroData | str | Path) -> PartitionedDataModule:
        """Return a data module of another graph, with the settings of this one.

            trainer.test(model, data.on(later_graph))

        It validates, tests, predicts and trains on that graph alone, and predicts the nodes of the same ids where this
        one predicts some. It is cut by the default partitioner.

        Args:
            graph: A graph with the same features and types, or its path, or that of shards.
        """
        given = self._given | {"evaluation": replace(self.evaluation, on=None)}
        found = copy(self)  # of a class derived from this one, too
        PartitionedDataModule.__init__(found, graph, **given)
        extension("another graph").check_alike("on(...)", self._home.types, found._home.types)
        return found if self.predicted is None else found.only(self.predicted - self._judging.home.types.seed_ids.start)

    def only(self, nodes: Sequence[int] | Tensor) -> PartitionedDataModule:
        """Return a data module that predicts these nodes, in their order, and does all else as this one.

            rows = trainer.predict(model, data.only([3, 141, 59]))

        Where that costs less than a pass over all nodes, only what these nodes reach is computed.

        Args:
            nodes: Ids of nodes; of a typed graph, among those of the type that is learned from.
        """
        found = copy(self)
        ids = self._judging.home.types.seed_ids
        found.predicted = distinct_ids("nodes", nodes, len(ids)) + ids.start
        return found


def what_is_judged(data: GraphDataModule) -> Graph | Path:
    """Return what is validated, tested and predicted: a graph, or the folder of this host's shards of one."""
    home = data._judging.home
    if home.folder is not None:
        return home.folder
    assert isinstance(home, LocalGraph)
    return home.graph


if TYPE_CHECKING:

    def _offers(data: GraphDataModule) -> tuple[GivesBatches, BringsHooks]:
        """Let mypy check that it has what the Protocols of ``joint`` ask for."""
        return data, data
