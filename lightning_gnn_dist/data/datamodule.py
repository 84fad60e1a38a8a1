"""The data module of nodes: each rank trains on its part of a graph, and evaluates on the whole graph."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning.pytorch import LightningModule
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.boundary.auto import Auto, boundary_of
from lightning_gnn_dist.boundary.boundary import Boundary, check_boundary
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import check_instance, distinct_ids
from lightning_gnn_dist.data.graph_datamodule import GraphDataModule
from lightning_gnn_dist.data.inductive import check_alike, task_elsewhere
from lightning_gnn_dist.data.task import NodeTask
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.opening import (
    check_labelled,
    check_samplers,
    check_typed,
    chosen_seed_type,
    folder_of,
    graph_of,
    sampler_of_task,
)
from lightning_gnn_dist.homes.plan import PartPlan
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.homes.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.homes.whole import WholeHome
from lightning_gnn_dist.partition.default import Cut, unless_auto
from lightning_gnn_dist.sampling.base import Sampler

if TYPE_CHECKING:
    from lightning_gnn_dist.batches.batches import Batches
    from lightning_gnn_dist.joint import CountsSeeds, ForStrategies, HasDigests, HasParts, KeepsRows


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
            too large for it, ``KaMinParPartitioner()`` takes its place (extra ``kaminpar``), else
            ``StreamingPartitioner()``; the log says so. Shards were cut when they were divided.
        sampler: How training batches are drawn. Default: ``NeighborSampler([15, 10])``; for a task of a database the
            row that a question is about, and the latest neighbours of two hops before the question.
        batch_size: Training nodes (seeds) in a batch, at most. All ranks have the same number of batches, so batches of
            a part with fewer training nodes are smaller. Each node is a seed once a pass, unless ``Halo`` adds seeds.
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
        global_batching: How the whole graph is sampled for corrections: of shards by a ``NeighborSampler``, a
            ``LadiesSampler`` or a ``FastGCNSampler``, which keeps a number for every node of the graph.
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
        check_labelled(tables, task)
        sampler = sampler_of_task(tables, task) if sampler is None else sampler
        settings = BatchSettings(sampler, batch_size, seed, loading, evaluation, global_batching)
        if coverage is not None:
            check_instance("coverage", coverage, Coverage, 'an object such as Coverage() or Coverage("batch"), or None')
        asked = boundary_of(boundary, of_edges=False, is_in_shards=not isinstance(where, Graph), is_for_parts=False)
        check_boundary(asked)
        asked.check_settings(settings)
        running, values = Running(settings, self), ValueCheck(is_on=settings.loading.check_values)
        self._given: dict[str, Any] = {"sampler": given, "batch_size": batch_size, "seed": seed, "loading": loading}
        self._given |= {"holding": holding, "boundary": boundary, "global_batching": global_batching}
        self._given |= {"evaluation": evaluation, "coverage": coverage, "task": task}
        if not isinstance(where, Graph):
            cut: Any = {"task": task, "partitioner": partitioner, "holding": holding}
            home = where.home(running, asked, coverage, **cut)
            super().__init__(NodeTask(home, values), task_elsewhere(running, home.types))
            return
        kind = chosen_seed_type(where.types, task, "this one")
        whole = where if kind is None or kind == where.types.seeds else where.with_seeds(kind)
        check_typed(whole.types, settings)
        check_samplers(whole, settings)
        plan = PartPlan(whole, unless_auto(partitioner), holding, asked, coverage, settings.seed_of_parts)
        learned = NodeTask(WholeHome(plan, running), values)
        learned.check(whole)
        super().__init__(learned, task_elsewhere(running, whole.types))

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
        check_alike("on(...)", self._home.types, found._home.types)
        return found if self.predicted is None else found.only(self.predicted - self._judging.home.ids.start)

    def only(self, nodes: Sequence[int] | Tensor) -> PartitionedDataModule:
        """Return a data module that predicts these nodes, in their order, and does all else as this one.

            rows = trainer.predict(model, data.only([3, 141, 59]))

        Where that costs less than a pass over all nodes, only what these nodes reach is computed.

        Args:
            nodes: Ids of nodes; of a typed graph, among those of the type that is learned from.
        """
        found = copy(self)
        ids = self._judging.home.ids
        found.predicted = distinct_ids("nodes", nodes, len(ids)) + ids.start
        return found


def what_is_judged(data: GraphDataModule) -> Graph | Path:
    """Return what is validated, tested and predicted: a graph, or the folder of this host's shards of one."""
    home = data._judging.home
    if home.folder is not None:
        return home.folder
    assert isinstance(home, WholeHome)
    return home.graph


def what_is_predicted(
    data: PartitionedDataModule, module: LightningModule, more_hops: int = 0
) -> tuple[Graph, Sampler]:
    """Return the graph that is predicted, which this host must have, and the sampler of what a model reads of it.

    Args:
        data: The data module.
        module: The model.
        more_hops: How many hops more are drawn than the model has layers, where all neighbours are taken.
    """
    graph = what_is_judged(data)
    if isinstance(graph, Path):
        raise shards_are_not_served(graph, "graph")
    return graph, data._running.sampler_of_evaluation(more_hops, module)


def shards_are_not_served(shards: Path | None, argument: str) -> ValueError:
    """Return the refusal of shards by a server, which reads rows of all nodes on its host."""
    return ValueError(
        f"A server reads the whole graph, and {shards} holds shards: name what they were divided from, "
        f"--data.{argument}=my_{argument}, of which it maps the files; or write all rows once with predict --output, "
        "which takes shards."
    )


if TYPE_CHECKING:

    def _offers(
        data: GraphDataModule, loader: Batches
    ) -> tuple[ForStrategies, HasDigests, HasParts, KeepsRows, CountsSeeds]:
        """Let mypy check that these have what the Protocols of ``joint`` ask for."""
        return data, data, data, data, loader
