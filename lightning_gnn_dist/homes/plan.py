"""How a graph is cut for any number of ranks, and which of them holds what."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.auto import Auto, allowed_by, chosen, chosen_here
from lightning_gnn_dist.boundary.boundary import Boundary, Isolated, check_seed_hops
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import brief, check_callable, check_instance
from lightning_gnn_dist.graph.digest import sampled_digest, sketches
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.homes.parts import Holder, PartReader
from lightning_gnn_dist.homes.residency import Fixed, Holding, KeepsChunks, Residency, held_by_all
from lightning_gnn_dist.homes.running import Running
from lightning_gnn_dist.partition.base import Partition, Partitioner
from lightning_gnn_dist.partition.cache import cached_partition
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.learned import learned_from
from lightning_gnn_dist.wire.memory import memory_bytes

_LOOKED_AT = 4  # super-epochs whose parts are counted to choose a boundary
_HORIZON = 16  # super-epochs whose largest part decides the number of batches of a pass, however long the run
_LONGEST = 1000  # super-epochs, at most, that are searched for ranks with nothing to learn from

CountSeeds = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PartPlan:
    """All that decides the parts of a graph. It is the same on all ranks, so they need not communicate.

    Args:
        graph: The whole graph.
        partitioner: Cuts the graph into chunks; or a ready partition. None: what suits the strategy and the graph's
            size, see ``suited``.
        holding: Which chunks a rank holds, and which random nodes of others.
        boundary: How edges between parts are treated.
        coverage: Weighs nodes by the share of their neighbourhood in the part. With None there are no weights.
        seed: Decides everything random.
    """

    graph: Graph
    partitioner: Partitioner | Partition | None
    holding: Holding
    boundary: Boundary
    coverage: Coverage | None
    seed: int
    _partitions: dict[int, Partition] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.partitioner, Partition | None):
            check_callable(
                "partitioner", self.partitioner, "an object such as MetisPartitioner(), or a Partition", "graph", 2, 0
            )
        check_instance("holding", self.holding, Holding, "an object such as Holding(Rotate())")
        if (self.boundary.sees_whole_graph or self.boundary.exchanges) and not self.holding.is_one_chunk:
            name = type(self.boundary).__name__
            raise ValueError(f"holding says what a part holds, and boundary={name}() sees the whole graph: choose one.")
        if self.holding.per == "host" and (self.boundary.exchanges or self.boundary.keeps_rows):
            raise ValueError(
                f'boundary={brief(self.boundary)} exchanges rows between ranks with a part each, and per="host" gives '
                "the ranks of a host one part: choose one."
            )
        if self.boundary.seed_hops:
            check_seed_hops(self.boundary, is_typed=have_names(self.graph.types))
        if self.boundary.seed_hops and not self.holding.is_one_chunk:
            raise ValueError(
                f"boundary={brief(self.boundary)} is for parts for good, without extra nodes: leave seed_hops out, or "
                "holding."
            )
        residency = self.residency.of_graph(self.graph)
        object.__setattr__(self, "holding", replace(self.holding, residency=residency))
        if self.residency.turns(1) > 1:
            self._take_turns()
        self.boundary.check_fits(self.graph)

    def _take_turns(self) -> None:
        """Leave what is around the chunks of a turn alone."""
        if isinstance(self.boundary, Auto):
            object.__setattr__(self, "boundary", Isolated())
        if not isinstance(self.boundary, Isolated):
            raise ValueError(
                f"{brief(self.residency)} reads each chunk once in an epoch, and boundary={brief(self.boundary)} would "
                "read what is around it as well, or compute it: take boundary=Isolated(), or leave it out."
            )

    @property
    def residency(self) -> Residency:
        return self.holding.residency

    def most_on_host(self, num_parts: int) -> int:
        """Return how many of the parts may lie on one host."""
        return 1 if self.holding.per == "host" else num_parts

    def suited(self, *, to_averages: bool, is_told: bool) -> PartPlan:
        """Return the plan with a partitioner, also where none was named.

        Args:
            to_averages: Whether models that learn from different parts are averaged. Parts for good are then cut so
                that they look alike.
            is_told: Whether the log says why, if it is not METIS.
        """
        if self.partitioner is not None:
            return self
        if (own := self.residency.partitioner(self.graph)) is not None:
            return replace(self, partitioner=own)
        look_alike = to_averages and isinstance(self.residency, Fixed)
        how = {"look_alike": look_alike, "is_told": is_told}
        return replace(self, partitioner=default_partitioner(self.graph.num_edges, memory_bytes(), **how))

    def partition(self, world_size: int) -> Partition:
        """Return the partition for ``world_size`` ranks, from the cache or computed and put there."""
        assert self.partitioner is not None, "not suited"
        num_chunks = self.residency.num_chunks(world_size)
        if isinstance(self.partitioner, Partition):
            _check_fits(self.partitioner, num_chunks, world_size, self.graph)
            return self.partitioner
        if num_chunks not in self._partitions:
            if isinstance(self.partitioner, KeepsChunks):  # the graph itself is where they are kept
                found = self.partitioner(self.graph, num_chunks, self.seed)
            else:
                found = cached_partition(self.graph, self.partitioner, num_chunks, self.seed, self.holding.cache_dir)
            self._partitions[num_chunks] = found
        return self._partitions[num_chunks]

    def by_rank(self, world_size: int) -> Partition:
        """Return the partition that maps each node to the rank that learns from it in super-epoch 0, or in epoch 0."""
        partition = self.partition(world_size)
        owner = torch.empty(partition.num_parts, dtype=torch.int32)
        for turn in range(self.residency.turns(world_size)):
            for rank in range(world_size):
                owner[list(self.residency.held(turn, rank, world_size, self.seed).own)] = rank
        return Partition(owner[partition.assignment], world_size)

    def digests(self, world_size: int) -> dict[str, Any]:
        """Return digests of what ranks must have alike beside edges and masks, which the fingerprint covers.

        ``arrays`` covers labels and other integer arrays; ``values`` holds two numbers for arrays of fractions, such as
        features; ``parts`` covers every node's chunk, and which ranks hold it in the first two super-epochs.
        """
        arrays = {name: array for name, array in self.graph.arrays.items() if name not in ("indptr", "indices")}
        parts = hashlib.blake2b(digest_size=16)
        if world_size > 1:
            held = [held_by_all(self.residency, super_epoch, world_size, self.seed) for super_epoch in range(2)]
            parts.update(f"{self.seed} {held}".encode())
            parts.update(self.partition(world_size).assignment.contiguous().numpy().data)
        return {"arrays": sampled_digest(arrays), "values": sketches(arrays), "parts": parts.hexdigest()}

    def reader(self, rank: int, world_size: int, boundary: Boundary, coverage: Coverage | None) -> PartReader:
        """Return the reader of one rank's parts. ``boundary`` is what the plan's has come to, as ``coverage`` is."""
        return PartReader(
            self.graph,
            self.partition(world_size),
            self.holding,
            rank,
            world_size,
            self.seed,
            boundary,
            coverage,
            self.partitioner.reader(self.graph) if isinstance(self.partitioner, KeepsChunks) else None,
        )

    def parts(self, rank: int, world_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what a rank holds without a halo, and what of it it learns from, in the first super-epochs."""
        reader, is_seed = self.reader(rank, world_size, self.boundary, None), self._is_seed()
        for super_epoch in range(min(self.residency.sweep(world_size), _LOOKED_AT)):
            residents, num_own = reader.residents(super_epoch)
            own = residents[:num_own]
            yield residents, own[is_seed[own]]

    def learned_by_ranks(self, world_size: int) -> Tensor:
        """Return how many nodes each rank learns from in super-epoch 0; all count where no mask tells."""
        return self.by_rank(world_size).assignment[self._is_seed()].bincount(minlength=world_size)

    def _is_seed(self) -> Tensor:
        return learned_from(self.graph, self.graph.types.seeds)

    def chosen(
        self, asked: Auto, holder: Holder, running: Running, *, offered: Boundary | None
    ) -> tuple[Boundary, str]:
        """Return what ``"auto"`` is in the fit that begins, and a line for the log. Collective."""
        allowed, parts = allowed_by(asked, self.most_on_host(holder.num_parts)), self.parts(*holder[:2])
        steps = running.steps(self.learned_by_ranks(holder.num_parts).tolist())
        return chosen(allowed, self.graph, parts, steps, running.device, offered=offered)

    def chosen_here(self, asked: Auto, num_parts: int, running: Running) -> Boundary:
        """Return what ``"auto"`` would be on ranks of this host."""
        parts = [self.parts(each, num_parts) for each in range(num_parts)]
        steps = running.steps(self.learned_by_ranks(num_parts).tolist())
        return chosen_here(allowed_by(asked, self.most_on_host(num_parts)), self.graph, parts, steps)

    def most_seeds(self, world_size: int) -> int:
        """Return the number of training nodes of the rank that has most in any of the first 16 super-epochs.

        Every rank sees the same counts, so all of them raise or none.
        """
        if world_size == 1 and self.residency.turns(world_size) == 1:
            return train_nodes(self.graph).numel()
        return self.most(world_size, *self._train_nodes_of_ranks(world_size))

    def check_run(self, world_size: int, num_super_epochs: float) -> None:
        """Refuse a run in which some rank has no training node in some super-epoch. All ranks raise or none."""
        if self.residency.sweep(world_size) > 1:
            of_ranks = self._train_nodes_of_ranks(world_size)
            for super_epoch in range(math.ceil(min(num_super_epochs, _LONGEST))):
                self._seeds_of_ranks(super_epoch, world_size, *of_ranks)

    def share_held(self, world_size: int) -> float:
        """Return the share of all chunks in a rank's part, and in the next one that is read while it trains."""
        turns = range(self.residency.turns(world_size))
        held = [self.residency.held(turn, 0, world_size, self.seed) for turn in turns]
        share = max(len(each.own) + len(each.others) for each in held) / self.residency.num_chunks(world_size)
        return share if self.residency.sweep(world_size) == 1 else 2 * share

    def most(self, world_size: int, what: str, count: CountSeeds, otherwise: str) -> int:
        """Return the number of seeds of the rank that has most in any of the first 16 super-epochs.

        Args:
            world_size: How many ranks there are.
            what: The number and name of the seeds, for an error.
            count: Maps the rank of each chunk, shape ``(num_chunks,)``, to the seeds of each rank.
            otherwise: What else than fewer ranks gives each rank seeds.
        """
        horizon = max(_HORIZON, self.residency.turns(world_size))
        super_epochs = range(horizon if self.residency.sweep(world_size) > 1 else 1)
        return max(int(self._seeds_of_ranks(s, world_size, what, count, otherwise).max()) for s in super_epochs)

    def _train_nodes_of_ranks(self, world_size: int) -> tuple[str, CountSeeds, str]:
        partition, nodes = self.partition(world_size), train_nodes(self.graph)
        per_chunk = torch.bincount(partition.assignment[nodes], minlength=partition.num_parts)
        otherwise = 'MetisPartitioner(balance="train"), RandomPartitioner() or more super-nodes'
        if self.residency.turns(world_size) > 1:
            otherwise = "hold more chunks at a time"

        def count(owner: Tensor) -> Tensor:
            is_held = owner >= 0
            return torch.bincount(owner[is_held], per_chunk[is_held], world_size)

        return f"{nodes.numel()} training nodes", count, otherwise

    def _seeds_of_ranks(
        self, super_epoch: int, world_size: int, what: str, count: CountSeeds, otherwise: str
    ) -> Tensor:
        seeds = count(self.owner(super_epoch, world_size))
        if bool((seeds == 0).any()):
            when = f" in super-epoch {super_epoch}" if self.residency.sweep(world_size) > 1 else ""
            raise ValueError(
                f"The chunks of rank {int(seeds.argmin())} of {world_size} hold none of the {what}{when}, so it would "
                f"have nothing to learn from: use fewer ranks, {otherwise}."
            )
        return seeds

    def owner(self, super_epoch: int, world_size: int) -> Tensor:
        """Return the rank that learns from each chunk, -1 of one that nobody holds: int64, shape ``(num_chunks,)``."""
        owner = torch.full((self.residency.num_chunks(world_size),), -1)
        for rank, held in enumerate(held_by_all(self.residency, super_epoch, world_size, self.seed)):
            owner[list(held.own)] = rank
        return owner


def train_nodes(graph: Graph) -> Tensor:
    """Return the nodes that are learned; refuse a graph without any."""
    seeds = graph.split("train")
    if not seeds.numel():
        raise ValueError("train_mask marks no node: there is nothing to learn from.")
    return seeds


def _check_fits(partition: Partition, num_chunks: int, world_size: int, graph: Graph) -> None:
    """Refuse a ready partition of another graph, or with a wrong number of chunks for these ranks."""
    if partition.num_parts != num_chunks or partition.assignment.numel() != graph.num_nodes:
        raise ValueError(
            f"The partition has {partition.num_parts} parts of {partition.assignment.numel()} nodes in all, but "
            f"{world_size} ranks hold {num_chunks} parts of a graph of {graph.num_nodes} nodes: give a partitioner "
            "instead, or as many parts."
        )
