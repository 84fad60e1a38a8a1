"""Splits of graphs whose edges have labels, for several tests."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from lightning_gnn_dist import (
    Graph,
    Isolated,
    LinkDataModule,
    LinkSplit,
    NeighborSampler,
    RandomPartitioner,
    split_edges,
)
from lightning_gnn_dist.graph.typed.names import EdgeType
from tests.edge_model import RATES, rated, typed_ratings

ALL = NeighborSampler([-1, -1])
KINDS = pytest.mark.parametrize("kind", [None, RATES], ids=["plain", "typed"])


@cache
def graph_of(kind: EdgeType | None) -> Graph:
    return rated() if kind is None else typed_ratings()


@cache
def split_of(kind: EdgeType | None, **options: Any) -> LinkSplit:
    name = "edge_rating" if kind is None else "rating"
    return split_edges(graph_of(kind), 0.15, 0.2, labels=name, edge_type=kind, **options)


def data_of(split: LinkSplit | Path, **options: Any) -> LinkDataModule:
    defaults: dict[str, Any] = {"sampler": ALL, "batch_size": 32, "partitioner": RandomPartitioner()}
    defaults["boundary"] = Isolated()
    return LinkDataModule(split, **(defaults | options))


def store_of(graph: Graph, kind: EdgeType | None) -> tuple[Tensor, Tensor, Tensor]:
    """Ends, marks and labels of the edges that may be asked for."""
    data = graph.to_pyg()
    store = data if kind is None else data[kind]
    mark, rating = ("edge_mark", "edge_rating") if kind is None else ("mark", "rating")
    return store.edge_index, store[mark], store[rating]


def held_of(split: LinkSplit, name: str) -> Counter[tuple[int, float]]:
    arrays = split.held_arrays[name]
    label, mark = (arrays[n] if n in arrays else arrays[f"edge_{n}"] for n in ("rating", "mark"))
    return Counter(zip(mark.tolist(), label.tolist(), strict=True))


def labelled(graph: Graph, kind: EdgeType | None) -> Counter[tuple[int, float]]:
    _, mark, label = store_of(graph, kind)
    known = ~label.isnan()
    return Counter(zip(mark[known].tolist(), label[known].tolist(), strict=True))
