"""Neighbourhoods by personalised PageRank (Andersen, Chung, Lang, FOCS 2006; ShaDow and PPRGo choose nodes so).

    pi(s) = alpha e(s) + (1 - alpha) pi(s) D^-1 A       where a walk from s ends, at each step with probability alpha

    batch = the graph among the seeds and, for each seed s, the k nodes of largest pi(s)

A push lets alpha of what waits at a node rest there, and hands the other part to its senders in equal shares. Pushes go
on while more than ``eps`` for each sender waits at any node, so that a seed costs at most 1 / (alpha eps) edges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.hops import graph_is_damaged
from lightning_gnn_dist.engine.kernels import DAMAGED
from lightning_gnn_dist.engine.pagerank.kernels import most_reached, room_for
from lightning_gnn_dist.engine.sample import MAX_ENTRIES, BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.rules import Layers, check_fields, whole, within
from lightning_gnn_dist.sampling.base import check_bulk
from lightning_gnn_dist.sampling.subgraph import induced

LEAST = 1e-9  # of eps; below, a seed may take minutes
_ROOM = 1 << 12  # nodes that a seed may reach at first


@dataclass(frozen=True)
class PageRankSampler:
    """Make batches of the nodes that matter most to each seed by personalised PageRank, and all edges among them.

    Nothing is drawn: a batch depends on its seeds alone. Walks go from receivers to senders, however many hops, and all
    edges count alike. The model may have more layers than these nodes are hops away.

    Args:
        num_neighbors: Nodes for each seed, beside itself; fewer where it reaches fewer.
        num_hops: Layers of the model.
        alpha: The probability, at each step of a walk, that it ends. Smaller: farther nodes.
        eps: What may be left out, for each edge of a node. Smaller: more exact, and slower.
    """

    num_neighbors: Annotated[int, whole(1, MAX_ENTRIES)]
    num_hops: Layers
    alpha: Annotated[float, within(0.01, 0.99)] = 0.25
    eps: Annotated[float, within(LEAST, 1)] = 1e-4

    def __post_init__(self) -> None:
        check_fields(self)

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        return [
            induced(graph, ids, self._nodes(graph, ids), batch_key, self.num_hops)
            for ids, batch_key in check_bulk(graph, seeds, keys)
        ]

    def _nodes(self, graph: Graph, seeds: Tensor) -> Tensor:
        """The nodes of all seeds, those of each in a row; ids repeat."""
        csr, ids = (graph.indptr.numpy(), graph.indices.numpy()), seeds.numpy()
        out = np.empty((len(ids), min(self.num_neighbors, max(1, graph.num_nodes - 1))), np.int64)
        done, room = 0, _ROOM
        while done < len(ids):
            done = most_reached(*csr, ids, done, self.alpha, self.eps, room_for(room), out)
            if done == DAMAGED:
                raise graph_is_damaged(graph)
            room *= 2
        return torch.from_numpy(out.reshape(-1))
