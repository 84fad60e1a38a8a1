"""The data module for edges, predicted or labelled: each rank learns those of its part; evaluation is exact."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.boundary import Boundary, Fetch, Isolated
from lightning_gnn_dist.checks import (
    check_instance,
    check_path,
)
from lightning_gnn_dist.data.edges.asked import AskedEdges, check_settings_of_edges
from lightning_gnn_dist.data.edges.datamodule import EdgeDataModule
from lightning_gnn_dist.data.explained_errors import knows_words_of_pyg
from lightning_gnn_dist.data.links import LinkSplit
from lightning_gnn_dist.data.part_datamodule import PartDataModule
from lightning_gnn_dist.data.plan import PartPlan
from lightning_gnn_dist.data.residency import Holding
from lightning_gnn_dist.data.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.data.temporal.checks import check_event_samplers, sampler_of_events
from lightning_gnn_dist.data.typed.checks import check_typed
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.prepare.held_edges import LinkBounds, first_held
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.links import edges_at
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.targets.tables import HeldLinks
from lightning_gnn_dist.sampling.whole import WholePartSampler


class LinkDataModule(EdgeDataModule, PartDataModule):
    """Batches of edges, with false ones to tell them from or with labels: each rank learns the edges of its part.

    A training batch asks for ``batch_size`` edges of the part and ``num_negatives`` false ones for each. None of the
    edges it asks for carries a message, in either direction. Validation and testing ask for held edges and their fixed
    negatives with all neighbours in the graph of training edges. The ranks divide the held edges among themselves, so
    :class:`LinkRanking` is exact. On one rank batches come from the whole graph.

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
            and is read as batches need it; with ``Isolated()`` or ``Halo()`` a rank takes its part into RAM.
        partitioner: How the graph is cut, or a ready :class:`Partition`. Default: with ``Fetch()``, which loses nothing
            where parts end, ``RandomPartitioner()``; otherwise ``MetisPartitioner()``, and ``SuperNodePartitioner()``
            for strategies of rounds, which average models of different parts (unless ``holding`` deals chunks anew).
            Where METIS is not installed, ``StreamingPartitioner()`` takes its place.
        sampler: How neighbours are drawn. Default: ``NeighborSampler([15, 10])``; of a split by time a
            :class:`TemporalSampler` with these numbers.
        batch_size: True edges in a training batch, at most. All ranks have the same number of batches.
        num_negatives: False receivers for each training edge. Default: 1, and none where edges have labels.
        seed: Decides everything random: the partition, the order of edges, negatives, neighbours. Default: for
            batches the seed of Lightning's ``seed_everything`` as the fit begins, and 0 without one; 0 for the
            partition, which is not made anew, and for what ranks hold of it. A resumed fit keeps its seed.
        loading: How batches are made: bulks, threads, the device. It never changes what is in them.
        holding: What a rank holds: which chunks of the partition, when that changes, and random nodes of others.
        boundary: What a batch sees around the edges of its part: with :class:`Fetch` the whole graph, from which false
            receivers are drawn as well; with :class:`Isolated` the part, or with :class:`Halo` nodes around it, too,
            and false receivers are the rank's own. Default: ``Fetch()``, and ``Isolated()`` beside a ``holding``, or
            where a :class:`WholePartSampler` would take the whole graph for each batch.
        evaluation: How the whole graph is sampled to evaluate a model. Default: all neighbours, which is exact.
        global_batching: How the whole graph is sampled for corrections, which keep 16 bytes for each training edge.
        cache_dir: Where partitions are kept. Default: beside a saved graph, else the user's cache directory.
    """

    _way_to_hold = "give split_edges() a share for them, split_edges(graph, {name}=0.1)."

    @knows_words_of_pyg
    def __init__(
        self,
        split: LinkSplit | str | Path,
        *,
        partitioner: Partitioner | Partition | None = None,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        num_negatives: int | None = None,
        seed: int | None = None,
        loading: Loading = Loading(),  # noqa: B008  # frozen, as all of these
        holding: Holding = Holding(),  # noqa: B008
        boundary: Boundary | None = None,
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        global_batching: GlobalBatching = GlobalBatching(),  # noqa: B008
        cache_dir: str | Path | None = None,
    ) -> None:
        boundary = _default_boundary(holding, sampler) if boundary is None else boundary
        self.split = _as_split(split)
        links, graph = _links_of(self.split), _with_seeds(self.split)
        self._asked = AskedEdges.of(links, graph.types, num_negatives)
        sampler = sampler_of_events(sampler, links.time)
        settings = BatchSettings(sampler, batch_size, seed, loading, evaluation, global_batching)
        if global_batching.deal != "any":
            raise ValueError(
                f"GlobalBatching(deal={global_batching.deal!r}) deals nodes to their owners, and links have two ends: "
                'leave it at deal="any".'
            )
        check_settings_of_edges(settings, boundary)
        check_typed(graph, settings, boundary)
        check_event_samplers(graph, settings, links.time, links.edge_type)
        if partitioner is None and isinstance(boundary, Fetch):
            partitioner = RandomPartitioner()
        plan = PartPlan(graph, partitioner, holding, boundary, None, settings.seed_of_parts, cache_dir)
        super().__init__(plan, settings)
        self._most: dict[int, int] = {}

    @property
    def graph(self) -> Graph:
        """The graph of training edges, as batches show it."""
        return self._shown(self._whole_graph)

    @graph.setter
    def graph(self, graph: Graph) -> None:
        self._whole_graph = graph

    @property
    def fingerprint(self) -> str:
        """A hash of the split, by which a strategy sees whether all ranks have the same one."""
        return self.split.fingerprint

    def _rows_of_edges(self) -> Graph:
        return self._whole_graph

    def _candidates_anywhere(self) -> Candidates:
        return self._asked.candidates(self._whole_graph, self._asked.ends.receivers)

    def _held_links(self, name: str) -> HeldLinks:
        arrays = self.split.held_arrays.get(name, {})
        return self._asked.held(self.split.edges[name], self.split.negatives.get(name), arrays)

    def _most_seeds(self, world_size: int) -> int:
        if world_size not in self._most:
            self._most[world_size] = self._count_most(world_size)
        return self._most[world_size]

    def _count_most(self, world_size: int) -> int:
        if world_size == 1:
            return self._correction_seeds().numel()
        assignment = self.partition(world_size).assignment

        def count(owner: Tensor) -> Tensor:
            rank_of_node = owner[assignment]
            _, receivers = edges_at(self.graph, self._positions(self._whole_graph, rank_of_node))
            return torch.bincount(rank_of_node[receivers], minlength=world_size)

        what = f"{self._correction_seeds().numel()} training edges"
        if isinstance(self.boundary, Fetch):
            return self._cut.most(world_size, f"nodes that the {what} lead to", count, "or another partition")
        return self._cut.most(world_size, what, count, "or MetisPartitioner(), which keeps most edges inside parts")

    def _correction_seeds(self) -> Tensor:
        everyone = torch.zeros(1, dtype=torch.int64).expand(self.graph.num_nodes)
        seeds = self._positions(self._whole_graph, everyone)
        if not seeds.numel():
            which = "" if self.split.edge_type is None else f" of type {self.split.edge_type}"
            with_label = "" if self.split.labels is None else f" with labels ({self.split.labels})"
            raise ValueError(f"The graph has no edges{which}{with_label} to learn from.")
        return seeds

    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, BatchSource]:
        is_whole = part is self.graph
        own, shown = self._own(part, rank, num_ranks), self._shown(part)
        self._values.of_arrays(shown)
        held = self._whole_graph if is_whole else part  # which has the labels
        seeds = self._positions(held, own.to(torch.int64) - 1)
        links = self._across(self.sampler) if is_whole else self._around_part(part, own)
        return seeds, self._source(shown, links, part.num_edges)

    def _own(self, part: Graph, rank: int, num_ranks: int) -> Tensor:
        """Return which nodes of a part are the rank's own."""
        if part is self.graph and num_ranks > 1:
            return self.partition(num_ranks).assignment == rank
        own: Tensor | None = vars(part).get("node_arrays", {}).get("train_mask")
        return torch.ones(part.num_nodes, dtype=torch.bool) if own is None else own

    def _positions(self, graph: Graph, owner: Tensor) -> Tensor:
        """Return where the training edges are whose ends, or whose receivers if batches see all, have one owner."""
        return self._asked.positions(graph, owner, across=isinstance(self.boundary, Fetch))

    def _shown(self, part: Graph) -> Graph:
        return self._asked.shown(part)


