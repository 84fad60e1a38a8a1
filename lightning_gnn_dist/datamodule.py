"""What every rank reads: its own part to train on, and the whole graph to be judged by."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.coverage import Coverage
from lightning_gnn_dist.cut import Cut
from lightning_gnn_dist.global_batches import GlobalBatches
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.loader import BatchLoader
from lightning_gnn_dist.part_loader import PartLoader, Parts
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.residency import Fixed, Residency, default_period
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.surroundings import ExtraNodes, Halo, Scope, check_scope

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
        residency: Residency = Fixed(),  # noqa: B008  # frozen
        repartition_every: int | None = None,
        halo: Literal[0, 1] = 0,
        halo_bytes: int | None = None,
        halo_neighbors: int | None = None,
        coverage: Coverage | None = Coverage(),  # noqa: B008  # frozen
        correction_batch_size: int | None = None,
        correction_sampler: Sampler | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        super().__init__()
        eval_batch_size = batch_size if eval_batch_size is None else eval_batch_size
        _check_at_least(0, seed=seed, num_threads=num_threads)
        _check_at_least(1, batch_size=batch_size, eval_batch_size=eval_batch_size, bulk_size=bulk_size)
        _check_at_least(1, repartition_every=repartition_every, correction_batch_size=correction_batch_size)
        _check_types(partitioner, residency, sampler, correction_sampler)
        _check_train_on(train_on, has_part=bool(extra_nodes or halo) or residency != Fixed())
        self.graph = _as_graph(graph)
        self.partitioner: Partitioner | Partition = MetisPartitioner() if partitioner is None else partitioner
        self.sampler: Sampler = NeighborSampler([15, 10]) if sampler is None else sampler
        self._cut = Cut(
            self.graph,
            self.partitioner,
            residency,
            ExtraNodes(extra_nodes, extra_of, seed),
            Halo(halo, halo_bytes, halo_neighbors),
            coverage,
            seed,
            None if cache_dir is None else Path(cache_dir),
        )
        self.train_on = train_on
        self.repartition_every = repartition_every
        self.batch_size = batch_size
        self.eval_batch_size = eval_batch_size
        self.correction_batch_size = correction_batch_size
        self.correction_sampler = correction_sampler
        self.seed = seed
        self.bulk_size = bulk_size
        self.num_threads = num_threads
        self._loaders: list[BatchLoader | PartLoader] = []
        self._parts: Parts | None = None
        self._anchors: tuple[Graph, BatchLoader] | None = None
        self._train_loader: PartLoader | None = None
        self._period: int | None = None
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
            self._num_batches()

    def train_dataloader(self) -> PartLoader:
        rank, num_ranks = self._rank(), self._world_size()  # now: later they may be others
        parts = self._own_parts() if self._is_cut() else None
        self._train_loader = PartLoader(
            parts.at if parts is not None else lambda _: self.graph,
            lambda part, num_batches: self._batches_of(part, num_batches, self.seed, rank, num_ranks),
            self._num_batches(),
            every=self._every() if parts is not None else None,
            num_ranks=num_ranks,
            batch_level=parts is not None and self._cut.coverage is not None and self._cut.coverage.level == "batch",
        )
        self._loaders.append(self._train_loader)
        return self._train_loader

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
        part = self._own_parts().current() if self._is_cut() else self.graph
        if self._anchors is None or self._anchors[0] is not part:
            # Few batches at a time, so nothing in the background.
            rank, num_ranks = self._rank(), self._world_size()
            seed, size = self.seed + _ANCHOR, self._num_batches()
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

    def state_dict(self) -> dict[str, Any]:
        """How long super-epochs are: a fit that is resumed with more epochs keeps to it."""
        return {} if self._every() is None else {"repartition_every": self._every()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.repartition_every is None:
            self._period = state_dict.get("repartition_every")

    # What it is made of.

    def partition(self, num_parts: int) -> Partition:
        """The chunks for so many ranks: from the cache, or computed and put there."""
        return self._cut.partition(num_parts)

    def parts_of_ranks(self, num_ranks: int) -> Partition:
        """Which rank learns from each node, in the first super-epoch."""
        return self._cut.by_rank(num_ranks)

    def part(self, rank: int, num_parts: int, super_epoch: int = 0) -> Graph:
        """What rank ``rank`` trains on: the nodes of its part and the edges among them, in RAM."""
        if num_parts == 1:
            return self.graph
        return self._cut.reader(rank, num_parts).read(super_epoch).graph

    @property
    def figures(self) -> dict[str, float]:
        """What a strategy may log: since the fit began, seconds that training waited for data, and what parts cost.

        And ``data/coverage``, the mean of the running part's training nodes, where there is one.
        """
        waited = self._train_loader.waited_seconds if self._train_loader is not None else 0.0
        figures = {"data/waited_seconds": waited}
        if self._parts is not None:
            figures |= {
                "data/switches": float(self._parts.switches),
                "data/switch_bytes": float(self._parts.bytes_read),
                "data/switch_waited_seconds": self._parts.waited_seconds,
            }
            figures |= {} if self._parts.coverage is None else {"data/coverage": self._parts.coverage}
        return figures

    def _own_parts(self) -> Parts:
        if self._parts is None:
            reader = self._cut.reader(self._rank(), self._world_size())
            self._parts = Parts(reader, in_background=self.num_threads > 0)
        return self._parts

    def _is_cut(self) -> bool:
        """Whether this rank trains on less than the whole graph."""
        return self._world_size() > 1 and self.train_on == "part"

    def _every(self) -> int | None:
        """Passes in a super-epoch. None: what a rank holds never changes."""
        sweep = self._cut.residency.sweep(self._world_size())
        if sweep == 1:
            return None
        max_epochs = self.trainer.max_epochs if self.trainer is not None else None
        return self.repartition_every or self._period or default_period(max_epochs, sweep)

    def _global_batches(self) -> GlobalBatches:
        if self._whole is None:
            sampler = self.sampler if self.correction_sampler is None else self.correction_sampler
            if self.correction_sampler is None and isinstance(sampler, WholePartSampler):
                sampler = NeighborSampler([-1] * sampler.num_hops)
            size = self.correction_batch_size or self.batch_size * self._world_size()
            self._whole = GlobalBatches(self.graph, sampler, self.graph.split("train"), size, self.seed)
        return self._whole

    def _num_batches(self) -> int:
        """Batches of a pass, the same for all ranks and parts."""
        return -(-self._cut.most_seeds(self._world_size()) // self.batch_size)

    def _batches_of(
        self, part: Graph, num_batches: int, seed: int, rank: int, num_ranks: int, *, in_background: bool = True
    ) -> BatchLoader:
        seeds = part.split("train")
        if self.train_on == "graph" and num_ranks > 1:
            seeds = seeds[self.partition(num_ranks).assignment[seeds] == rank]
        seed = seed * num_ranks + rank  # replicas differ in what they draw
        return self._loader(part, self.sampler, seeds, num_batches, seed, in_background=in_background)

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
        loader = self._loader(self.graph, everything, share, num_batches, self.seed, shuffle=False)
        self._loaders.append(loader)
        return loader

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
        return loader

    def _world_size(self) -> int:
        return self.trainer.world_size if self.trainer is not None else 1

    def _rank(self) -> int:
        return self.trainer.global_rank if self.trainer is not None else 0

    def _trainer_fn(self) -> TrainerFn | None:
        return self.trainer.state.fn if self.trainer is not None else None


def _check_at_least(least: int, **numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < least):
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def _check_train_on(train_on: Scope, *, has_part: bool) -> None:
    check_scope("train_on", train_on)
    if train_on == "graph" and has_part:
        raise ValueError(
            'extra_nodes, halo and residency say what a part holds, and train_on="graph" uses the whole graph: choose '
            "one."
        )


def _check_types(partitioner: object, residency: object, *samplers: object) -> None:
    if isinstance(residency, type) or not isinstance(residency, Residency):
        raise TypeError(f"A residency is an object such as Fixed(), Rotate() or Redeal(1000), got {residency!r}.")
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
