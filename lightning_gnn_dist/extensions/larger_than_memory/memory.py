"""Whether hosts have the memory of a fit, told before it begins.

of a host = ranks * (part + batches + beside) + files that are read through maps, of which all ranks share the pages
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from lightning_gnn_dist.checks import in_bytes
from lightning_gnn_dist.extensions.larger_than_memory.chunks import CHUNKS
from lightning_gnn_dist.extensions.larger_than_memory.placement import per_hop, wide_arrays
from lightning_gnn_dist.graph.graph import Graph, bytes_per_node
from lightning_gnn_dist.homes.residency import BYTES_BESIDE, Plan, bytes_held
from lightning_gnn_dist.homes.run import Host, RunContext
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.sampling.whole import WholePartSampler

log = logging.getLogger(__name__)

BESIDE = 200_000_000  # bytes of a rank, the most that was measured: edges being looked up, activations, gradients
_BYTES_OF_CHUNK = 4  # of each node: the chunk that it is in


@dataclass(frozen=True)
class Needs:
    """Bytes that a fit takes, beside what its processes hold when it begins.

    Attributes:
        held: Of each rank: its part and what it reads meanwhile, rows in a cache, and lists as long as the nodes.
        least: What it takes of that at least, whichever edges it keeps.
        batches: Batches of a rank that are made, and that wait.
        mapped: Files that are read through maps all the time. What of them does not stay in memory is read anew.
    """

    held: int
    least: int
    batches: int
    mapped: int

    @classmethod
    def of_part(cls, graph: Graph, part: int, settings: BatchSettings) -> Needs:
        """Return what a rank takes that holds so many bytes of a graph for good."""
        lists = _BYTES_OF_CHUNK * graph.num_nodes
        return cls(part + lists, part + lists, _bytes_of_batches(graph, part / max(1, graph.num_bytes), settings), 0)

    @classmethod
    def of_plan(cls, plan: Plan, settings: BatchSettings, *, is_cut: bool) -> Needs:
        """Return what ranks take of a graph in so many parts. Nodes that a boundary adds are not counted."""
        graph = plan.graph
        if not is_cut:
            mapped = 0 if graph.path is None else graph.num_bytes
            rows, cache = _bytes_of_rows(graph), settings.loading.cache_bytes
            held = 0 if cache is None else min(cache, rows)
            batches = _bytes_of_batches(graph, 1.0, settings)
            return cls(held, held, batches, mapped if cache is None else mapped - rows)
        share, lists = _share_held(plan), _BYTES_OF_CHUNK * graph.num_nodes
        without_edges = (bytes_per_node(graph) + BYTES_BESIDE) * graph.num_nodes
        part, least = (int(share * each) for each in (bytes_held(graph), without_edges))
        batches = _bytes_of_batches(graph, share, settings)
        return cls(part + lists, least + lists, batches, 0)

    @property
    def of_rank(self) -> int:
        return self.held + self.batches + BESIDE

    def of_host(self, ranks: int) -> int:
        """Return what all ranks of a host take together."""
        return ranks * self.of_rank + self.mapped

    def told(self, ranks: int) -> str:
        """Return what a host needs, in words."""
        of_rank = (
            f"{in_bytes(self.held)} for what it holds of the graph, {in_bytes(self.batches)} for batches and some "
            f"{in_bytes(BESIDE)} beside"
        )
        who = "its rank takes" if ranks == 1 else f"each of its {ranks} ranks takes"
        files = f", and {in_bytes(self.mapped)} are files that must stay cached" if self.mapped else ""
        return f"{in_bytes(self.of_host(ranks))} on a host: {who} {of_rank}{files}"

    @classmethod
    def check(cls, plan: Plan, running: RunContext, *, is_cut: bool, sweeps: bool) -> None:
        """Refuse a fit for which some host has too little memory, and tell of one that will be slow, or may be killed.

        All ranks raise or none.

        Args:
            plan: How the graph is cut.
            running: The run, with the hosts of all ranks.
            is_cut: Whether ranks hold parts, or batches are drawn from the whole graph.
            sweeps: Whether ranks could hold some chunks at a time.
        """
        needs = cls.of_plan(plan, running.settings, is_cut=is_cut)
        host = max(running.hosts, key=lambda each: needs.of_host(each.ranks) - each.free)
        if needs.of_host(host.ranks) <= host.free:
            return
        about = f"{needs.told(host.ranks)}. The host has {in_bytes(host.free)} left"
        ways = "; or ".join(_ways_out(plan.graph, host, running.settings, needs, sweeps=sweeps))
        if host.ranks * needs.least > host.free:
            least = in_bytes(host.ranks * needs.least)
            raise ValueError(
                f"This fit takes about {about}, and parts alone take {least}, so it would be killed: {ways}."
            )
        if running.rank == 0:
            log.warning(
                "This fit takes about %s, so it will be slow, as files are read again and again, or be killed: %s.",
                about,
                ways,
            )


def _ways_out(graph: Graph, host: Host, settings: BatchSettings, needs: Needs, *, sweeps: bool) -> Iterator[str]:
    rows, loading = _bytes_of_rows(graph), settings.loading
    beside, few = needs.batches // loading.bulk_size + BESIDE, " with Loading(bulk_size=1)"
    room = host.free // host.ranks - beside - _BYTES_OF_CHUNK * graph.num_nodes
    if sweeps and room > 2 * bytes_held(graph) // CHUNKS:
        yield f"hold some chunks at a time, Holding(Sweep(bytes={room})){few}"
    room = (host.free - graph.num_bytes + rows) // host.ranks - beside
    if needs.mapped and rows and loading.cache_bytes is None and room > 0:
        yield f"read features from files, Loading(cache_bytes={room}, bulk_size=1)"
    if any(rows.is_floating_point() and rows.element_size() > 2 for rows in _wide_rows(graph)):
        yield "save features as float16"
    if host.ranks > 1:
        yield "start fewer ranks on a host"
    yield "take more hosts"


def _bytes_of_rows(graph: Graph) -> int:
    """Return the bytes of rows that a cache may hold in place of all."""
    return sum(rows.nbytes for rows in _wide_rows(graph))


def _wide_rows(graph: Graph) -> Iterator[Tensor]:
    for arrays in graph.types.node_arrays.values():
        yield from wide_arrays(arrays).values()


def _bytes_of_batches(graph: Graph, share: float, settings: BatchSettings) -> int:
    """Return about what the rows of batches take that wait or are trained on, if ``share`` of the nodes is held."""
    sampler, loading = settings.training_sampler, settings.loading
    if isinstance(sampler, WholePartSampler):
        return 0
    held, degree = share * graph.num_nodes, graph.num_edges / max(1, graph.num_nodes)
    found = drawn = min(settings.batch_size, held)
    for most in per_hop(sampler, graph.types):
        drawn *= degree if most < 0 else min(most, degree)
        found += drawn
    distinct = -held * math.expm1(-found / held) if held else 0.0  # as if nodes were drawn at random
    bulks = 1 if loading.num_threads == 0 else 2  # one is trained on while the next one is made
    return int(bulks * loading.bulk_size * distinct * bytes_per_node(graph))


def _share_held(plan: Plan) -> float:
    """Return the share of all chunks in a rank's part, and in the next one that is read while it trains."""
    held = [plan.residency.held(turn, 0, plan.num_parts, plan.seed) for turn in range(plan.turns)]
    share = max(len(each.own) + len(each.others) for each in held) / plan.residency.num_chunks(plan.num_parts)
    return 2 * share if plan.sweep > 1 else share
