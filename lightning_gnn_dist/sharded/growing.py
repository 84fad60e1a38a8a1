"""A batch of a sharded graph while it is drawn: other ranks answer for one hop at a time."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.hops import reserve
from lightning_gnn_dist.engine.kernels import REPEATED_SEED, Array, Table, Work
from lightning_gnn_dist.engine.row_kernels import join_hop
from lightning_gnn_dist.engine.sample import Sample, refuse_repeated
from lightning_gnn_dist.engine.scratch import scratch_of_thread
from lightning_gnn_dist.graph.rows import starts_of
from lightning_gnn_dist.sampling.base import check_seeds


class GrowingBatch:
    """A batch that grows by one hop at a time.

    Args:
        seeds: Its first nodes, by their ids in the whole graph.
        num_nodes: The number of nodes of the whole graph.
    """

    def __init__(self, seeds: Tensor, num_nodes: int) -> None:
        self._hops, self._num_nodes = [check_seeds(seeds, num_nodes)], num_nodes
        self._counts: list[Tensor] = []
        self._columns: list[Tensor] = []
        self._edge_ids: list[Tensor] = []
        self._weights: list[Tensor] = []
        self._kinds: list[Tensor] = []

    @property
    def frontier(self) -> Tensor:
        """The nodes that were found last."""
        return self._hops[-1]

    def open(self, senders: Tensor, num_edges: int) -> tuple[Array, Work, Table]:
        """Return the batch's nodes, and what a kernel writes the next hop into, with room for so many edges."""
        known = torch.cat(self._hops)
        scratch = scratch_of_thread(senders.numpy().dtype)
        reserve(scratch, len(known) + num_edges)
        return known.numpy(), scratch.work, scratch.open_table(self._num_nodes, 1)

    def checked(self, found: int) -> int:
        """Refuse seeds of which a kernel has said that one is there twice; return what it has said otherwise."""
        if found == REPEATED_SEED:
            refuse_repeated(self._hops[0])
        return found

    def join(self, senders: Tensor, counts: Tensor, edge_ids: Tensor | None, kinds: Tensor | None = None) -> None:
        """Add a hop: the senders that were drawn for the frontier, and what :meth:`add` is told of them."""
        known, work, table = self.open(senders, len(senders))
        found = self.checked(join_hop(known, senders.numpy(), work, table))
        self.add(found, work, counts, edge_ids, kinds=kinds)

    def add(
        self,
        found: int,
        work: Work,
        counts: Tensor,
        edge_ids: Tensor | None,
        weights: Tensor | None = None,
        kinds: Tensor | None = None,
    ) -> None:
        """Add the hop that a kernel has written.

        Args:
            found: How many nodes there are now.
            work: What it has written into.
            counts: The edges of each node of the frontier.
            edge_ids: The edges' ids in the whole graph, if anybody needs them.
            weights: The edges' weights, if the sampler gives them some.
            kinds: The edges' types, if the graph has types.
        """
        known = sum(map(len, self._hops))
        self._counts.append(counts)
        self._hops.append(torch.from_numpy(work.nodes[known:found].astype(np.int64)))
        self._columns.append(torch.from_numpy(work.columns[: int(counts.sum())].astype(np.int32)))
        self._edge_ids += [] if edge_ids is None else [edge_ids]
        self._weights += [] if weights is None else [weights]
        self._kinds += [] if kinds is None else [kinds]

    def sample(self) -> Sample:
        degrees = torch.cat(self._counts)
        return Sample(
            nodes=torch.cat(self._hops),
            indptr=starts_of(degrees).to(torch.int32),
            indices=torch.cat(self._columns),
            num_sampled_nodes=list(map(len, self._hops)),
            num_sampled_edges=list(map(len, self._columns)),
            edge_ids=torch.cat(self._edge_ids) if self._edge_ids else None,
            edge_weight=torch.cat(self._weights) if self._weights else None,
            edge_kinds=torch.cat(self._kinds) if self._kinds else None,
        )