def _links_of(split: LinkSplit) -> LinkBounds:
    """Return what shards of the split would say of its edges, if one shard had all."""
    reverse = split.reverse if isinstance(split.reverse, tuple) else None
    held = {name: torch.tensor([0, edges.shape[1]]) for name, edges in split.edges.items()}
    until = first_held(split.held_arrays, split.time)
    of_type = split.undirected is True, split.edge_type, reverse
    return LinkBounds(*of_type, split.labels, split.hide, held, split.time, until)


def _default_boundary(holding: object, sampler: Sampler | None) -> Boundary:
    holds = isinstance(holding, Holding) and holding != Holding()
    return Isolated() if holds or isinstance(sampler, WholePartSampler) else Fetch()


def _with_seeds(split: LinkSplit) -> Graph:
    """Return the graph; one with types predicts nodes of one type: the one chosen, or the receivers'."""
    graph, kind = split.graph, split.edge_type
    if kind is None or graph.types.seeds is not None:
        return graph
    return graph.with_seeds(kind[2])


def _as_split(split: LinkSplit | str | Path) -> LinkSplit:
    if isinstance(split, str | Path):
        return LinkSplit.open(check_path("split", split))
    check_instance("split", split, LinkSplit, "split_edges(graph), or the path of a saved split")
    return split
