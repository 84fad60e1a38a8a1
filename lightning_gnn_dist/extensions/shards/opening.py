"""A folder of shards, as a data module is given it, and the edges of a split in it, as what is learned and judged.

Held edges lie with the shards of their receivers. Each rank gets what of its share lies in each of them, in the order
of shards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batches import Deal, Learning, OwnSeeds
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.data.task import NodeTask
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.link_sampler import HeldLinks, are_links, positions_where
from lightning_gnn_dist.extensions.links.negatives import Candidates
from lightning_gnn_dist.extensions.links.task import EdgeTask, without_labels
from lightning_gnn_dist.extensions.shards.home import ShardHome
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard
from lightning_gnn_dist.extensions.temporal.times import times_of_receivers
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.graph.value_check import check_arrays
from lightning_gnn_dist.homes.access import chosen_seed_type
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.run import RunContext
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.wire.channel import Channel

_WAY_OUT = "Copy both from one division."


@dataclass(frozen=True)
class Shards:
    """A folder that ``save_shards`` has written, or what of it one host needs."""

    path: Path

    @property
    def tables(self) -> Tables | None:
        """What became of the tables of a database."""
        return store.tables_at(self.path)

    def nodes(
        self,
        running: RunContext,
        boundary: Boundary,
        coverage: Coverage | None,
        *,
        task: str | None,
        partitioner: object,
        holding: Holding,
    ) -> NodeTask:
        """Return its nodes as what is learned; of a graph with types those of one type."""
        self.refuse_to_cut(partitioner, holding)
        bounds = Bounds.read(self.path)
        kind = chosen_seed_type(bounds.types, task, f"that of {self.path}")
        if bounds.links is not None:
            raise ValueError(
                f"{self.path} holds a split ({bounds.links}): learn edges with LinkDataModule(path), or for nodes "
                "divide the graph that was split, which has its masks."
            )
        bounds = bounds if kind is None else replace(bounds, types=bounds.types.with_seeds(kind))
        return NodeTask(ShardHome(self.path, bounds, running, boundary, coverage))

    @property
    def links(self) -> LinkBounds:
        """Which edges it holds."""
        bounds = self._bounds_of_links()
        assert bounds.links is not None
        return bounds.links

    def edges(self, running: RunContext, boundary: Boundary, num_negatives: int) -> ShardEdges:
        """Return its edges as what is learned."""
        _check_settings_of_edges(running.settings, boundary)
        bounds, links = self._bounds_of_links(), self.links
        hidden = None if links.labels is None else partial(without_labels, links)
        home = ShardHome(self.path, bounds, running, boundary, None, hidden)
        return ShardEdges(home, links, num_negatives)

    def refuse_to_cut(self, partitioner: object, holding: Holding) -> None:
        """Refuse to cut a graph that is in shards."""
        for name, value in (("partitioner", partitioner), ("holding", None if holding == Holding() else holding)):
            if value is not None:
                raise ValueError(
                    f"{self.path} holds shards, and a graph is cut when it is divided: leave {name}={shown(value)} "
                    "out, or give every host the whole graph."
                )

    def _bounds_of_links(self) -> Bounds:
        """Return where shards of a split begin; of a graph with types the type of the receivers is chosen."""
        bounds = Bounds.read(self.path)
        if bounds.links is None:
            raise ValueError(
                f"{self.path} holds shards of a graph whose edges are not split: divide a split, as in "
                "save_shards(split_edges(graph), partition, path), or learn from its nodes with PartitionedDataModule."
            )
        kind, types = bounds.links.edge_type, bounds.types
        return bounds if kind is None or types.seeds is not None else replace(bounds, types=types.with_seeds(kind[2]))


def _check_settings_of_edges(settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse settings that do not suit a split in shards."""
    if isinstance(settings.sampler, WholePartSampler) and boundary.sees_whole_graph:
        raise ValueError(
            "WholePartSampler takes a whole part for each batch, and with boundary=Fetch() that is the whole graph: "
            "take NeighborSampler, or boundary=Isolated()."
        )


