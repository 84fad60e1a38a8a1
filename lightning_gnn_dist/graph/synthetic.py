"""A random graph of communities with noisy features.

The degree-corrected stochastic block model (Karrer and Newman, Physical Review E 2011, arXiv:1008.3926). The noise
makes a model need a node's neighbours, and a partition that follows the communities leaves every part with few of the
classes. Distributed training has to cope with both.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from lightning_gnn_dist.checks import (
    MAX_NUMBER,
    check_at_least,
    check_between,
    check_fits,
    check_seed,
    is_number,
    shown,
)
from lightning_gnn_dist.graph.graph import Graph

MAX_NODES = 2**31 - 1  # a graph is made in RAM


def communities(
    num_nodes: int = 20_000,
    num_classes: int = 8,
    *,
    mean_degree: float = 10.0,
    homophily: float = 0.6,
    num_features: int = 64,
    noise: float = 8.0,
    train_share: float = 0.1,
    seed: int = 0,
) -> Graph:
    """A graph of communities with ``x``, ``y`` and the three masks. The same seed gives the same graph.

    Args:
        num_nodes: How many nodes.
        num_classes: How many communities; the community is the label.
        mean_degree: In-neighbours per node, before edges drawn twice are merged. Edges run in both directions.
        homophily: Share of edges that are drawn inside a community; the others may end anywhere.
        num_features: Length of a feature vector.
        noise: Standard deviation of the features around the mean of their class, whose entries have deviation 1.
        train_share: Share of nodes to train on. Half of the others validate, half test.
        seed: Everything is drawn from it.
    """
    check_seed(seed)
    check_at_least(1, most=MAX_NODES, num_nodes=num_nodes)
    check_at_least(1, most=MAX_NODES, num_classes=num_classes, num_features=num_features)
    check_between(0, 1, homophily=homophily)
    check_between(0, max(num_nodes, 100), mean_degree=mean_degree)
    check_between(0, MAX_NUMBER, noise=noise)
    if num_nodes < 2 * num_classes:
        raise ValueError(f"num_nodes ({num_nodes}) must be at least twice num_classes ({num_classes}).")
    if not is_number(train_share) or not 0.0 < train_share < 1.0:
        raise ValueError(
            f"train_share must lie between 0 and 1, which leaves nodes to judge by, got {shown(train_share)}."
        )
    check_fits(8 * int(num_nodes) * (2 * int(num_features) + 4 * round(mean_degree)), "So large a graph")
    generator = np.random.default_rng(seed)
    label = generator.integers(num_classes, size=num_nodes)
    edge_index = _edges(label, round(num_nodes * mean_degree / 2), homophily, generator)
    centre = generator.normal(size=(num_classes, num_features))
    x = centre[label] + noise * generator.normal(size=(num_nodes, num_features))
    quantile = generator.permutation(num_nodes) / num_nodes
    middle = (1 + train_share) / 2
    arrays = {
        "x": torch.from_numpy(x.astype(np.float32)),
        "y": torch.from_numpy(label),
        "train_mask": torch.from_numpy(quantile < train_share),
        "val_mask": torch.from_numpy((train_share <= quantile) & (quantile < middle)),
        "test_mask": torch.from_numpy(middle <= quantile),
    }
    return Graph.from_edge_index(torch.from_numpy(edge_index), num_nodes, arrays)


def _edges(label: NDArray[np.int64], count: int, homophily: float, generator: np.random.Generator) -> NDArray[np.int64]:
    """Distinct edges in both directions, shape (2, E). Ends are drawn in proportion to heavy-tailed weights."""
    weight = np.minimum(generator.pareto(2.5, label.size) + 1.0, 30.0)
    order = np.argsort(label, kind="stable")  # community after community
    ladder = np.concatenate([[0.0], np.cumsum(weight[order])])
    first = np.searchsorted(label[order], np.arange(label.max() + 2))  # where a community starts
    left = order[_climb(ladder, generator.random(count) * ladder[-1])]
    inside = generator.random(count) < homophily
    low = np.where(inside, ladder[first[label[left]]], 0.0)
    high = np.where(inside, ladder[first[label[left] + 1]], ladder[-1])
    right = order[_climb(ladder, low + generator.random(count) * (high - low))]
    both = np.concatenate([left * label.size + right, right * label.size + left])
    sender, receiver = np.divmod(np.unique(both[np.concatenate([left != right] * 2)]), label.size)
    return np.stack([sender, receiver])


def _climb(ladder: NDArray[np.float64], height: NDArray[np.float64]) -> NDArray[np.int64]:
    return np.minimum(np.searchsorted(ladder, height, side="right") - 1, ladder.size - 2)
