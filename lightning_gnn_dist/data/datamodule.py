"""What every rank reads: its own part to train on, and the whole graph to be judged by."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist.batches.loader import BatchLoader
from lightning_gnn_dist.batches.placement import SampleOn
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.checks import check_choice, check_instance, check_path, check_seed
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.part_datamodule import PartDataModule
from lightning_gnn_dist.data.residency import Fixed, Residency
from lightning_gnn_dist.data.surroundings import ExtraNodes, Halo
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.sampling.base import Sampler


class PartitionedDataModule(PartDataModule):
    """Cut a graph into one part per rank, and hand out batches of the rank's own part.

    Training batches come from the part alone: its nodes, the edges among them, and their features, copied into
    RAM. Validation, testing and prediction see the whole graph with all neighbours, and the ranks share the
    nodes without overlap, so what they measure is exact. On one rank there is nothing to cut: batches come from
    the whole graph.

    A batch is a PyG ``Data``: the first ``batch.batch_size`` nodes are the seeds, ``batch.n_id`` holds global
    ids, ``batch.blocks`` one bipartite adjacency per layer (outermost first), ``batch.edge_index`` all of them.

    Args:
        graph: A :class:`Graph`, a PyG ``Data``, or the path of a saved graph. With a path a rank holds no more
            than its part; the rest stays on disk.
        partitioner: How the graph is cut, or a ready :class:`Partition`. Default: ``MetisPartitioner()``.
        sampler: How training batches are drawn. Default: ``NeighborSampler([15, 10])``.
        batch_size: Training seeds in a batch, at most: the number of batches is the same on all ranks, so the
            batches of a part with fewer training nodes are smaller. Each is a seed exactly once a pass. The number is
            that of the first 16 super-epochs: a later part with more training nodes than any of these has larger ones.
        eval_batch_size: Nodes evaluated at once. Default: ``batch_size``. Full neighbourhoods are large.
        seed: Everything random is drawn from it: partition, order of seeds, neighbours.
        bulk_size: Batches sampled together. Does not change what is drawn.
        num_threads: Background threads that sample and gather while the model trains. 0: none.
        widen_features: Arrays of float16, bfloat16, and of int8 with scales (:func:`quantize_rows`) come as float32.
            False: as they are stored.
        sample_on: Where batches are sampled and gathered: ``"cpu"``, or ``"device"``, on the device that trains, which
            then holds a copy of the part, and of the whole graph for evaluation and corrections. ``"auto"``: there if
            it is a GPU, the sampler is a ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler``, and the copies
            take at most half of the free memory, the part's before the whole graph's. Batches are the same.
        train_on: ``"part"``, or ``"graph"``: sample around the part's training nodes in the whole graph, as if its
            features were fetched from other hosts. A baseline (with DDP: the paper's GGS), no way to save memory.
        extra_nodes: Add so many random nodes of other parts to the part, to send messages but not to learn from
            (the LLCG paper's subgraph approximation): a share of the nodes that ``extra_of`` names.
        extra_of: ``"part"`` or ``"graph"``.
        residency: Which chunks of the partition a rank holds, and when that changes: :class:`Fixed` (one for each
            rank, for good), :class:`Rotate` or :class:`Redeal`. The next part is read while the current one trains.
        repartition_every: Passes over the training nodes between two changes. Default: so many that the residency's
            sweep fits into ``max_epochs``.
        halo: 1 adds the in-neighbours from elsewhere to the part: they send messages, and receive none.
        halo_bytes: Limits the memory of those; the ones with the most edges into the part come first.
        halo_neighbors: Limits how many of them a node may ask for.
        coverage: Gives each batch ``batch.coverage``, how much of the seeds' neighbourhoods the part holds, as
            weights for the loss (:func:`coverage_mean`) and for :class:`GrappaStrategy`. None: no weights.
        correction_batch_size: Seeds of a batch of the whole graph, shared by all ranks. Default: ``batch_size`` for
            each rank, so that a correction step costs about as much as a local one.
        correction_sampler: How neighbours are drawn for them. Default: as for local steps, and all neighbours where
            those take the whole part.
        check_values: Refuse NaN and infinity in ``x`` and in the edges' ``edge_weight`` and ``edge_attr``, in one pass
            over what the rank trains on, and labels of marked nodes that are NaN or, as classes, negative.
        cache_dir: Where partitions are kept. Default: beside a saved graph, else the user's cache directory.
    """

    def __init__(
        self,
        graph: Graph | Data | str | Path,
        *,
        partitioner: Partitioner | Partition | None = None,
        sampler: Sampler | None = None,
        batch_size: int = 1024,
        eval_batch_size: int | None = None,
        seed: int = 0,
        bulk_size: int = 4,
        num_threads: int = 1,
        widen_features: bool = True,
        sample_on: SampleOn = "cpu",
        train_on: Scope = "part",
        extra_nodes: float = 0.0,
        extra_of: Scope = "part",
        residency: Residency = Fixed(),  # noqa: B008  # frozen
        repartition_every: int | None = None,
        halo: Literal[0, 1] = 0,
        halo_bytes: int | None = None,
        halo_neighbors: int | None = None,
        coverage: Coverage | None = Coverage(),  # noqa: B008  # frozen
        correction_batch_size: int | None = None,
        correction_sampler: Sampler | None = None,
        check_values: bool = True,
        cache_dir: str | Path | None = None,
    ) -> None:
        check_seed(seed)
        extra, around = ExtraNodes(extra_nodes, extra_of, seed), Halo(halo, halo_bytes, halo_neighbors)
        _check_train_on(train_on, has_part=bool(extra.share or around.hops) or not isinstance(residency, Fixed))
        super().__init__(
            _as_graph(graph),
            partitioner=partitioner,
            sampler=sampler,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            seed=seed,
            bulk_size=bulk_size,
            num_threads=num_threads,
            widen_features=widen_features,
            sample_on=sample_on,
            train_on=train_on,
            residency=residency,
            repartition_every=repartition_every,
            extra=extra,
            halo=around,
            coverage=coverage,
            correction_batch_size=correction_batch_size,
            correction_sampler=correction_sampler,
            check_values=check_values,
            cache_dir=cache_dir,
        )

    # What Lightning calls.

    def setup(self, stage: str) -> None:
        super().setup(stage)
        if stage == "fit" and self._is_cut():
            self._cut.check_run(self._world_size(), self._num_super_epochs())

    # What it is made of.

    def _judging_loader(self, name: str) -> BatchLoader:
        nodes = self.graph.split(name)
        self._values.of_labels(self.graph, nodes, f"{name}_mask")
        return self._nodes_loader(nodes, f"{name}_mask marks")

    def _most_seeds(self, world_size: int) -> int:
        return self._cut.most_seeds(world_size)

    def _all_seeds(self) -> Tensor:
        return self.graph.split("train")

    def _seeds_and_source(self, part: Graph, rank: int, num_ranks: int) -> tuple[Tensor, GraphSource]:
        seeds = part.split("train")
        if self.train_on == "graph" and num_ranks > 1:
            seeds = seeds[self.partition(num_ranks).assignment[seeds] == rank]
        self._values.of_training(part, seeds)
        return seeds, self._source(part, self.sampler)


def _check_train_on(train_on: Scope, *, has_part: bool) -> None:
    check_choice("train_on", train_on, Scope)
    if train_on == "graph" and has_part:
        raise ValueError(
            'extra_nodes, halo and residency say what a part holds, and train_on="graph" uses the whole graph: choose '
            "one."
        )


def _as_graph(graph: Graph | Data | str | Path) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, str | Path):
        return Graph.open(check_path("graph", graph))
    check_instance("graph", graph, Data | HeteroData, "a Graph, a PyG Data, or the path of a saved graph")
    return Graph.from_pyg(graph)
