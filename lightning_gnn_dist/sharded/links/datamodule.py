"""The data module for edges of a graph in shards, predicted or labelled: a rank learns those into its own shard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.global_batches import OwnSeeds
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.boundary import Boundary, Fetch, Isolated
from lightning_gnn_dist.checks import check_path
from lightning_gnn_dist.data.edges.asked import AskedEdges, check_settings_of_edges
from lightning_gnn_dist.data.edges.datamodule import EdgeDataModule
from lightning_gnn_dist.data.explained_errors import knows_words_of_pyg
from lightning_gnn_dist.data.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.data.temporal.checks import check_event_samplers, sampler_of_events
from lightning_gnn_dist.data.temporal.events import times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.prepare.held_edges import LinkBounds
from lightning_gnn_dist.prepare.shard import Bounds, Shard
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.links import are_links, positions_where
from lightning_gnn_dist.sampling.negatives import Candidates
from lightning_gnn_dist.sampling.targets.tables import HeldLinks
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.sharded.links.held import held_of_shard, own_share
from lightning_gnn_dist.sharded.remote_graph import ShardedGraph
from lightning_gnn_dist.sharded.shard_datamodule import ShardDataModule
from lightning_gnn_dist.sharded.temporal.times import prepare_times, times_of_all_nodes


class ShardedLinkDataModule(EdgeDataModule, ShardDataModule):
    """Like :class:`LinkDataModule`, for a split of which every host has a shard and none has all.

    Batches are those of :class:`LinkDataModule`, with nodes in the order of the shards: ``batch.edge_label_index``,
    ``batch.edge_label`` and, of a split with labels, ``batch.edge_label_attr``; of a graph with types ``HeteroData``.
    Every edge is asked for once a pass, by a rank that has the shard of its receiver; other ranks are asked for false
    receivers, neighbours and features, in the background, before they are due. The ranks share the held edges evenly,
    whichever shards these lie with, so :class:`LinkRanking` is exact.

    With more ranks than shards, several ranks hold the same shard, and divide its edges among them. Of a split by time
    the ends of each target are roots of trees of their own, as there.

    Args:
        path: A folder that ``save_shards(split, partition, path)`` wrote. Rank ``r`` needs its ``shares.json`` and
            shard ``r % n``.
        sampler: How neighbours are drawn. Default: ``NeighborSampler([15, 10])``; of a split by time a
            :class:`TemporalSampler` with these numbers.
        batch_size: True edges in a training batch, at most. All ranks have the same number of batches.
        num_negatives: False receivers for each training edge. Default: 1, and none where edges have labels.
        seed: Decides everything random: the order of edges, negatives, neighbours. Default: the seed of Lightning's
            ``seed_everything`` as the fit begins, and 0 without one. A resumed fit keeps its seed.
        loading: How batches are made, and the memory for batches that are asked for ahead.
        boundary: What a batch sees around the edges of its shard: with :class:`Fetch` the whole graph, from which false
            receivers are drawn as well; with :class:`Isolated` the shard, or with :class:`Halo` nodes around it, too,
            and false receivers are the shard's own. Default: ``Fetch()``, and ``Isolated()`` for a
            :class:`WholePartSampler`.
        cache_bytes: Memory for rows of other shards, of which those stay that the coming bulks need soonest. 0: none
            is kept.
        evaluation: How the whole graph is sampled to evaluate a model. Default: all neighbours, which is exact.
        global_batching: How the whole graph is sampled for corrections. Each rank deals the edges into its own shard,
            ``deal="own"``: no rank lists those of all.
    """

    _way_to_hold = "divide split_edges(graph, {name}=0.1), which holds some back."

    @knows_words_of_pyg
    def __init__(
        self,
        path: str | Path,
        *,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        num_negatives: int | None = None,
        seed: int | None = None,
        loading: Loading = Loading(),  # noqa: B008  # frozen, as all of these
        boundary: Boundary | None = None,
        cache_bytes: int = 1 << 26,
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        global_batching: GlobalBatching = GlobalBatching(deal="own"),  # noqa: B008
    ) -> None:
        if boundary is None:
            boundary = Isolated() if isinstance(sampler, WholePartSampler) else Fetch()
        bounds, self._links = _bounds_with_links(check_path("path", path))
        self._asked = AskedEdges.of(self._links, bounds.types, num_negatives)
        sampler = sampler_of_events(sampler, self._links.time)
        settings = BatchSettings(sampler, batch_size, seed, loading, evaluation, global_batching)
        _check_settings_of_links(settings, boundary)
        super().__init__(path, lambda _: bounds, settings, boundary, None, cache_bytes)
        self.exactness.probes = False  # a rank knows the ends of its own held edges alone
        self._shard: Shard | None = None  # the own one, with the labels of its edges
        self._found: Tensor | None = None
        self._held: dict[str, HeldLinks] = {}
        self._candidates: Candidates | None = None  # of false receivers by time

    def setup(self, stage: str) -> None:
        """Open the own shard, and connections to the other ranks. Collective."""
        super().setup(stage)
        if self._candidates is None:
            self._candidates = self._receivers()

    # What it is made of.

    def _at_rest(self) -> dict[str, Any]:
        return super()._at_rest() | {"_shard": None, "_found": None, "_candidates": None, "_held": {}}

    def _shown_in_batches(self, shard: Shard) -> Shard:
        self._shard = shard
        return replace(shard, rows=self._asked.shown(shard.rows))

    def _with_labels(self) -> Shard:
        self._whole_graph()  # refuses, if it is too early
        assert self._shard is not None
        return self._shard

    def _check_times(self, rows: Graph) -> None:
        check_event_samplers(rows, self._settings, self._links.time, self._links.edge_type)

    def _running_part(self) -> Graph:
        return self._whole_graph().shard.rows if isinstance(self.boundary, Fetch) else super()._running_part()

    def _read_part(self, graph: ShardedGraph) -> tuple[Graph, Tensor]:
        """Return the part, with the labels of its edges, and the ids of its nodes in the whole graph. Collective."""
        if self._links.labels is None:
            return super()._read_part(graph)
        graph = self._opened(self._with_labels())  # for this once, as no batch may ask for labels
        try:
            found = super()._read_part(graph)
        except BaseException:
            graph.abort()  # its threads would wait for ranks that never answer
            raise
        graph.close()
        return found

    def _own_seeds(self) -> Tensor:
        """Return the positions of what this rank learns: in the whole graph, or without ``Fetch()`` in its part."""
        if isinstance(self.boundary, Fetch):
            return self._marked()[self._of_copy()]
        part = self._running_part()
        return self._asked.positions(part, self._is_own(part).to(torch.int64) - 1, across=False)[self._of_copy()]

    def _marked(self) -> Tensor:
        """Return where all edges into the own shard that are learned stand in the whole graph, increasing."""
        if self._found is None:
            rows, graph, loops = self._with_labels().rows, self._whole_graph(), self._links.labels is not None

            def is_chosen(senders: Tensor, receivers: Tensor) -> Tensor:
                ends = senders, graph.ids_of_own(receivers)
                if self._links.undirected:  # ids grow with shards: the last one would learn all edges between them
                    is_odd = (ends[0] + ends[1]) % 2 == 1
                    ends = torch.where(is_odd, ends[1], ends[0]), torch.where(is_odd, ends[0], ends[1])
                return are_links(*ends, self._links.undirected, loops=loops)

            found = positions_where(rows, is_chosen, self._asked.ends.target_type)
            self._found = self._asked.of_labels_and_times(rows, found) + self._first_edge()
        return self._found

    def _is_own(self, part: Graph) -> Tensor:
        """Return which nodes of a part are the shard's own."""
        if have_names(part.types):
            return part.node_arrays["train_mask"]
        return torch.arange(part.num_nodes) < self._with_labels().rows.num_nodes

    def _first_edge(self) -> int:
        """Return where the shard's first edge would stand in the whole graph, if those of its type stood before it.

        Of a graph with types, the rows of each node type follow each other in the whole graph, shard after shard.
        """
        shard, types = self._with_labels(), self.bounds.types
        if self._links.edge_type is None:
            return shard.first_edge
        kind = self._links.edge_type[2]
        before = types.node_types[: types.node_types.index(kind)]
        first = 0
        for (_, _, target), starts in zip(types.edge_types, types.edges, strict=True):
            first += int(starts[-1]) if target in before else int(starts[shard.index]) if target == kind else 0
        return first - int(shard.rows.indptr[shard.rows.types.nodes_of(kind).start])

    def _check_seeds(self, counts: Tensor) -> None:
        """Refuse ranks without edges to learn, given how many each has: all ranks raise or none."""
        if bool((counts == 0).any()):
            rank, inside = int(counts.argmin()), not isinstance(self.boundary, Fetch)
            where, other = ("inside", "boundary=Fetch(), ") if inside else ("that lead to", "")
            raise ValueError(
                f"There are no edges to learn {where} shard {rank % self.bounds.num_shards} of {self.path} for rank "
                f"{rank} of {len(counts)}: take {other}another partition, or fewer shards or ranks."
            )

    def _correction_seeds(self) -> OwnSeeds:
        own = self._marked()[self._of_copy()]
        return OwnSeeds(own, torch.arange(len(own)), self._num_marked, self._rank(), self._world_size())

    def _inputs_of(self, part: Graph, seeds: Tensor) -> None:
        return None

    def _rows_of_edges(self) -> Graph:
        return self._with_labels().rows

    def _candidates_anywhere(self) -> Candidates:
        assert self._candidates is not None
        return self._candidates

    def _receivers(self) -> Candidates:
        """Return the nodes that false receivers are drawn from; by time, since when they are there. Collective."""
        rows, receivers, times = self._with_labels().rows, self._asked.ends.receivers, None
        kind = self._asked.receiver_type
        if (time := self._links.time) is not None:
            prepare_times(self._whole_graph(), time)
            if times_of_receivers(rows, time, kind) is not None:
                number = rows.types.node_types.index(kind)
                times = times_of_all_nodes(self._whole_graph(), number, time)
        return Candidates.of(receivers, times, receivers.start)

    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, BatchSource]:
        seeds, shown = self._own_seeds(), self._asked.shown(part)
        self._values.of_arrays(shown)
        if isinstance(self.boundary, Fetch):
            return seeds, self._whole_source(self._across(self.sampler), int(self.bounds.edges[-1]))
        return seeds, self._part_source(shown, self._around_part(part, self._is_own(part)), part.num_edges)

    def _held_links(self, name: str) -> HeldLinks:
        if name not in self._held:
            shard, channel, starts = self._with_labels(), self._whole_graph().channel, self._links.held[name]
            copy, num_copies = self._rank() // channel.size, self._world_size() // channel.size
            share, numbers = own_share(held_of_shard(shard, self._links, name), starts, channel, copy, num_copies)
            self._held[name] = self._asked.held(*share, numbers.start)
        return self._held[name]


