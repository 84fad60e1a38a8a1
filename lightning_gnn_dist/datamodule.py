"""What every rank reads: its own part to train on, and the whole graph to be judged by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from numbers import Integral
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.global_batches import GlobalBatches
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.loader import BatchLoader
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.parts import ExtraNodes, Scope, check_fits, check_scope, copy_part, count_train_nodes
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler

_ANCHOR = 1 << 41  # added to the seed, so that anchors and local steps draw independently


class PartitionedDataModule(LightningDataModule):
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
            batches of a part with fewer training nodes are smaller. Each is a seed exactly once a pass.
        eval_batch_size: Nodes evaluated at once. Default: ``batch_size``. Full neighbourhoods are large.
        seed: Everything random is drawn from it: partition, order of seeds, neighbours.
        bulk_size: Batches sampled together. Does not change what is drawn.
        num_threads: Background threads that sample and gather while the model trains. 0: none.
        train_on: ``"part"``, or ``"graph"``: sample around the part's training nodes in the whole graph, as if its
            features were fetched from other hosts. A baseline (with DDP: the paper's GGS), no way to save memory.
        extra_nodes: Add so many random nodes of other parts to the part, to send messages but not to learn from
            (the LLCG paper's subgraph approximation): a share of the nodes that ``extra_of`` names.
        extra_of: ``"part"`` or ``"graph"``.
        correction_batch_size: Seeds of a batch of the whole graph, shared by all ranks. Default: ``batch_size`` for
            each rank, so that a correction step costs about as much as a local one.
        correction_sampler: How neighbours are drawn for them. Default: as for local steps, and all neighbours where
            those take the whole part.
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
        train_on: Scope = "part",
        extra_nodes: float = 0.0,
        extra_of: Scope = "part",
        correction_batch_size: int | None = None,
        correction_sampler: Sampler | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("seed", seed, 0),
            ("correction_batch_size", 1 if correction_batch_size is None else correction_batch_size, 1),
            ("bulk_size", bulk_size, 1),
            ("num_threads", num_threads, 0),
        ):
            if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")
        check_scope("train_on", train_on)
        if extra_nodes and train_on == "graph":
            raise ValueError('extra_nodes enlarges the part, and train_on="graph" uses the whole graph: choose one.')
        _check_types(partitioner, sampler, correction_sampler)
        self.graph = _as_graph(graph)
        self.train_on = train_on
        self.extra = ExtraNodes(extra_nodes, extra_of, seed)
        self.partitioner: Partitioner | Partition = MetisPartitioner() if partitioner is None else partitioner
        self.sampler: Sampler = NeighborSampler([15, 10]) if sampler is None else sampler
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.correction_batch_size = correction_batch_size
        self.correction_sampler = correction_sampler
        self.seed = seed
        self.bulk_size = bulk_size
        self.num_threads = num_threads
        self.cache_dir = None if cache_dir is None else Path(cache_dir)
        self._loaders: list[BatchLoader] = []
        self._partitions: dict[int, Partition] = {}
        self._own_part: Graph | None = None
        self._anchor_loader: BatchLoader | None = None
        self._whole: GlobalBatches | None = None

    @property
    def fingerprint(self) -> str:
        """Identifies the graph, so that a strategy can tell whether all ranks have the same."""
        return self.graph.fingerprint

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
            self._train_counts()

    def train_dataloader(self) -> BatchLoader:
        return self._train_loader(self.seed)

    def val_dataloader(self) -> BatchLoader:
        return self._eval_loader(self.graph.split("val"), "val_mask marks")

    def test_dataloader(self) -> BatchLoader:
        return self._eval_loader(self.graph.split("test"), "test_mask marks")

    def predict_dataloader(self) -> BatchLoader:
        """All nodes, in order: rank 0 has the first ones."""
        return self._eval_loader(torch.arange(self.graph.num_nodes), "the graph has")

    # What strategies ask for.

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        """Batches ``start`` to ``stop`` of the whole graph in a round: this rank's slices of them, or all of each.

        A function of the seed, the round and the rank, so that a resumed run sees the same ones.
        """
        rank, num_slices = (self._rank(), self._world_size()) if sliced else (0, 1)
        return self._global_batches().of_round(round_idx, rank, num_slices, start, stop)

    def anchor_batches(self, round_idx: int, *, of: Scope = "part") -> Iterator[Data]:
        """One pass over the rank's own part, or its slices of one over the graph, with draws that belong to the round.

        Those of the graph are also the round's first correction batches.
        """
        if of == "graph":
            return self.correction_batches(round_idx, stop=self._global_batches().num_batches)
        if self._anchor_loader is None:
            self._anchor_loader = self._train_loader(self.seed + _ANCHOR, in_background=False)  # few batches at a time
        self._anchor_loader.set_epoch(round_idx)
        return iter(self._anchor_loader)

    def teardown(self, stage: str) -> None:
        for loader in self._loaders:
            loader.close()
        self._loaders.clear()
        self._own_part = self._anchor_loader = self._whole = None

    # What it is made of.

    def partition(self, num_parts: int) -> Partition:
        """The partition in use for so many ranks: from the cache, or computed and put there."""
        if isinstance(self.partitioner, Partition):
            check_fits(self.partitioner, num_parts, self.graph)
            return self.partitioner
        if num_parts not in self._partitions:
            self._partitions[num_parts] = cached_partition(
                self.graph, self.partitioner, num_parts, self.seed, self.cache_dir
            )
        return self._partitions[num_parts]

    def part(self, rank: int, num_parts: int) -> Graph:
        """What rank ``rank`` trains on: the nodes of its part and the edges among them, in RAM."""
        if num_parts == 1:
            return self.graph
        return copy_part(self.graph, self.partition(num_parts), rank, self.extra)

    def _global_batches(self) -> GlobalBatches:
        if self._whole is None:
            sampler = self.sampler if self.correction_sampler is None else self.correction_sampler
            if self.correction_sampler is None and isinstance(sampler, WholePartSampler):
                sampler = NeighborSampler([-1] * sampler.num_hops)
            size = self.correction_batch_size or self.batch_size * self._world_size()
            self._whole = GlobalBatches(self.graph, sampler, self.graph.split("train"), size, self.seed)
        return self._whole

    def _train_counts(self) -> list[int]:
        num_parts = self._world_size()
        return count_train_nodes(self.graph, self.partition(num_parts) if num_parts > 1 else None)

    def _train_loader(self, seed: int, *, in_background: bool = True) -> BatchLoader:
        num_parts, rank = self._world_size(), self._rank()
        num_batches = -(-max(self._train_counts()) // self.batch_size)
        seed = seed * num_parts + rank  # replicas differ in what they draw
        if self.train_on == "graph" and num_parts > 1:
            everyone = self.graph.split("train")
            seeds = everyone[self.partition(num_parts).assignment[everyone] == rank]
            return self._loader(self.graph, self.sampler, seeds, num_batches, seed, in_background=in_background)
        if self._own_part is None:
            self._own_part = self.part(rank, num_parts)
        seeds = self._own_part.split("train")
        return self._loader(self._own_part, self.sampler, seeds, num_batches, seed, in_background=in_background)

    def _eval_loader(self, nodes: Tensor, whose: str) -> BatchLoader:
        """This rank's share of ``nodes``, with all their neighbours in the whole graph."""
        world_size = self._world_size()
        if nodes.numel() < world_size:
            raise ValueError(
                f"{whose} {nodes.numel()} nodes, but {world_size} ranks share the evaluation: each needs one at least."
            )
        share = nodes.tensor_split(world_size)[self._rank()]
        everything = NeighborSampler([-1] * self.sampler.num_hops)
        # As many batches on all ranks, for modules that exchange in validation_step; none of them empty.
        most, least = -(-nodes.numel() // world_size), nodes.numel() // world_size
        num_batches = min(-(-most // self.eval_batch_size), least)
        return self._loader(self.graph, everything, share, num_batches, self.seed, shuffle=False)

    def _loader(
        self,
        graph: Graph,
        sampler: Sampler,
        seeds: Tensor,
        num_batches: int,
        seed: int,
        *,
        shuffle: bool = True,
        in_background: bool = True,
    ) -> BatchLoader:
        loader = BatchLoader(
            graph,
            sampler,
            seeds,
            num_batches,
            seed=seed,
            shuffle=shuffle,
            bulk_size=self.bulk_size if in_background else 1,
            num_threads=self.num_threads if in_background else 0,
        )
        loader.num_ranks = self._world_size()
        self._loaders.append(loader)
        return loader

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _trainer_fn(self) -> TrainerFn | None:
        return self.trainer.state.fn if self.trainer is not None else None


def _check_types(partitioner: object, *samplers: object) -> None:
    for sampler in samplers:
        if sampler is not None and (isinstance(sampler, type) or not isinstance(sampler, Sampler)):
            raise TypeError(f"A sampler is an object such as NeighborSampler([15, 10]), got {sampler!r}.")
    known = partitioner is None or isinstance(partitioner, Partition)
    if not known and (isinstance(partitioner, type) or not callable(partitioner)):
        raise TypeError(f"A partitioner is an object such as MetisPartitioner(), or a Partition, got {partitioner!r}.")


def _as_graph(graph: Graph | Data | str | Path) -> Graph:
    if isinstance(graph, Graph):
        return graph
    if isinstance(graph, str | Path):
        return Graph.open(graph)
    return Graph.from_pyg(graph)
