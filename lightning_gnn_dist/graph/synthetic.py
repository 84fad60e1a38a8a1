"""A random graph of communities with noisy features.

The degree-corrected stochastic block model (Karrer and Newman, Physical Review E 2011, arXiv:1008.3926). The noise
makes a model need a node's neighbours, and a partition that follows the communities leaves every part with few of the
classes. Distributed training has to cope with both.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gnn_dist.checks import (
    MAX_NUMBER,
    check_at_least,
    check_between,
    check_fits,
    check_seed,
    is_number,
    shown,
)
from lightning_gnn_dist.graph.graph import Graph, typed_graph
from lightning_gnn_dist.graph.typed.build import EdgeTable, NodeTable, build
from lightning_gnn_dist.graph.typed.types import EdgeType

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


MAX_PAPERS = 10**9
DAYS = 3650  # over which papers appear
Ids = NDArray[np.int64]


def citations(
    num_papers: int = 8_000,
    num_fields: int = 6,
    *,
    mean_degree: float = 4.0,
    homophily: float = 0.8,
    noise: float = 6.0,
    seed: int = 0,
) -> Graph:
    """A typed graph whose papers have a field (``y``), a day (``time``) and the three masks. The seed decides it.

    Papers have 32 features, authors 16, words 8 and venues none. A paper cites and disputes earlier papers, authors
    write it, it is in a venue and uses words; all but the edges between papers have a reverse type, ``rev_...``.
    Edges have the day of their paper as their ``time``, and rows are in its order. The first six tenths of the papers
    are there to train on, the next two to validate, the last to test.

    Args:
        num_papers: How many papers; there are half as many authors, a quarter as many words and one venue in 100.
        num_fields: How many fields; authors, words and venues have one too, which they do not show.
        mean_degree: Edges of each type that a paper sends or receives, on average.
        homophily: Share of edges that go where their type says: ``disputes`` to the next field, all others to the same
            one. The others may end anywhere.
        noise: Standard deviation of the features around the mean of their field, whose entries have deviation 1.
        seed: Everything is drawn from it.
    """
    check_seed(seed)
    check_at_least(1, most=MAX_PAPERS, num_papers=num_papers)
    check_at_least(1, most=MAX_PAPERS, num_fields=num_fields)
    check_between(0, max(num_papers, 100), mean_degree=mean_degree)
    check_between(0, 1, homophily=homophily)
    check_between(0, MAX_NUMBER, noise=noise)
    if num_papers < 100 * num_fields:
        raise ValueError(f"num_papers ({num_papers}) must be at least 100 times num_fields ({num_fields}).")
    check_fits(8 * int(num_papers) * (2 * 32 + 2 * 16 + 8 * 8 * round(mean_degree)), "So large a graph")
    draw = _Draw(np.random.default_rng(seed), int(num_papers), int(num_fields), float(homophily))
    field = draw.fields()
    day = np.sort(draw.generator.integers(DAYS, size=num_papers))  # papers are in the order in which they appear
    nodes = {
        name: NodeTable(len(field[name]), draw.features(field[name], width, noise)) for name, width in WIDTHS.items()
    }
    papers = {"y": torch.from_numpy(field["paper"]), "time": torch.from_numpy(day), **_masks(int(num_papers))}
    nodes["paper"] = nodes["paper"]._replace(arrays={**nodes["paper"].arrays, **papers})
    edges: dict[EdgeType, EdgeTable] = {}
    count = round(num_papers * mean_degree)
    for name, shift in (("cites", 0), ("disputes", 1)):
        old, new = draw.earlier(field["paper"], count, shift)
        edges["paper", name, "paper"] = _edge_table(old, new, day[new])
    for kind, name in (("author", "writes"), ("venue", "prints"), ("word", "describes")):
        paper, other = draw.ends(field["paper"], field[kind], num_papers if kind == "venue" else count)
        edges[kind, name, "paper"] = _edge_table(other, paper, day[paper])
        edges["paper", f"rev_{name}", kind] = _edge_table(paper, other, day[paper])
    return typed_graph(*build(nodes, edges, "time"))


WIDTHS = {"paper": 32, "author": 16, "venue": 0, "word": 8}


class _Draw:
    """What is drawn, one after the other."""

    def __init__(self, generator: np.random.Generator, num_papers: int, num_fields: int, homophily: float) -> None:
        self.generator, self.num_fields, self.homophily = generator, num_fields, homophily
        self._counts = {
            "paper": num_papers,
            "author": num_papers // 2,
            "venue": num_papers // 100,
            "word": num_papers // 4,
        }

    def fields(self) -> dict[str, Ids]:
        """The field of every node, each field with one node at least."""
        return {
            name: self.generator.permutation(np.arange(count, dtype=np.int64) % self.num_fields)
            for name, count in self._counts.items()
        }

    def features(self, field: Ids, width: int, noise: float) -> dict[str, Tensor]:
        """Features around the mean of the field, or none."""
        if not width:
            return {}
        centre = self.generator.normal(size=(self.num_fields, width))
        x = centre[field] + noise * self.generator.normal(size=(field.size, width))
        return {"x": torch.from_numpy(x.astype(np.float32))}

    def earlier(self, field: Ids, count: int, shift: int) -> tuple[Ids, Ids]:
        """``count`` pairs of an older paper and one of its field, or of a later field by ``shift``, that names it."""
        new = self.generator.integers(1, field.size, size=count)
        aims = np.where(self.generator.random(count) < self.homophily, (field[new] + shift) % self.num_fields, -1)
        old = (self.generator.random(count) * new).astype(np.int64)
        for wanted in range(self.num_fields):
            members = np.flatnonzero(field == wanted)
            some = np.flatnonzero(aims == wanted)
            before = np.searchsorted(members, new[some])
            some, before = some[before > 0], before[before > 0]
            old[some] = members[(self.generator.random(some.size) * before).astype(np.int64)]
        return old, new

    def ends(self, of_papers: Ids, of_others: Ids, count: int) -> tuple[Ids, Ids]:
        """``count`` papers, each about equally often, and for each a node, mostly of its field."""
        paper = self.generator.permutation(np.arange(count, dtype=np.int64) % of_papers.size)
        other = self.generator.integers(of_others.size, size=count)
        aims = np.where(self.generator.random(count) < self.homophily, of_papers[paper], -1)
        for wanted in range(self.num_fields):
            some = np.flatnonzero(aims == wanted)
            other[some] = self.generator.choice(np.flatnonzero(of_others == wanted), size=some.size)
        return paper, other


def _edge_table(sender: Ids, receiver: Ids, day: Ids) -> EdgeTable:
    return EdgeTable(torch.from_numpy(np.stack([sender, receiver])), {"time": torch.from_numpy(day)})


def _masks(count: int) -> dict[str, Tensor]:
    share = torch.arange(count) / count
    return {"train_mask": share < 0.6, "val_mask": (share >= 0.6) & (share < 0.8), "test_mask": share >= 0.8}
