"""What a rank holds: how a graph is cut, which chunks, super-epoch by super-epoch, and random nodes of others.

It depends on the seed, the super-epoch, the rank and the number of ranks alone, so that ranks need not communicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.checks import Count, Fraction, check_fields, check_folder
from lightning_gnn_dist.engine.rng import Purpose, permutation
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.joint import Scope
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.partition.base import Partition, Partitioner, learned_from
from lightning_gnn_dist.partition.random import deal
from lightning_gnn_dist.wire.memory import memory_bytes

_LOOKED_AT = 4  # super-epochs whose parts are counted to choose a boundary
_HORIZON = 16  # super-epochs whose largest part decides the number of batches of a pass, however long the run
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


@dataclass(frozen=True, eq=False)
class Plan:
    """How a graph is cut for a number of ranks, and which of them holds what. It is the same on all ranks.

    Args:
        graph: The whole graph.
        named: Cuts the graph into chunks; or a ready partition. None: what suits the size.
        holding: Which chunks a rank holds, and which random nodes of others.
        num_parts: How many ranks, or hosts, hold a part.
        seed: Decides everything random.
        look_alike: Whether parts must look alike where none is named, as models that learn from them are averaged.
        is_told: Whether the log says why another than METIS cuts, where none is named.

    Attributes:
        residency: Which chunks a rank holds.
        turns: The super-epochs of an epoch, in each of which a rank learns from some of its seeds.
        sweep: The super-epochs until a rank has held all that it will hold.
        has_parts: Whether a rank holds less than the graph at a time, if its boundary does not see all of it.
    """

    graph: Graph
    named: Partitioner | Partition | None
    holding: Holding
    num_parts: int
    seed: int
    look_alike: bool = False
    is_told: bool = True
    residency: Residency = field(init=False)
    turns: int = field(init=False)
    sweep: int = field(init=False)
    has_parts: bool = field(init=False)

    def __post_init__(self) -> None:
        residency, of = self.holding.residency, self.num_parts
        vars(self).update(residency=residency, turns=residency.turns(of), sweep=residency.sweep(of))
        vars(self).update(has_parts=of > 1 or self.turns > 1)

    @cached_property
    def partitioner(self) -> Partitioner | Partition:
        """What cuts the graph."""
        found = self.residency.partitioner(self.graph) if self.named is None else self.named
        if found is None:
            how = {"look_alike": self.look_alike, "is_told": self.is_told}
            found = extension("default partitioner")(self.graph.num_edges, memory_bytes(), **how)
        return found

    @cached_property
    def partition(self) -> Partition:
        """The partition, from the cache or computed and put there."""
        num_chunks, partitioner = self.residency.num_chunks(self.num_parts), self.partitioner
        if not isinstance(partitioner, Partition):
            if hasattr(partitioner, "reader"):  # the graph itself is where they are kept
                return partitioner(self.graph, num_chunks, self.seed)
            of = self.graph, partitioner, num_chunks, self.seed, self.holding.cache_dir
            found: Partition = extension("kept partition")(*of)
            return found
        if partitioner.num_parts != num_chunks or partitioner.assignment.numel() != self.graph.num_nodes:
            raise ValueError(
                f"The partition has {partitioner.num_parts} parts of {partitioner.assignment.numel()} nodes in all, "
                f"but {self.num_parts} ranks hold {num_chunks} parts of a graph of {self.graph.num_nodes} nodes: give "
                "a partitioner instead, or as many parts."
            )
        return partitioner

    def held(self, super_epoch: int) -> list[Held]:
        """Return what each rank holds; refuse the answers of a residency that are no such deal."""
        name, turns = f"{type(self.residency).__name__}.held()", self.turns
        num_chunks = self.residency.num_chunks(self.num_parts)
        times = range(super_epoch, super_epoch + (turns if super_epoch % turns == 0 else 1))
        places = [(at, rank) for at in times for rank in range(self.num_parts)]
        of_all = [self.residency.held(at, rank, self.num_parts, self.seed) for at, rank in places]
        for held in of_all[: self.num_parts]:
            if not isinstance(held, Held):
                raise TypeError(f"{name} must return Held(own, others), got {held!r}.")
            if set(held.own) & set(held.others):
                raise ValueError(f"{name} names chunks both as own and as others: {held!r}. Either is enough.")
            if not all(0 <= chunk < num_chunks for chunk in held.own + held.others):
                raise ValueError(
                    f"{name} must name chunks from 0 to {num_chunks - 1}, as many as num_chunks() says: {held!r}."
                )
        is_whole = len(times) == turns  # then every chunk was some rank's own
        if is_whole and sorted(chunk for held in of_all for chunk in held.own) != list(range(num_chunks)):
            when = f"super-epoch {times[0]}" if turns == 1 else f"super-epochs {times[0]} to {times[-1]}"
            raise ValueError(
                f"{name} must make every one of the {num_chunks} chunks exactly one rank's own, but in {when} the "
                f"ranks' own are {[held.own for held in of_all]}."
            )
        return of_all[: self.num_parts]

    def owner(self, super_epoch: int) -> Tensor:
        """Return the rank that learns from each chunk, -1 of one that nobody holds: int64, shape ``(num_chunks,)``."""
        owner = torch.full((self.residency.num_chunks(self.num_parts),), -1)
        for rank, held in enumerate(self.held(super_epoch)):
            owner[list(held.own)] = rank
        return owner

    def by_rank(self) -> Partition:
        """Return the partition that maps each node to the rank that learns from it in super-epoch 0, or in epoch 0."""
        owner = torch.stack([self.owner(turn) for turn in range(self.turns)]).amax(0)  # one turn holds a chunk
        return Partition(owner.to(torch.int32)[self.partition.assignment], self.num_parts)

    def nodes_of(self, chunks: Iterable[int]) -> Tensor:
        """Return the nodes of several chunks: int64, in increasing order."""
        chosen = torch.zeros(self.partition.num_parts, dtype=torch.bool)
        chosen[list(chunks)] = True
        return chosen[self.partition.assignment].nonzero().view(-1)

    def residents(self, rank: int, super_epoch: int) -> tuple[Tensor, Tensor]:
        """Return the nodes of a part without its halo, the rank's own first, and these alone."""
        held = self.residency.held(super_epoch, rank, self.num_parts, self.seed)
        own = self.nodes_of(held.own)
        residents, num_nodes = torch.cat([own, self.nodes_of(held.others)]), self.graph.num_nodes
        if share := self.holding.extra_nodes:
            outside = torch.ones(num_nodes, dtype=torch.bool).index_fill_(0, residents, False).nonzero().view(-1)
            count = round(share * (residents.numel() if self.holding.extra_of == "part" else num_nodes))
            drawn = permutation(outside.numel(), self.seed + Purpose.SURROUNDINGS, rank)[:count]
            residents = torch.cat([residents, outside[drawn]])
        return residents, own

    def first_parts(self, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what a rank holds without a halo, and what of it it learns from, in the first super-epochs."""
        is_seed = learned_from(self.graph, self.graph.types.seeds)
        for super_epoch in range(min(self.sweep, _LOOKED_AT)):
            residents, own = self.residents(rank, super_epoch)
            yield residents, own[is_seed[own]]

    def learned_by_ranks(self) -> list[int]:
        """Return how many nodes each rank learns from in super-epoch 0; all count where no mask tells."""
        owners = self.by_rank().assignment[learned_from(self.graph, self.graph.types.seeds)]
        return owners.bincount(minlength=self.num_parts).tolist()

    def most(
        self, what: str, count: Callable[[Tensor], Tensor], otherwise: str, num_super_epochs: int | None = None
    ) -> int:
        """Return the number of seeds of the rank that has most in any of some super-epochs; refuse ranks without any.

        Every rank sees the same counts, so all of them raise or none.

        Args:
            what: The number and name of the seeds, for an error.
            count: Maps the rank of each chunk, shape ``(num_chunks,)``, to the seeds of each rank.
            otherwise: What else than fewer ranks gives each rank seeds.
            num_super_epochs: How many are looked at where parts change. Default: the first 16.
        """
        looked_at, most = max(_HORIZON, self.turns) if num_super_epochs is None else num_super_epochs, 0
        for super_epoch in range(looked_at if self.sweep > 1 else 1):
            seeds = count(self.owner(super_epoch))
            if bool((seeds == 0).any()):
                when = f" in super-epoch {super_epoch}" if self.sweep > 1 else ""
                raise ValueError(
                    f"The chunks of rank {int(seeds.argmin())} of {self.num_parts} hold none of the {what}{when}, so "
                    f"it would have nothing to learn from: use fewer ranks, {otherwise}."
                )
            most = max(most, int(seeds.max()))
        return most


def bytes_held(graph: Graph) -> int:
    """Return the bytes that all of a graph takes where ranks hold it as parts."""
    return graph.num_bytes + BYTES_BESIDE * graph.num_nodes


def default_period(max_epochs: int | None, sweep: int) -> int:
    """Return the epochs of a super-epoch such that a whole sweep fits into the run; 1 without ``max_epochs``."""
    return max(1, (max_epochs or 0) // sweep)
