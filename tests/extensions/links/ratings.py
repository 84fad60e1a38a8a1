"""Splits of graphs whose edges have labels, for several tests."""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.typed.types import EdgeType
from tests.edge_model import RATES, rated, typed_ratings

ALL = lgd.NeighborSampler([-1, -1])
KINDS = pytest.mark.parametrize("kind", [None, RATES], ids=["plain", "typed"])


@cache
def graph_of(kind: EdgeType | None) -> lgd.Graph:
    return rated() if kind is None else typed_ratings()


@cache
def split_of(kind: EdgeType | None, **options: Any) -> lgd.LinkSplit:
    name = "edge_rating" if kind is None else "rating"
    return lgd.split_edges(graph_of(kind), 0.15, 0.2, labels=name, edge_type=kind, **options)


def data_of(split: lgd.LinkSplit | Path, **options: Any) -> lgd.LinkDataModule:
    defaults: dict[str, Any] = {"sampler": ALL, "batch_size": 32, "partitioner": lgd.RandomPartitioner()}
    defaults["boundary"] = lgd.Isolated()
    return lgd.LinkDataModule(split, **(defaults | options))


def store_of(graph: lgd.Graph, kind: EdgeType | None) -> tuple[Tensor, Tensor, Tensor]:
    """Ends, marks and labels of the edges that may be asked for."""
    data = graph.to_pyg()
    store = data if kind is None else data[kind]
    mark, rating = ("edge_mark", "edge_rating") if kind is None else ("mark", "rating")
    return store.edge_index, store[mark], store[rating]


def held_of(split: lgd.LinkSplit, name: str) -> Counter[tuple[int, float]]:
    arrays = split.held_arrays[name]
    label, mark = (arrays[n] if n in arrays else arrays[f"edge_{n}"] for n in ("rating", "mark"))
    return Counter(zip(mark.tolist(), label.tolist(), strict=True))


def labelled(graph: lgd.Graph, kind: EdgeType | None) -> Counter[tuple[int, float]]:
    _, mark, label = store_of(graph, kind)
    known = ~label.isnan()
    return Counter(zip(mark[known].tolist(), label[known].tolist(), strict=True))
