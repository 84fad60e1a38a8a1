"""Small graphs with times: many are equal, some negative, and edges stand there more than once."""

import torch
from torch_geometric.data import Data, HeteroData

from lightning_gnn_dist import Graph
from lightning_gnn_dist.engine.sample import BatchKey

KEY = BatchKey(3, 1, 4)


def plain(seed: int, times_of: str, num_edges: int = 300) -> Graph:
    """40 nodes with many equal times, some negative, and edges that stand there more than once."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(40, (2, num_edges), generator=generator)
    data = Data(x=torch.randn(40, 3), edge_index=edge_index, time=torch.randint(-4, 8, (40,), generator=generator))
    if times_of == "edges":
        data.edge_time = torch.randint(-4, 8, (num_edges,), generator=generator)
    return Graph.from_pyg(data, edge_ids=True)


def typed(seed: int, in_order: bool) -> Graph:
    """Times of edges, of the nodes that send, and of neither."""
    generator = torch.Generator().manual_seed(seed)
    data, counts = HeteroData(), {"a": 25, "b": 30, "c": 4}
    for kind, count in counts.items():
        data[kind].x = torch.randn(count, 2)
    for kind in ("a", "b"):
        data[kind].time = torch.randint(9, (counts[kind],), generator=generator)
    for number, (source, target) in enumerate([("a", "b"), ("b", "a"), ("a", "a"), ("c", "a"), ("b", "c"), ("a", "b")]):
        store = data[source, f"r{number}", target]
        ends = [torch.randint(counts[end], (90,), generator=generator) for end in (source, target)]
        store.edge_index = torch.stack(ends)
        if number % 2:
            store.time = torch.randint(9, (90,), generator=generator)
    del data["c", "r3", "a"].time
    return Graph.from_pyg(data, time="time" if in_order else None)


GRAPHS = {
    "edges": lambda seed: (plain(seed, "edges"), "edge_time"),
    "nodes": lambda seed: (plain(seed, "nodes"), "time"),
    "types": lambda seed: (typed(seed, in_order=False), "time"),
    "types in order": lambda seed: (typed(seed, in_order=True), "time"),
}
