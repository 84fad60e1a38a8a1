"""The sampler as it could be written on one page: Python integers, dictionaries, no tricks."""

from math import frexp, log, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist import Graph
from lightning_gnn_dist.engine.rng import key

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
    table = alias_table(weights)
    if replace:
        return [choose(table, draw(key, node, i)) for i in range(fanout)]
    tries = 0 if degree <= max(20, fanout + fanout // 2) else fanout + degree // 2
    chosen: list[int] = []
    for i in range(tries):
        place = choose(table, draw(key, node, i))
        if len(chosen) < fanout and place not in chosen:
            chosen.append(place)
    arrivals = [minus_log(draw(key, node, tries + i)) / weight for i, weight in enumerate(weights)]
    rest = sorted(set(range(degree)) - set(chosen), key=arrivals.__getitem__)
    return chosen + rest[: fanout - len(chosen)]


def alias_table(weights: list[float]) -> list[tuple[float, int]]:
    """For each place the share of a box that it has for itself, and the place that has the rest of the box."""
    total = 0.0
    for weight in weights:
        total += weight
    scale = len(weights) / total
    weights = [weight * scale for weight in weights]
    light = [i for i, weight in enumerate(weights) if not weight > 1]
    heavy = [i for i, weight in enumerate(weights) if weight > 1]
    table, last = {}, heavy[-1] if heavy else len(weights) - 1
    left = weights[heavy[0]] if heavy else 1.0
    while heavy:
        if left > 1 and light:
            i = light.pop(0)
            table[i] = weights[i], heavy[0]
            left = (left + weights[i]) - 1
        elif left <= 1 and len(heavy) > 1:
            table[heavy[0]] = left, heavy[1]
            left = (left + weights[heavy[1]]) - 1
            heavy.pop(0)
        else:
            break
    table |= {i: (1.0, i) for i in heavy} | {i: (weights[i], last) for i in light}
    return [(float(np.float32(table[i][0])), table[i][1]) for i in range(len(weights))]


def choose(table: list[tuple[float, int]], word: int) -> int:
    height = unit(word) * len(table)
    place = int(height)
    threshold, other = table[place]
    return place if height - place < threshold else other


def minus_log(word: int) -> float:
    m, k = frexp(((word >> 11) + 1) * 2.0**-53)
    if m < sqrt(0.5):
        m, k = 2 * m, k - 1
    s = (m - 1) / (m + 1)
    z = s * s
    series = z * (1 / 13)
    for n in (11, 9, 7, 5, 3):
        series = (series + 1 / n) * z
    return -(k * log(2) + (s + s) * (series + 1))


def sample(
    graph: Graph,
    seeds: list[int],
    fanouts: list[Any],
    place: tuple[int, int, int],
    replace: bool = False,
    weight: str | None = None,
) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Nodes of the batch; for each expanded node the positions of its senders; the same as edge ids.

    The fan-outs of a typed graph are by hop and type: a node draws from each piece of its row as if it were a row.
    """
    nodes, rows, edges = list(seeds), [], []
    position = {node: i for i, node in enumerate(seeds)}
    begin = 0
    for hop, fanout in enumerate(fanouts):
        end = len(nodes)
        for node in nodes[begin:end]:
            start, stop = graph.indptr[node : node + 2].tolist()
            weights = None if weight is None else graph.edge_arrays[weight][start:stop].float().view(-1).tolist()
            ids, kinds = [], graph.types.edge_type[start:stop].tolist()
            for kind in sorted(set(kinds)):
                piece = [start + i for i, other in enumerate(kinds) if other == kind]
                count = int(fanout if np.ndim(fanout) == 0 else fanout[kind])
                if count:
                    number = int(key(*place, hop + (kind << 32)))
                    ids += [piece[i] for i in places(number, node, weights, len(piece), count, replace)]
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