class ShardEdges(EdgeTask):
    """The edges of a split in shards.

    Args:
        home: Where the graph lives.
        links: What is asked of them.
        num_negatives: False receivers for each that is learned.
    """

    home: ShardHome
    probes = False  # a rank knows the ends of its own held edges alone
    _way_to_hold = "divide split_edges(graph, {name}=0.1), which holds some back."

    def check_of_all(self, rows: Graph) -> None:
        _ = self._candidates  # now, as all ranks are here

    def begin_fit(self) -> None:
        counts = self.home.count(len(self._own()), len(self._marked))
        if bool((counts == 0).any()):
            rank, inside = int(counts.argmin()), not self.home.boundary.sees_whole_graph
            where, other = ("inside", "boundary=Fetch(), ") if inside else ("that lead to", "")
            raise ValueError(
                f"There are no edges to learn {where} shard {rank % self.home.bounds.num_shards} of {self.home.path} "
                f"for rank {rank} of {len(counts)}: take {other}another partition, or fewer shards or ranks."
            )

    def rows(self) -> Graph:
        return self.home.shard.rows

    def candidates(self) -> Candidates:
        return self._candidates

    @cached_property
    def _candidates(self) -> Candidates:
        """The nodes that false receivers are drawn from; by time, since when they are there. Collective."""
        rows, receivers, times = self.rows(), self.ends.receivers, None
        kind = self.links.receiver_type
        if (time := self.links.time) is not None:
            self.home.graph().order_by(time)
            if times_of_receivers(rows, time, kind) is not None:
                times = self.home.graph().times_of_all_nodes(rows.types.node_types.index(kind), time)
        return Candidates.of(receivers, times, receivers.start)

    @cached_property
    def _held(self) -> dict[str, HeldLinks]:
        """Those that were asked for."""
        return {}

    def held(self, name: str) -> HeldLinks:
        if name not in self._held:
            links, run = self.links, self.home.running
            shard, channel, starts = self.home.shard, self.home.graph().channel, links.held[name]
            copy, num_copies = run.rank // channel.size, run.num_ranks // channel.size
            share, numbers = own_share(held_of_shard(shard, links, name), starts, channel, copy, num_copies)
            self._held[name] = self.held_links(*share, numbers.start)
        return self._held[name]

    def first_edge(self) -> int:
        """Return where the shard's first edge would stand in the whole graph, if those of its type stood before it.

        Of a graph with types, the rows of each node type follow each other in the whole graph, shard after shard.
        """
        shard, types = self.home.shard, self.home.types
        if self.links.edge_type is None:
            return shard.first_edge
        kind = self.links.edge_type[2]
        before = types.node_types[: types.node_types.index(kind)]
        first = 0
        for (_, _, target), starts in zip(types.edge_types, types.edges, strict=True):
            first += int(starts[-1]) if target in before else int(starts[shard.index]) if target == kind else 0
        return first - int(shard.rows.indptr[shard.rows.types.nodes_of(kind).start])

    def most(self) -> int:
        return self.home.most_seeds()

    def of_corrections(self) -> OwnSeeds:
        return OwnSeeds(self._marked[self.home.of_copy()], self.home.num_marked)

    def learned(self, part: Graph, num_batches: int, seed: int) -> Learning:
        seeds, sees_all = self._own(), self.home.boundary.sees_whole_graph
        if self.checks_values:
            check_arrays(self.home.shown(part))
        drawn = self.home.running.settings.training_sampler
        sampler = self.across(drawn) if sees_all else self.around_part(part, self._is_own(part))
        return Learning(self.home.training_source(part, sampler), Deal(seeds, num_batches, seed))

    def _own(self) -> Tensor:
        """Return the positions of what this rank learns: in the whole graph, or without ``Fetch()`` in its part."""
        if self.home.boundary.sees_whole_graph:
            return self._marked[self.home.of_copy()]
        part = self.home.parts.current()
        return self.positions(part, self._is_own(part).to(torch.int64) - 1)[self.home.of_copy()]

    @cached_property
    def _marked(self) -> Tensor:
        """Where all edges into the own shard that are learned stand in the whole graph, increasing."""
        links, rows, graph = self.links, self.rows(), self.home.graph()

        def is_chosen(senders: Tensor, receivers: Tensor) -> Tensor:
            ends = senders, graph.ids_of_own(receivers)
            if links.undirected:  # ids grow with shards: the last one would learn all edges between them
                is_odd = (ends[0] + ends[1]) % 2 == 1
                ends = torch.where(is_odd, ends[1], ends[0]), torch.where(is_odd, ends[0], ends[1])
            return are_links(*ends, links.undirected, loops=links.labels is not None)

        found = positions_where(rows, is_chosen, self.ends.kinds[0])
        return self.of_labels_and_times(rows, found) + self.first_edge()

    def _is_own(self, part: Graph) -> Tensor:
        """Return which nodes of a part are the shard's own."""
        if part.types.have_names:
            return part.node_arrays["train_mask"]
        return torch.arange(part.num_nodes) < self.rows().num_nodes


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
