"""Small graphs for the tests of partitions, and the numbers of a report counted edge by edge."""

from collections import Counter

import torch
from torch import Tensor

from lightning_gnn_dist import Graph, communities


def random_directed(num_nodes: int = 120, num_edges: int = 500, seed: int = 0) -> Graph:
    """Directed, with self loops, duplicate edges, nodes without in-neighbours, and unlabelled nodes."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes, (2, num_edges), generator=generator)
    edge_index[1] -= edge_index[1] % 5  # four of five nodes receive nothing, many edges are duplicates
    edge_index = torch.cat([edge_index, edge_index[:, :40], torch.arange(20).expand(2, 20)], 1)
    y = torch.randint(-1, 4, (num_nodes,), generator=generator)
    train_mask = (torch.rand(num_nodes, generator=generator) < 0.5) & (y >= 0)
    return Graph.from_edge_index(edge_index, num_nodes, {"y": y, "train_mask": train_mask})


def path_graph(num_nodes: int, *, both_ways: bool = True) -> Graph:
    """0 - 1 - 2 - ..."""
    forth = torch.stack([torch.arange(num_nodes - 1), torch.arange(1, num_nodes)])
    edge_index = torch.cat([forth, forth.flip(0)], 1) if both_ways else forth
    train_mask = torch.ones(num_nodes, dtype=torch.bool)
    return Graph.from_edge_index(edge_index, num_nodes, {"train_mask": train_mask})


def lonely_nodes(num_nodes: int = 40, num_connected: int = 10) -> Graph:
    """A path, and many nodes without any edge."""
    path = path_graph(num_connected)
    indptr = torch.cat([path.indptr, path.indptr[-1].expand(num_nodes - num_connected)])
    return Graph(indptr, path.indices, {"train_mask": torch.ones(num_nodes, dtype=torch.bool)})


def messy_community() -> Graph:
    """Communities with every tenth edge doubled and a self loop at every node."""
    graph = communities(300, 4, num_features=2, train_share=0.3, seed=1)
    receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    edge_index = torch.stack([graph.indices.long(), receiver])
    loops = torch.arange(graph.num_nodes).expand(2, -1)
    edges = torch.cat([edge_index, edge_index[:, ::10], loops], 1)
    return Graph.from_edge_index(edges, graph.num_nodes, graph.node_arrays)


def label_skew(label: Tensor, inside: Tensor) -> float:
    """Total variation distance between the labels where ``inside`` and all labels, counted one by one."""
    part, whole = Counter(label[inside].tolist()), Counter(label.tolist())
    share_in_part = {k: n / max(sum(part.values()), 1) for k, n in part.items()}
    return sum(abs(share_in_part.get(k, 0) - n / sum(whole.values())) for k, n in whole.items()) / 2