def _bounds_with_links(path: Path) -> tuple[Bounds, LinkBounds]:
    """Return where shards of a split begin; of a graph with types the type of the receivers is chosen."""
    bounds = Bounds.read(path)
    if bounds.links is None:
        raise ValueError(
            f"{path} holds shards of a graph whose edges are not split: divide a split, as in "
            "save_shards(split_edges(graph), partition, path), or learn from its nodes with ShardedDataModule."
        )
    kind, types = bounds.links.edge_type, bounds.types
    if kind is not None and types.seeds is None:
        bounds = replace(bounds, types=types.with_seeds(kind[2]))
    assert bounds.links is not None
    return bounds, bounds.links


def _check_settings_of_links(settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse samplers that are not for edges, and batches of the whole graph that need a list of all edges."""
    check_settings_of_edges(settings, boundary)
    if isinstance(settings.sampler, WholePartSampler) and isinstance(boundary, Fetch):
        raise ValueError(
            "WholePartSampler takes a whole part for each batch, and with boundary=Fetch() that is the whole graph: "
            "take NeighborSampler, or boundary=Isolated()."
        )
    if settings.global_batching.deal != "own":
        raise ValueError(
            f"GlobalBatching(deal={settings.global_batching.deal!r}) draws from a list of all training edges, and of "
            'those of shards no rank has one: write GlobalBatching(deal="own", ...), and each rank deals its own.'
        )
