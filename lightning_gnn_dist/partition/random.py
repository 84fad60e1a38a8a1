"""Random parts: they look alike, and keep one of P edges."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.base import Partition, check_request


@dataclass(frozen=True)
class RandomPartitioner:
    """Deal the nodes to the parts at random (RandomTMA, Zhu et al., arXiv:2305.09887).

    The nodes are shuffled and dealt like cards, so the parts' node counts differ by one at most. (The
    paper lets every node choose a part by itself, which leaves the counts to chance.) The counts of training
    nodes are equal on average only. An edge stays inside a part with probability
    :math:`1/P`, and the parts' labels, features and degrees are distributed alike.
    """

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        check_request(graph, num_parts, seed)
        return Partition(deal(graph.num_nodes, num_parts, seed), num_parts)


def deal(count: int, num_parts: int, seed: int) -> Tensor:
    """A random part for each of ``count`` things, int32. Parts get equally many, or one more."""
    cards = (np.arange(count) % num_parts).astype(np.int32)
    generator(seed).shuffle(cards)
    return torch.from_numpy(cards)


def generator(seed: int) -> np.random.Generator:
    """A random generator for one partition, which depends on ``seed`` alone."""
    return np.random.Generator(np.random.Philox(key=seed))
