"""The sampler as it could be written on one page: Python integers, dictionaries, no tricks."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import log1p

import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.graph.graph import Graph

MASK = 2**64 - 1


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


def draw(key: int, node: int, i: int) -> int:
    stream = mix((key + 0xD1342543DE82EF95 * node) & MASK)
    return mix((stream + 0x9E3779B97F4A7C15 * i) & MASK)


def floyd(key: int, node: int, degree: int, fanout: int) -> list[int]:
    """The places in its row that a node draws, in the order in which it draws them."""
    if fanout < 0 or degree <= fanout:
        return list(range(degree))
    chosen: list[int] = []
    for i in range(fanout):
        last = degree - fanout + i
        place = ((draw(key, node, i) >> 32) * (last + 1)) >> 32
        chosen.append(last if place in chosen else place)
    return chosen


def unit(word: int) -> float:
    return (word >> 11) * 2.0**-53


def places(key: int, node: int, weights: list[float] | None, degree: int, fanout: int, replace: bool) -> list[int]:
    """The places in its row that a node draws, by any of the four rules."""
    if fanout < 0 or degree == 0 or (degree <= fanout and not replace):
        return list(range(degree))
    if weights is None:
        if not replace:
            return floyd(key, node, degree, fanout)
        return [((draw(key, node, i) >> 32) * degree) >> 32 for i in range(fanout)]
    weights = [max(weight, 1e-290) for weight in weights]
    if replace:
        sums = list(accumulate(weights))
        return [bisect_right(sums, unit(draw(key, node, i)) * sums[-1]) for i in range(fanout)]
    arrivals = [-log1p(-unit(draw(key, node, i))) / weight for i, weight in enumerate(weights)]
    return sorted(range(degree), key=arrivals.__getitem__)[:fanout]


def sample(
    graph: Graph,
    seeds: list[int],
    fanouts: list[int],
    place: tuple[int, int, int],
    replace: bool = False,
    weight: str | None = None,
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Nodes of the batch; for each expanded node the positions of its senders; the same as edge ids."""
    nodes, rows, edges = list(seeds), [], []
    position = {node: i for i, node in enumerate(seeds)}
    begin = 0
    for hop, fanout in enumerate(fanouts):
        end = len(nodes)
        for node in nodes[begin:end]:
            start, stop = graph.indptr[node : node + 2].tolist()
            weights = None if weight is None else graph.edge_arrays[weight][start:stop].float().view(-1).tolist()
            drawn = places(int(key(*place, hop)), node, weights, stop - start, fanout, replace)
            ids = [start + i for i in drawn]
            edges.append(ids)
            rows.append([])
            for sender in graph.indices[ids].tolist():
                if sender not in position:
                    position[sender] = len(nodes)
                    nodes.append(sender)
                rows[-1].append(position[sender])
        begin = end
    return nodes, rows, edges


def random_graph(
    num_nodes: int = 60, num_edges: int = 240, seed: int = 0, *, undirected: bool = False, arrays: bool = True
) -> Graph:
    """A random graph with self-loops, repeated edges and (the last five) isolated nodes."""
    generator = torch.Generator().manual_seed(seed)
    edge_index = torch.randint(num_nodes - 5, (2, num_edges), generator=generator)
    if undirected:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    nodes: dict[str, Tensor] = {}
    edges: dict[str, Tensor] = {}
    if arrays:
        nodes["x"] = torch.randn(num_nodes, 8, generator=generator)
        nodes["y"] = torch.randint(4, (num_nodes,), generator=generator)
        edges["edge_attr"] = torch.randn(edge_index.size(1), 3, generator=generator)
    return Graph.from_edge_index(edge_index, num_nodes, nodes, edges)
