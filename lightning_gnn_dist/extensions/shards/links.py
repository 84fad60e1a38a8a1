"""Edges of shards as targets: held ones shared evenly among the ranks, and false receivers asked of owners.

held ones of the own shard -> each rank gets what of its share lies here -> the own share, in the order of shards
first tries of all draws -> their owners -> the other random tries of those that are edges -> ... -> nodes in order
"""

from __future__ import annotations

from itertools import chain
from itertools import count as counted
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.link_sampler import FALSE_ENDS, FalseEnds
from lightning_gnn_dist.extensions.links.negatives import RANDOM_TRIES, tried_places
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.sampling.turns import Steps
from lightning_gnn_dist.wire.channel import Channel

_FIRST_TRIES = 2  # asked at once for all draws: both are edges so seldom that mostly no turn follows
_BLOCK, _LARGEST_BLOCK = 64, 1 << 14  # nodes in order that are asked about at once, twice as many each time
_WAY_OUT = "Copy both from one division."


class Held(NamedTuple):
    """Some held edges.

    Attributes:
        edges: Their ends, by the ids in their types, shape ``(2, n)``.
        negatives: The false receivers of each, shape ``(n, K)``; None where edges have labels.
        arrays: What each of them carries.
    """

    edges: Tensor
    negatives: Tensor | None
    arrays: dict[str, Tensor]


def held_of_shard(shard: Shard, links: LinkBounds, name: str) -> Held:
    """Return the held edges whose receivers a shard owns; those of damaged files are refused."""
    folder = shard.rows.path
    assert folder is not None
    store.verify(folder, f"links/{name}")
    arrays, count = store.read(folder, shard.rows.num_senders)[0], int(links.held[name].diff()[shard.index])
    ours = {key.removeprefix("links/"): array for key, array in arrays.items() if key.startswith("links/")}
    edges, negatives = ours.get(f"{name}_edges"), ours.get(f"{name}_negatives")
    if edges is None or edges.shape != (2, count) or (negatives is None) != (links.labels is not None):
        raise ValueError(
            f"{folder} does not hold the {count} {name} edges that the index of the shards says: they come from two "
            f"divisions. {_WAY_OUT}"
        )
    carried = {key.partition("/")[2]: array for key, array in ours.items() if key.startswith(f"{name}/")}
    return Held(edges, negatives, carried)


def own_share(own: Held, starts: Tensor, channel: Channel, copy: int, num_copies: int) -> tuple[Held, range]:
    """Return this rank's share of all held edges, and their numbers among all. Collective.

    Args:
        own: Those that lie with the own shard.
        starts: How many the shards before each one have, and at the end all.
        channel: The ranks that hold all shards together.
        copy: Which of several such channels it is.
        num_copies: How many of them there are.
    """
    num_ranks, (first, end) = channel.size * num_copies, starts[channel.rank : channel.rank + 2].tolist()
    shares = [share_of(int(starts[-1]), num_ranks, shard * num_copies + copy) for shard in range(channel.size)]
    at = [slice(*(min(max(bound, first), end) - first for bound in (to.start, to.stop))) for to in shares]

    def exchanged(rows: Tensor) -> Tensor:
        return torch.cat(channel.exchange([rows[some].contiguous() for some in at]))

    edges = exchanged(own.edges.T.contiguous()).T.contiguous()
    negatives = None if own.negatives is None else exchanged(own.negatives)
    arrays = {name: exchanged(rows) for name, rows in sorted(own.arrays.items())}
    return Held(edges, negatives, arrays), shares[channel.rank]


def draw_false_ends(graph: ShardedGraph, wanted: FalseEnds) -> Steps[list[Tensor]]:
    """Draw false receivers for the edges of some batches, and return those of each batch, shape (n, draws).

    They are those that are drawn where one host has the graph, also for a sender with an edge to every candidate.
    """
    sizes, count = list(map(len, wanted.ids)), wanted.draws
    words = torch.from_numpy(np.array([key(*of, FALSE_ENDS) for of in wanted.keys], np.uint64).view(np.int64))
    words, numbers = words.repeat_interleave(torch.tensor(sizes)), torch.cat(list(wanted.ids))
    ends, times = torch.cat(list(wanted.ends), 1), None
    if wanted.times is not None:
        times = wanted.times[0], torch.cat(list(wanted.times[1]))
    bounds = wanted.candidates.there_by(ends[0] if times is None else times[1]).clamp_(min=1)
    found, left = torch.empty(len(numbers) * count, dtype=torch.int64), torch.arange(len(numbers) * count)
    end, upto = 0, RANDOM_TRIES + (int(bounds.max()) if len(numbers) else 0)
    blocks = (min(_BLOCK << number, _LARGEST_BLOCK) for number in counted(0))
    for size in chain([_FIRST_TRIES, RANDOM_TRIES - _FIRST_TRIES], blocks):
        if end == upto or not len(left):
            break
        tries = range(end, end := min(end + size, upto))  # are asked about together
        edges, most = left // count, RANDOM_TRIES + bounds[left // count]
        tried = wanted.candidates.ids(tried_places(words[edges], numbers[edges], left % count, tries, bounds[edges]))
        is_tried = torch.arange(tries.start, tries.stop) < most[:, None]
        is_free = is_tried & (tried != ends[:, edges, None]).all(0)
        rows, columns = is_free.nonzero(as_tuple=True)
        if len(rows):
            at = None if times is None else (times[0], times[1][edges[rows]])
            pairs = torch.stack([ends[0, edges[rows]], tried[rows, columns]])
            is_free[rows, columns] = ~(yield from graph.are_edges(pairs, wanted.edge_type, at))
        is_found = is_free.any(1)
        column = torch.where(is_found, is_free.to(torch.uint8).argmax(1), is_tried.sum(1) - 1)  # or the one tried last
        found[left] = tried[torch.arange(len(left)), column]
        left = left[~is_found & (most > end)]
    return list(found.view(len(numbers), count).split(sizes))
