"""Held edges of shards, shared evenly among the ranks.

held ones of the own shard -> each rank gets what of its share lies here -> the own share, in the order of shards
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.wire.channel import Channel

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
