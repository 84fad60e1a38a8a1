"""What a rank holds: which chunks, super-epoch by super-epoch, and random nodes of others.

It depends on the seed, the super-epoch, the rank and the number of ranks alone, so that ranks need not communicate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_gnn_dist.batches.deal import slice_of
from lightning_gnn_dist.checks import (
    check_at_least,
    check_below,
    check_folder,
    check_seed,
)
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.random import deal
from lightning_gnn_dist.rules import Count, Fraction, check_fields


class Held(NamedTuple):
    """The chunks of one rank in one super-epoch.

    Attributes:
        own: The chunks whose training nodes are its seeds. Every chunk is exactly one rank's own.
        others: The chunks whose nodes only send messages.
    """

    own: tuple[int, ...]
    others: tuple[int, ...] = ()


@runtime_checkable
class Residency(Protocol):
    """Deals chunks to ranks. To add a way, write a frozen dataclass with these three methods."""

    def num_chunks(self, world_size: int) -> int:
        """Return the number of chunks that the graph is cut into: where it is not overridden, one for each rank."""
        check_at_least(1, world_size=world_size)
        return world_size

    def sweep(self, world_size: int) -> int:
        """Return the super-epochs until a rank has held all that it will hold; 1 if its part never changes."""
        ...

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        """Return the chunks of one rank in a super-epoch."""
        ...


def _check_place(super_epoch: int, rank: int, world_size: int, seed: int) -> None:
    check_at_least(1, world_size=world_size)
    check_at_least(0, super_epoch=super_epoch)
    check_below(world_size, "ranks", rank=rank)
    check_seed(seed)


@dataclass(frozen=True)
class Fixed(Residency):
    """Each rank holds one chunk, which never changes."""

    def sweep(self, world_size: int) -> int:
        check_at_least(1, world_size=world_size)
        return 1

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        _check_place(super_epoch, rank, world_size, seed)
        return Held((rank,))


@dataclass(frozen=True)
class Rotate(Residency):
    r"""Each rank holds a base chunk for good, and a second one that rotates (Grappa, Xu et al., arXiv:2602.01872).

    In super-epoch :math:`s` rank :math:`r` of :math:`P` holds its own chunk :math:`r` and chunk
    :math:`(r + 1 + s \bmod (P - 1)) \bmod P`. So in :math:`P - 1` super-epochs it sees each other chunk once, and no
    chunk is the second one of two ranks at a time. Seeds are always nodes of the base chunk. With two ranks both hold
    the whole graph, and nothing changes.
    """

    def sweep(self, world_size: int) -> int:
        check_at_least(1, world_size=world_size)
        return max(1, world_size - 1)

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        _check_place(super_epoch, rank, world_size, seed)
        if world_size == 1:
            return Held((rank,))
        return Held((rank,), ((rank + 1 + super_epoch % (world_size - 1)) % world_size,))


@dataclass(frozen=True)
class Redeal(Residency):
    """Super-nodes are dealt anew to the ranks in every super-epoch, together with their training nodes.

    Args:
        num_supernodes: The number of chunks to deal. Take many more than ranks, so that parts look alike.
    """

    num_supernodes: Count

    def __post_init__(self) -> None:
        check_fields(self)

    def num_chunks(self, world_size: int) -> int:
        check_at_least(1, world_size=world_size)
        if self.num_supernodes < world_size:
            raise ValueError(
                f"num_supernodes ({self.num_supernodes}) must be at least the number of ranks ({world_size}): every "
                "rank needs a super-node."
            )
        return self.num_supernodes

    def sweep(self, world_size: int) -> int:
        check_at_least(1, world_size=world_size)
        # Two super-nodes meet on a rank with probability 1 / P, so after P deals most of them have.
        return world_size

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        _check_place(super_epoch, rank, world_size, seed)
        dealt = deal(self.num_supernodes, world_size, (int(seed) + Purpose.DEALS) * 2**20 + int(super_epoch))
        return Held(tuple((dealt == rank).nonzero().view(-1).tolist()))


@dataclass(frozen=True)
class AsRanks(Residency):
    """Train as so many ranks would, on as many as there are: the curve is the same on all of them.

    The graph has one chunk for each of ``num_ranks`` learners, and each rank has the work of some of them. It computes
    one batch of each learner, one after the other, and steps once. So ``batch_size * num_ranks`` seeds are learned from
    in a step, on a laptop and on a cluster, and a search of learning rates on one rank holds on eight. What a learner's
    batch holds, and what dropout draws on it, depends on the seed and the step alone. Losses are then equal but for the
    order of sums, and a checkpoint goes on, on another number of ranks.

    It takes a :class:`GrappaStrategy`, also on one rank, and a boundary that hides nothing: ``Fetch()``, or ``Halo(L)``
    with the ``L`` hops of a ``NeighborSampler``. Ranks with more learners than others take longer. The statistics of
    batch normalisation depend on the number of ranks.

    Args:
        num_ranks: The number of learners: as many as there may be ranks.
    """

    num_ranks: Count

    def __post_init__(self) -> None:
        check_fields(self)

    def num_chunks(self, world_size: int) -> int:
        check_at_least(1, world_size=world_size)
        if self.num_ranks < world_size:
            raise ValueError(
                f"AsRanks({self.num_ranks}) divides a step among {self.num_ranks} learners, and there are {world_size} "
                f"ranks: use AsRanks({world_size}), or fewer ranks."
            )
        return self.num_ranks

    def sweep(self, world_size: int) -> int:
        check_at_least(1, world_size=world_size)
        return 1

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        _check_place(super_epoch, rank, world_size, seed)
        return Held(tuple(range(self.num_ranks)[slice_of(self.num_chunks(world_size), world_size, rank)]))

    def batches_of_step(self, world_size: int) -> int:
        """Return the batches that each rank takes in a step: those of the rank with most learners."""
        return -(-self.num_chunks(world_size) // world_size)


@dataclass(frozen=True)
class Holding:
    """What a rank holds, before its boundary adds nodes.

    Args:
        residency: Which chunks of the partition, and when that changes: :class:`Fixed` (one for each rank, for good),
            :class:`Rotate`, :class:`Redeal` or :class:`AsRanks`. The next part is read while the current one trains.
        every: Passes over the training data between two changes. Default: as many as let a whole sweep of the
            residency fit into ``max_epochs``.
        extra_nodes: Random nodes of other parts that send messages and are not learned from (the LLCG paper's subgraph
            approximation), as a share in [0, 1] of what ``extra_of`` names.
        extra_of: Whose number of nodes the share is of: the ``"part"`` or the whole ``"graph"``.
        cache_dir: The folder where partitions are kept. Default: beside a saved graph, else the user's cache directory.
    """

    residency: Annotated[Residency, "an object such as Fixed(), Rotate() or Redeal(1000)"] = Fixed()
    every: Count | None = None
    extra_nodes: Fraction = 0.0
    extra_of: Scope = "part"
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every is not None and isinstance(self.residency, Fixed | AsRanks):
            raise ValueError(
                f"every={self.every} says how often parts change, and with {self.residency} they never do: use "
                "Rotate() or Redeal(1000), or leave it out."
            )
        if self.cache_dir is not None:
            check_folder("cache_dir", self.cache_dir)

    @property
    def is_one_chunk(self) -> bool:
        """Whether each rank holds one chunk for good, and no other nodes."""
        return replace(self, cache_dir=None) == Holding()

    def extra(self, residents: Tensor, partition: Partition, rank: int, seed: int) -> Tensor:
        """Return the random nodes that come along with ``residents``, by their ids in the whole graph."""
        if not self.extra_nodes:
            return residents[:0]
        num_nodes = partition.assignment.numel()
        outside = torch.ones(num_nodes, dtype=torch.bool).index_fill_(0, residents, False).nonzero().view(-1)
        base = residents.numel() if self.extra_of == "part" else num_nodes
        count = min(round(self.extra_nodes * base), outside.numel())
        return outside[permutation(outside.numel(), seed + Purpose.SURROUNDINGS, rank)[:count]]


def held_by_all(residency: Residency, super_epoch: int, world_size: int, seed: int) -> list[Held]:
    """Return what each rank holds; refuse the answers of a residency that are no such deal."""
    name, num_chunks = f"{type(residency).__name__}.held()", residency.num_chunks(world_size)
    ranks = [residency.held(super_epoch, rank, world_size, seed) for rank in range(world_size)]
    for held in ranks:
        if not isinstance(held, Held):
            raise TypeError(f"{name} must return Held(own, others), got {held!r}.")
        if set(held.own) & set(held.others):
            raise ValueError(f"{name} names chunks both as own and as others: {held!r}. Either is enough.")
        if not all(0 <= chunk < num_chunks for chunk in held.own + held.others):
            raise ValueError(
                f"{name} must name chunks from 0 to {num_chunks - 1}, as many as num_chunks() says: {held!r}."
            )
    if sorted(chunk for held in ranks for chunk in held.own) != list(range(num_chunks)):
        raise ValueError(
            f"{name} must make every one of the {num_chunks} chunks exactly one rank's own, but in super-epoch "
            f"{super_epoch} the ranks' own are {[held.own for held in ranks]}."
        )
    return ranks


def default_period(max_epochs: int | None, sweep: int) -> int:
    """Return the epochs of a super-epoch such that a whole sweep fits into the run; 1 without ``max_epochs``."""
    return max(1, (max_epochs or 0) // sweep)
