"""What is loaded once for all ranks: loops that draw around edges."""

from collections.abc import Iterator
from typing import Any

import torch

from lightning_gnn_dist import Graph, LinkDataModule, NeighborSampler, TemporalSampler, communities, split_edges


def data_modules(typed: Graph, few: dict[str, Any]) -> Iterator[Any]:
    generator = torch.Generator().manual_seed(0)
    ends, times = torch.randint(20, (2, 90), generator=generator), torch.arange(90) // 9
    events = Graph.from_edge_index(ends, 20, {"x": torch.ones(20, 2)}, {"edge_time": times})
    by_time, sampler = TemporalSampler([2, 2], "edge_time"), NeighborSampler([2, 2])
    yield LinkDataModule(split_edges(communities(60, 2), negatives=2), sampler=sampler, **few)
    kind = ("author", "writes", "paper")
    yield LinkDataModule(split_edges(typed, negatives=2, edge_type=kind), sampler=sampler, **few)
    yield LinkDataModule(split_edges(events, 0.2, 0.2, negatives=2, time="edge_time"), sampler=by_time, **few)
