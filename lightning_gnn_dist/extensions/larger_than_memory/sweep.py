"""A residency for graphs larger than memory: some of many small chunks at a time, all of them once in an epoch."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging

from lightning_gnn_dist.batches.batches import slice_of
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.extensions.larger_than_memory.chunk_reading import ChunkReader, Chunks
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.homes.residency import Held, ReadChunks, Residency, bytes_held
from lightning_gnn_dist.partition.base import Partition, check_request
from lightning_gnn_dist.rules import Count, check_fields

log = logging.getLogger(__name__)

DRIFT = "1 to 2"  # points of accuracy: more than with a schedule that ends at 0, of a graph of 169,000 nodes
CHUNKS = 512  # small clusters of a sweep: benchmarks/larger_than_memory.md


@dataclass(frozen=True)
class Sweep(Residency):
    """Each rank holds some of many small chunks at a time, and an epoch goes through all of them once.

    It is for graphs larger than memory. Chunks are dealt anew in every epoch, and a training node is a seed once in it,
    while its chunk is held. The next chunks are read while these train. Since what is held drifts through the graph,
    so do the weights: let the learning rate end at 0, or average the weights, and take many small chunks.

    Args:
        bytes: Memory of a rank for chunks: those that it trains on, and as many that are read meanwhile.
        chunks: How many it trains on at a time, in place of ``bytes``.
        of: How many there are. Default: those in whose order the graph is saved (``lightning-gnn-dist reorder``), which
            are read fast; else 512.
    """

    bytes: Count | None = None
    chunks: Count | None = None
    of: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.bytes is None) == (self.chunks is None):
            raise ValueError(
                f"Sweep needs either bytes or chunks, got bytes={self.bytes} and chunks={self.chunks}: write "
                "Sweep(bytes=4 * 10**9), or Sweep(chunks=64, of=512)."
            )
        if self.chunks is not None and self.of is not None and self.chunks > self.of:
            raise ValueError(f"chunks ({self.chunks}) must not exceed of ({self.of}), the number of all chunks.")

    def of_graph(self, graph: Graph) -> Residency:
        saved = Chunks.of(graph)
        of = self.of or (None if saved is None else saved.num_chunks) or min(CHUNKS, graph.num_nodes)
        if self.bytes is None:
            return replace(self, of=of, chunks=min(self.chunks or 1, of))
        of_chunk = -(-bytes_held(graph) // of)
        if self.bytes < 2 * of_chunk:
            raise ValueError(
                f"Sweep(bytes={self.bytes}) has no room for two of {of} chunks, the one that is held and the one that "
                f"is read meanwhile, which take about {of_chunk} bytes each: allow more, or cut into more chunks."
            )
        return replace(self, bytes=None, of=of, chunks=min(self.bytes // (2 * of_chunk), of))

    def partitioner(self, graph: Graph) -> SavedChunks | None:
        saved = Chunks.of(graph) if self.turns(1) > 1 else None
        return SavedChunks() if saved is not None and self.num_chunks(1) == saved.num_chunks else None

    def check_beside(self, every: int | None, extra_nodes: float) -> None:
        if every is not None or extra_nodes:
            raise ValueError(
                f"Sweep() goes through all chunks once in an epoch and reads nothing beside them: leave "
                f"{'extra_nodes' if every is None else 'every'} out."
            )

    def begin_training(self, trainer: Trainer | None) -> None:
        if trainer is None or trainer.global_rank or trainer.lr_scheduler_configs:
            return
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        if not any(isinstance(each, WeightAveraging | StochasticWeightAveraging) for each in callbacks):
            log.warning(
                "A sweep ends with the weights of the chunks that were held last, and nothing lowers the learning rate "
                "or averages weights, which costs about %s points of accuracy: return a schedule that ends at 0 from "
                "configure_optimizers, or add EMAWeightAveraging() to the trainer.",
                DRIFT,
            )

    def num_chunks(self, world_size: int) -> int:
        of, _ = self._numbers()
        if (needed := self.turns(world_size) * world_size) > of:
            raise ValueError(
                f"{self} on {world_size} ranks needs at least {needed} chunks, so that every rank holds some at any "
                "time: cut into more, or hold more at a time."
            )
        return of

    def turns(self, world_size: int) -> int:
        of, chunks = self._numbers()
        return -(-of // (chunks * world_size))

    def sweep(self, world_size: int) -> int:
        return self.turns(world_size)

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        (of, _), turns = self._numbers(), self.turns(world_size)
        epoch, turn = divmod(super_epoch, turns)
        order = permutation(of, seed + Purpose.DEALS, epoch if turns > 1 else 0)  # with one turn all stays as it is
        return Held(tuple(order[slice_of(of, turns * world_size, turn * world_size + rank)].sort().values.tolist()))

    def _numbers(self) -> tuple[int, int]:
        """All chunks, and those held at a time."""
        if self.of is None or self.chunks is None:
            raise ValueError(f"{self} leaves numbers open, which a graph decides: give Sweep(chunks=64, of=512).")
        return self.of, self.chunks


@dataclass(frozen=True)
class SavedChunks:
    """Take the chunks in whose order a graph is saved, which ``lightning-gnn-dist reorder`` writes."""

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        if (chunks := Chunks.of(graph)) is None:
            raise ValueError(
                "SavedChunks() is for a graph that lightning-gnn-dist reorder has written: write one, or name another "
                "partitioner."
            )
        if chunks.num_chunks != num_parts:
            raise ValueError(
                f"{graph.path} is saved in {chunks.num_chunks} chunks, and {num_parts} are needed: reorder it, or name "
                "another partitioner."
            )
        return chunks.partition()

    def reader(self, graph: Graph) -> ReadChunks:
        """Return what reads some chunks of such a graph."""
        chunks = Chunks.of(graph)
        assert chunks is not None
        return ChunkReader(graph, chunks).read
