"""The data module of a graph that every host has: each rank trains on its part and evaluates on the whole graph."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.global_batches import OwnSeeds
from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.batches.source import BatchSource
from lightning_gnn_dist.boundary.auto import Auto, asked_for
from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Fetch
from lightning_gnn_dist.boundary.exchange_refusals import check_whole_part
from lightning_gnn_dist.boundary.halo_seeds import seed_hops, seeds_around
from lightning_gnn_dist.checks import check_instance, check_path
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.explained_errors import knows_words_of_pyg
from lightning_gnn_dist.data.history_datamodule import HistoryDataModule
from lightning_gnn_dist.data.plan import PartPlan
from lightning_gnn_dist.data.residency import Holding
from lightning_gnn_dist.data.settings import BatchSettings, Evaluation, GlobalBatching
from lightning_gnn_dist.data.temporal.checks import check_temporal
from lightning_gnn_dist.data.typed.checks import check_typed, with_one_type_of_seeds
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.advice import against_averaging
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.sampling.base import Sampler


class PartitionedDataModule(HistoryDataModule):
    """Cut a graph into one part per rank, and hand out batches of the rank's own part.

    Training batches come from the part alone (unless ``boundary`` adds nodes): its nodes, the edges among them, and
    their features, copied into RAM. Validation, testing and prediction see the whole graph with all neighbours, and
    the ranks divide the nodes among themselves, so metrics are exact. On one rank batches come from the whole graph.

    A batch is a PyG ``Data``: the first ``batch.batch_size`` nodes are the seeds, ``batch.y`` holds their labels and
    no others (``Loading(all_labels=True)`` gives all), ``batch.n_id`` holds the nodes' ids
    in the whole graph, ``batch.blocks`` one bipartite adjacency per layer (outermost first), ``batch.edge_index`` the
    edges of all layers. Batches of a typed graph are ``HeteroData``, whose seeds are of the type that has the
    ``train_mask``; of several, choose one by :meth:`Graph.with_seeds`.

    Args:
        graph: A :class:`Graph`, a PyG ``Data`` or ``HeteroData``, or the path of a saved graph. With a path a rank
            holds no more than its part in RAM, and what its boundary adds; the rest stays on disk.
        partitioner: How the graph is cut, or a ready :class:`Partition`. Default: ``MetisPartitioner()``,
            and ``SuperNodePartitioner()`` for strategies of rounds, which average models of different parts (unless
            ``holding`` deals chunks anew). Where METIS is not installed, ``StreamingPartitioner()`` takes its place.
        sampler: How training batches are drawn. Default: ``NeighborSampler([15, 10])``.
        batch_size: Training nodes (seeds) in a batch, at most. All ranks have the same number of batches, so batches of
            a part with fewer training nodes are smaller. Each node is a seed once a pass, unless ``Halo`` adds seeds.
            The largest part of the first 16 super-epochs decides the number; a later, larger part has larger batches.
        seed: Decides everything random: the partition, the order of seeds, the neighbours. Default: for
            batches the seed of Lightning's ``seed_everything`` as the fit begins, and 0 without one; 0 for the
            partition, which is not made anew, and for what ranks hold of it. A resumed fit keeps its seed.
        loading: How batches are made: bulks, threads, the device. It never changes what is in them.
        holding: What a rank holds: which chunks of the partition, when that changes, and random nodes of others.
        boundary: What becomes of senders outside the part: :class:`Isolated`, :class:`Halo`,
            :class:`Exchange`, :class:`History` or :class:`Fetch`; ``"auto"`` or :class:`Auto` chooses one that fits
            into memory.
        evaluation: How the whole graph is sampled to evaluate a model. Default: all neighbours, which is exact.
        global_batching: How the whole graph is sampled for corrections.
        coverage: Gives each batch ``batch.coverage``, the share of each neighbourhood that the part holds, as
            weights for the loss (:func:`coverage_mean`) and for :class:`GrappaStrategy`. With None there are none.
        cache_dir: Where partitions are kept. Default: beside a saved graph, else the user's cache directory.
    """

    @knows_words_of_pyg
    def __init__(
        self,
        graph: Graph | Data | HeteroData | str | Path,
        *,
        partitioner: Partitioner | Partition | None = None,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        seed: int | None = None,
        loading: Loading = Loading(),  # noqa: B008  # frozen, as all of these
        holding: Holding = Holding(),  # noqa: B008
        boundary: Boundary | Literal["auto"] = Auto(),  # noqa: B008
        evaluation: Evaluation = Evaluation(),  # noqa: B008
        global_batching: GlobalBatching = GlobalBatching(),  # noqa: B008
        coverage: Coverage | None = Coverage(),  # noqa: B008
        cache_dir: str | Path | None = None,
    ) -> None:
        settings = BatchSettings(sampler, batch_size, seed, loading, evaluation, global_batching)
        if isinstance(boundary, Exchange):
            check_whole_part(sampler)
        whole, asked = with_one_type_of_seeds(_as_graph(graph)), asked_for(boundary)
        check_typed(whole, settings, asked)
        check_temporal(whole, settings, asked)
        plan = PartPlan(whole, partitioner, holding, asked, coverage, settings.seed_of_parts, cache_dir)
        super().__init__(plan, settings)

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self._is_cut():
            self._cut.check_run(self._world_size(), self._num_super_epochs())

    # What strategies ask for.

    def against_averaging(self) -> str | None:
        """Return why averaging alone loses accuracy on these parts, and what to do; None where it loses little.

        Of lost neighbours this rank's part is the sample. Parts that change are not judged.
        """
        world_size = self._world_size()
        if world_size == 1 or self._every() is not None:
            return None
        self._running_part()  # whose nodes ``uncovered`` counts
        uncovered, seeds = self.uncovered
        return against_averaging(self.graph, self._cut.by_rank(world_size), uncovered / max(seeds, 1))

    # What it is made of.

    def _judging_loader(self, name: str) -> BatchLoader:
        nodes = self.graph.split(name)
        self._values.of_labels(self.graph, nodes, f"{name}_mask")
        return self._nodes_loader(nodes, f"{name}_mask marks")

    def _most_seeds(self, world_size: int) -> int:
        return self._cut.most_seeds(world_size)

    def _all_seeds(self) -> Tensor:
        return self.graph.split("train")

    def _correction_seeds(self) -> Tensor | OwnSeeds:
        seeds, num_ranks, rank = self._all_seeds(), self._world_size(), self._rank()
        if self.global_batching.deal == "any":
            return seeds
        own = (self.parts_of_ranks(num_ranks).assignment[seeds] == rank).nonzero().view(-1)
        return OwnSeeds(seeds[own], own, seeds.numel(), rank, num_ranks)

    def _inputs_of(self, part: Graph, seeds: Tensor) -> Tensor:
        rows = seeds if part is self.graph else part.node_arrays["n_id"][seeds]
        return torch.searchsorted(self._all_seeds(), rows)

    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, BatchSource]:
        seeds = part.split("train")
        if isinstance(self.boundary, Fetch) and num_ranks > 1:
            seeds = seeds[self.partition(num_ranks).assignment[seeds] == rank]
        self._values.of_training(part, seeds)
        run = self._historic(part) if self._keeps_history() else None
        return seeds, self._source(self._shown(part), self.sampler, run=run)

    def _seeds_around(self, part: Graph, rank: int, num_ranks: int) -> Tensor:
        if part is self.graph or not seed_hops(self.boundary):
            return super()._seeds_around(part, rank, num_ranks)
        is_own = self.partition(num_ranks).assignment[part.node_arrays["n_id"]] == rank
        train_mask = self._shown(part).node_arrays["train_mask"]
        seeds = seeds_around(part, is_own.nonzero().view(-1), train_mask, seed_hops(self.boundary))
        self._values.of_labels(part, seeds, "train_mask")
        return seeds


def _as_graph(graph: Graph | Data | HeteroData | str | Path) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, str | Path):
        return Graph.open(check_path("graph", graph))
    check_instance("graph", graph, Data | HeteroData, "a Graph, a PyG Data, or the path of a saved graph")
    return Graph.from_pyg(graph)
