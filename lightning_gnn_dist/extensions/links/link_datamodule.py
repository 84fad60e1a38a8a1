"""The data module for edges, predicted or labelled: each rank learns those of its part; evaluation is exact."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lightning_gnn_dist.batches.batch import ENDS
from lightning_gnn_dist.boundary.boundary import Auto, Boundary, Fetch, Isolated, boundary_of
from lightning_gnn_dist.checks import check_instance, check_path, shown
from lightning_gnn_dist.data.datamodule import GraphDataModule
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.extensions.links.task import (
    AnswerEdges,
    Answers,
    EdgeTask,
    WholeEdges,
    check_settings_of_edges,
    negatives_of,
    sampler_of_events,
    without_labels,
)
from lightning_gnn_dist.graph.convert import distinct_ids
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup
from lightning_gnn_dist.graph.typed.tables import TIME
from lightning_gnn_dist.homes.access import check_typed, folder_of
from lightning_gnn_dist.homes.local_graph import LocalGraph
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.run import RunContext
from lightning_gnn_dist.homes.settings import BatchSettings, Evaluation, GlobalBatching, Loading
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.base import Cut
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.whole import WholePartSampler


class LinkDataModule(GraphDataModule):
    """Batches of edges, with false ones to tell them from or with labels: each rank learns the edges of its part.

    A training batch asks for ``batch_size`` edges of the part and ``num_negatives`` false ones for each. None of the
    edges it asks for carries a message, in either direction. Validation and testing ask for held edges and their fixed
    negatives with all neighbours in the graph of training edges. The ranks divide the held edges among themselves, so
    :class:`LinkRanking` is exact. On one rank batches come from the whole graph.

    Of a split in shards batches are the same, with nodes in the order of the shards. An edge is learned by a rank that
    has the shard of its receiver; other ranks are asked for false receivers, neighbours and features, in the
    background, before they are due. The ranks share the held edges evenly, whichever shards these lie with. With more
    ranks than shards, several ranks hold the same shard, and divide its edges among them.

    A batch is a PyG ``Data``: the ends of all targets are the first ``batch.batch_size`` nodes. For target ``i``,
    ``batch.edge_label_index[:, i]`` are the positions of its ends among them, and ``batch.edge_label[i]`` is 1 for a
    true edge and 0 for a false one. True edges come first, then the negatives of each in turn. ``batch.n_id``,
    ``batch.blocks`` and ``batch.edge_index`` are as in :class:`PartitionedDataModule`. Every edge is asked for
    once a pass, by the rank that has its receiver. ``Isolated()`` and ``Halo()`` leave out edges between parts.

    Of a split with labels, targets are edges alone, ``batch.edge_label`` has a label for each, and what else they carry
    is there as well: rows of ``edge_attr`` as ``batch.edge_label_attr``. No other edge of the batch shows its label.

    Of a split by time, the ends of each target are roots of trees of their own, which hold what was there before the
    target, as :class:`TemporalSampler` draws it: ``batch.batch`` says for each node which root it is reached from, and
    ``edge_label_index`` has the places of these roots. Negatives have the time of their edge.

    Of a graph with types a split is of one edge type, ``(source, name, target)``, and a batch a ``HeteroData``. There
    ``batch[edge_type]`` has the targets, and the ends of all of them are the first ``batch[source].batch_size`` and
    ``batch[target].batch_size`` nodes of their types. False receivers are nodes of the target's type.

    Args:
        split: A :class:`LinkSplit`, as :func:`split_edges` makes it, or the path of a saved one, which stays on disk
            and is read as batches need it; with ``Isolated()`` or ``Halo()`` a rank takes its part into RAM. Or the
            folder of shards that ``save_shards(split, partition, path)`` wrote: rank ``r`` needs its ``shares.json``
            and shard ``r % n``. With a ``task``, a prepared database, or its path.
        task: A task of the database that recommends: its questions are the senders, see :class:`MeanAveragePrecision`.
        partitioner: How the graph is cut, or a ready :class:`Partition`. Default: with ``Fetch()``, which loses nothing
            where parts end, ``RandomPartitioner()``; otherwise ``MetisPartitioner()``, and ``SuperNodePartitioner()``
            for strategies of rounds, which average models of different parts (unless ``holding`` deals chunks anew).
            ``"auto"``: the latter, whatever the boundary. Where METIS is not installed, or the graph is too large for
            it, ``StreamingPartitioner()`` takes its place; the log says so. Shards were cut when they were divided.
        sampler: How neighbours are drawn. Default: ``NeighborSampler([15, 10])``; of a split by time a
            :class:`TemporalSampler` with these numbers, of a task ``TemporalSampler([16, 8, 4], "time",
            pick="latest")``.
        batch_size: True edges in a training batch, at most. All ranks have the same number of batches.
        num_negatives: False receivers for each training edge. Default: 1, and none where edges have labels. They are
            drawn for its sender, in evaluations too: an AUC is another figure than that of PyG's false pairs.
        seed: Decides everything random: the partition, the order of edges, negatives, neighbours. Default: for
            batches the seed of Lightning's ``seed_everything`` as the fit begins, and 0 without one; 0 for the
            partition, which is not made anew, and for what ranks hold of it. A resumed fit keeps its seed.
        loading: How batches are made: bulks, threads, the device. It never changes what is in them.
        holding: What a rank holds: which chunks of the partition, when that changes, and random nodes of others; and
            where partitions are kept. Of shards a rank holds one.
        boundary: What a batch sees around the edges of its part: with :class:`Fetch` the whole graph, from which false
            receivers are drawn as well; with :class:`Isolated` the part, or with :class:`Halo` nodes around it, too,
            and false receivers are the rank's own. ``"auto"`` is ``Fetch()``, and ``Isolated()`` beside a
            ``holding``, or where a :class:`WholePartSampler` would take the whole graph for each batch.
        evaluation: How the whole graph is sampled to evaluate a model. Default: all neighbours, which is exact.
        global_batching: How the whole graph is sampled for corrections, which keep 16 bytes for each training edge; of
            shards, for each of the own shard.
    """

    def __init__(
        self,
        split: LinkSplit | Graph | str | Path,
        *,
        task: str | None = None,
        partitioner: Cut = None,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        num_negatives: int | None = None,
        seed: int | None = None,
        loading: Loading = Loading(),  # noqa: B008  # frozen, as all of these
        holding: Holding = Holding(),  # noqa: B008
        boundary: Boundary | Literal["auto"] = Auto(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        global_batching: GlobalBatching = GlobalBatching(),  # noqa: B008
    ) -> None:
        folder = folder_of(split, "split")
        holds = isinstance(holding, Holding) and not holding.is_one_chunk
        is_for_parts = holds or isinstance(sampler, WholePartSampler)
        boundary = boundary_of(boundary, Isolated() if is_for_parts else Fetch())  # which loses nothing
        known = _known(split, folder, task)
        is_whole = isinstance(known, LinkSplit | Answers)
        links = known.links
        num_negatives, time = negatives_of(links, num_negatives), links.time
        if isinstance(known, Answers):
            time, sampler = TIME, sampler or extension("task of a database")(known.graph.types.tables, task)
        settings = BatchSettings(
            sampler_of_events(sampler, time), batch_size, seed, loading, evaluation, global_batching
        )
        check_settings_of_edges(settings, boundary)
        if settings.evaluation.on is not None:
            raise ValueError(
                "Evaluation(on=...) is for nodes: a split holds the edges that are judged. To judge those of another "
                "graph, give its split to a data module of its own, trainer.test(model, LinkDataModule(other))."
            )
        self.task, self.split = task, known if isinstance(known, LinkSplit) else None
        running = RunContext(settings)
        if not is_whole:
            known.refuse_to_cut(partitioner, holding)
            super().__init__(known.edges(running, boundary, num_negatives))
            return
        graph = known.graph
        if links.edge_type is not None and graph.types.seeds is None:
            graph = graph.with_seeds(links.edge_type[2])
        if partitioner is None and boundary.sees_whole_graph:
            partitioner = RandomPartitioner()
        check_typed(graph.types, settings, graph)
        how: Any = {"fingerprint": known.fingerprint, "shown": partial(without_labels, links)}
        home = LocalGraph(graph, running, partitioner, holding, boundary, None, **how)
        _check_parts(home.holding)
        kind = AnswerEdges if isinstance(known, Answers) else WholeEdges
        learned = kind(home, num_negatives, known)
        learned.check(graph)
        super().__init__(learned)

    def only(self, nodes: Sequence[int] | Tensor) -> LinkDataModule:
        """Return a data module that predicts these nodes, in their order, and does all else as this one.

            found = trainer.predict(model, data.only([30, 31]))  # two questions of a task

        Args:
            nodes: Ids of questions of a task; without one, of nodes of the type that receives.
        """
        found, ids = copy(self), self._home.types.seed_ids
        found.predicted = distinct_ids("nodes", nodes, len(ids)) + ids.start
        return found

    def on_exception(self, exception: BaseException) -> None:
        """Say that batches of a prediction hold no pairs, and end what runs in the background."""
        if isinstance(exception, AttributeError) and ENDS in str(exception):
            exception.args = (
                f"A prediction is of nodes, and its batches have no {ENDS}: define a predict_step that returns rows, "
                "as through_layers(self, batch) does, and score pairs of them (docs/links.md, The best new links). "
                f"({' '.join(str(exception).split())})",
            )
        super().on_exception(exception)

    def places_of(self, questions: Tensor) -> NDArray[np.int64]:
        """Return where some questions stand among those that are predicted."""
        some, ids = self.predicted, questions.cpu()
        return (ids if some is None else Lookup(some - self._home.types.seed_ids.start)(ids)[0]).numpy()

    @property
    def num_negatives(self) -> int:
        """False receivers for each training edge."""
        assert isinstance(self._task, EdgeTask)
        return self._task.num_negatives


def _known(split: object, folder: Any, task: str | None) -> Any:
    """Return what is known of the edges that a data module is given."""
    if task is None and folder is None and isinstance(split, str | Path):
        return LinkSplit.open(check_path("split", split))
    if task is None and folder is None:
        check_instance("split", split, LinkSplit, "split_edges(graph), or the path of a saved split")
        return split
    if task is None:
        return folder
    if folder is not None:
        raise ValueError(
            f"LinkDataModule learns task={shown(task)} from the whole graph, and {folder.path} holds shards: give "
            "every host what `lightning-gnn-dist prepare` writes without --shard."
        )
    check_instance("split", split, Graph | str | Path, "with a task the path of a prepared database, or its graph")
    assert isinstance(split, Graph | str | Path)
    return Answers.of(split, task)


def _check_parts(holding: Holding) -> None:
    """Refuse to learn some seeds at a time."""
    if holding.residency.turns(1) > 1:
        raise ValueError(
            f"{holding.residency} is for nodes as seeds, each of which lies in one chunk, and an edge joins two: take "
            "Redeal(1000), or leave holding out."
        )
