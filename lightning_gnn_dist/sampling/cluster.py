"""Cluster-GCN (Chiang, Liu, Si, Li, Bengio, Hsieh, KDD 2019, arXiv:1905.07953): a batch is a group of chunks.

batch = the graph among all nodes of the chunks that its seeds are in, edges between these chunks included
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lightning_gnn_dist.checks import Layers, check_at_least, check_fields, check_fits, check_instance
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import edge_positions, starts_of
from lightning_gnn_dist.sampling.base import check_bulk, check_seeds
from lightning_gnn_dist.sampling.subgraph import induced


@dataclass(frozen=True)
class ClusterSampler:
    """Make batches of whole chunks of the graph: those that the seeds are in, with all edges among them.

    The chunks are an array of the graph, so they travel with a part: ``data.chunk = MetisPartitioner()(graph, 1000,
    seed=0).assignment``. Seeds are dealt to batches chunk by chunk, the chunks in another order every pass, so a
    batch of ``q`` times the seeds of a chunk has ``q`` chunks, and where its seeds begin or end within one, one more.
    The training loader deals so; correction batches do not, and need a sampler of their own:
    ``GlobalBatching(sampler=...)``.

    Args:
        num_hops: Layers of the model.
        chunk: Name of the graph's node array that holds the chunk of each node, integers from 0.
    """

    num_hops: Layers
    chunk: Annotated[str, "chunk"] = "chunk"
    is_for_nodes: ClassVar[bool] = True  # not for pairs of them

    def __post_init__(self) -> None:
        check_fields(self)

    def order(self, graph: Graph, seeds: Tensor, seed: int, epoch: int) -> Tensor:
        check_instance("graph", graph, Graph, "a Graph")
        check_at_least(0, seed=seed, epoch=epoch)
        chunks = self._chunks(graph)[check_seeds(seeds, graph.num_nodes)]
        rank = permutation(int(chunks.max()) + 1, seed, epoch)
        return rank[chunks].argsort(stable=True)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        bulk, samples = check_bulk(graph, seeds, keys, untyped="ClusterSampler"), []
        starts, members = remembered(graph, ("members", self.chunk), lambda: self._members(graph))
        for ids, batch_key in bulk:
            chunks = self._chunks(graph)[ids].unique()
            others = members[edge_positions(starts, chunks)]
            samples.append(induced(graph, ids, others, batch_key, self.num_hops))
        return samples

    def _chunks(self, graph: Graph) -> Tensor:
        chunks = graph.node_arrays.get(self.chunk)
        if chunks is None or chunks.dim() != 1 or chunks.is_floating_point() or chunks.dtype == torch.bool:
            raise ValueError(
                f"ClusterSampler needs the chunk of each node, but the graph has no array {self.chunk!r} of integers. "
                f"Set data.{self.chunk} = MetisPartitioner()(graph, num_parts, seed=0).assignment."
            )
        low, high = (int(end) for end in chunks.aminmax()) if chunks.numel() else (0, 0)
        if low < 0:
            raise ValueError(f"Chunks are numbers from 0, but {self.chunk} holds {low}.")
        check_fits(8 * high, f"{self.chunk} holds the number {high}: so many chunks")
        return chunks.to(torch.int64)

    def _members(self, graph: Graph) -> tuple[Tensor, Tensor]:
        """Where each chunk's nodes start, and the nodes of all chunks, chunk by chunk."""
        chunks = self._chunks(graph)
        sizes = torch.bincount(chunks)
        return starts_of(sizes), chunks.argsort(stable=True)
