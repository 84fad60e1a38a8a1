"""What a rank holds: which chunks, super-epoch by super-epoch, and random nodes of others.

It depends on the seed, the super-epoch, the rank and the number of ranks alone, so that ranks need not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.checks import check_folder
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.random import deal
from lightning_gnn_dist.rules import Count, Fraction, check_fields

BYTES_BESIDE = 22  # of a node that is held, beside its arrays: its id, where its row starts, masks and coverage
ReadChunks = Callable[[Sequence[int]], tuple[Graph, Tensor, int]]  # the graph among their nodes, these, bytes read


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
    """Deals chunks to ranks. To add a way, write a frozen dataclass with ``sweep`` and ``held``."""

    def num_chunks(self, world_size: int) -> int:
        """Return the number of chunks that the graph is cut into: where it is not overridden, one for each rank."""
        return world_size

    def sweep(self, world_size: int) -> int:
        """Return the super-epochs until a rank has held all that it will hold; 1 if its part never changes."""
        ...

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        """Return the chunks of one rank in a super-epoch."""
        ...

    def turns(self, world_size: int) -> int:
        """Return the super-epochs of an epoch, in which each chunk is a rank's own once: 1, each in every one."""
        return 1

    def of_graph(self, graph: Graph) -> Residency:
        """Return the residency for a graph, with a number for all that was left open: nothing, so itself."""
        return self

    def partitioner(self, graph: Graph) -> Any:
        """Return what cuts a graph where no partitioner was named. None: what suits the strategy and the size.

        Of a graph whose files hold chunk after chunk it has a method ``reader``, which returns what reads some.
        """
        return None

    def check_beside(self, every: int | None, extra_nodes: float) -> None:
        """Refuse what a :class:`Holding` says beside it."""
        return None  # with a body it is no abstract method

    def begin_training(self, trainer: Trainer | None) -> None:
        """Tell what models lose that train on such parts in this run."""
        return None


@dataclass(frozen=True)
class Fixed(Residency):
    """Each rank holds one chunk, which never changes."""

    def sweep(self, world_size: int) -> int:
        return 1

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        return Held((rank,))

    def check_beside(self, every: int | None, extra_nodes: float) -> None:
        if every is not None:
            raise ValueError(
                f"every={every} says how often parts change, and with {self} they never do: use Rotate() or "
                "Redeal(1000), or leave it out."
            )


@dataclass(frozen=True)
class Rotate(Residency):
    r"""Each rank holds a base chunk for good, and a second one that rotates (Grappa, Xu et al., arXiv:2602.01872).

    In super-epoch :math:`s` rank :math:`r` of :math:`P` holds its own chunk :math:`r` and chunk
    :math:`(r + 1 + s \bmod (P - 1)) \bmod P`. So in :math:`P - 1` super-epochs it sees each other chunk once, and no
    chunk is the second one of two ranks at a time. Seeds are always nodes of the base chunk. With two ranks both hold
    the whole graph, and nothing changes.
    """

    def sweep(self, world_size: int) -> int:
        return max(1, world_size - 1)

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
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
        if self.num_supernodes < world_size:
            raise ValueError(
                f"num_supernodes ({self.num_supernodes}) must be at least the number of ranks ({world_size}): every "
                "rank needs a super-node."
            )
        return self.num_supernodes

    def sweep(self, world_size: int) -> int:
        # Two super-nodes meet on a rank with probability 1 / P, so after P deals most of them have.
        return world_size

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Held:
        dealt = deal(self.num_supernodes, world_size, (int(seed) + Purpose.DEALS) * 2**20 + int(super_epoch))
        return Held(tuple((dealt == rank).nonzero().view(-1).tolist()))


@dataclass(frozen=True)
class Holding:
    """What a rank holds, before its boundary adds nodes.

    Args:
        residency: Which chunks of the partition, and when that changes: :class:`Fixed` (one for each rank, for good),
            :class:`Rotate`, :class:`Redeal` or :class:`Sweep`. The next part is read while the current one trains.
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
        self.residency.check_beside(self.every, self.extra_nodes)
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
    if super_epoch % (turns := residency.turns(world_size)) == 0:
        later = [
            residency.held(super_epoch + t, r, world_size, seed) for t in range(1, turns) for r in range(world_size)
        ]
        _check_own(name, num_chunks, [*ranks, *later], super_epoch, turns)
    return ranks


def _check_own(name: str, num_chunks: int, of_all: list[Held], first: int, turns: int) -> None:
    """Refuse a deal in which some chunk is nobody's own, or the own of two, in the super-epochs of an epoch."""
    if sorted(chunk for held in of_all for chunk in held.own) != list(range(num_chunks)):
        when = f"super-epoch {first}" if turns == 1 else f"super-epochs {first} to {first + turns - 1}"
        raise ValueError(
            f"{name} must make every one of the {num_chunks} chunks exactly one rank's own, but in {when} the ranks' "
            f"own are {[held.own for held in of_all]}."
        )


def bytes_held(graph: Graph) -> int:
    """Return the bytes that all of a graph takes where ranks hold it as parts."""
    return graph.num_bytes + BYTES_BESIDE * graph.num_nodes


def default_period(max_epochs: int | None, sweep: int) -> int:
    """Return the epochs of a super-epoch such that a whole sweep fits into the run; 1 without ``max_epochs``."""
    return max(1, (max_epochs or 0) // sweep)
