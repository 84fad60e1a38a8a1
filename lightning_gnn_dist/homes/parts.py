"""The parts of a rank: read into RAM with local ids, and switched from super-epoch to super-epoch."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batches import THREAD_NAME
from lightning_gnn_dist.boundary.boundary import Boundary, Isolated
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.graph.graph import Graph, bytes_per_edge, bytes_per_node, reopened, typed_graph
from lightning_gnn_dist.graph.rows import Lookup, count_edges, degrees_of, row_pieces
from lightning_gnn_dist.graph.typed.build import induced
from lightning_gnn_dist.homes.access import OnePart
from lightning_gnn_dist.homes.residency import Plan, ReadChunks
from lightning_gnn_dist.partition.base import learned_from

log = logging.getLogger(__name__)


class RowSource(ABC):
    """Where the rows of a part come from.

    Attributes:
        sizes: A graph as large as the whole one, for a boundary to count by.
    """

    sizes: Graph

    @abstractmethod
    def edges_into(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each edge into some nodes, the number of the node among them, and the sender, piece by piece."""

    @abstractmethod
    def among(self, nodes: Tensor, hops: list[Tensor]) -> Graph:
        """Return the graph among ``nodes``, of which those of some hops alone receive."""


def around(
    source: RowSource, residents: Tensor, own: Tensor, boundary: Boundary, seed: int
) -> tuple[Graph, Tensor, Tensor]:
    """Return a part in RAM, its nodes, and which of them the rank learns from.

    Args:
        source: Has the rows.
        residents: The nodes of the part without what the boundary brings along.
        own: Those of them that the rank learns from.
        boundary: Which nodes come along: those of the last hop receive nothing.
        seed: Decides everything random.
    """
    found = boundary.around(source.sizes, residents, source.edges_into, seed)
    _check_hops(boundary, found, residents, source.sizes.num_nodes)
    hops = [residents, *found]
    nodes = torch.cat(hops)
    if source.sizes.types.have_names:
        nodes = nodes.sort().values  # so that those of one type follow each other
    return source.among(nodes, hops[: max(1, len(hops) - 1)]), nodes, Lookup(own).contains(nodes)


def _check_hops(boundary: Boundary, hops: object, residents: Tensor, num_nodes: int) -> None:
    """Refuse what is no list of outside nodes, as ``around`` of a boundary returns one."""
    name = f"{type(boundary).__name__}.around()"
    if not isinstance(hops, list | tuple) or not all(map(_is_vector_of_ids, hops)):
        got = f"a list of {', '.join(map(shown, hops))}" if isinstance(hops, list | tuple) else shown(hops)
        raise TypeError(f"{name} must return a list of vectors of int64, the ids of each hop, got {got}.")
    for number, hop in enumerate(hops, 1):
        if hop.numel() and not 0 <= int(hop.min()) <= int(hop.max()) < num_nodes:
            raise ValueError(
                f"{name} must return ids of the {num_nodes:,} nodes of the graph, and those of its hop {number} go "
                f"from {int(hop.min())} to {int(hop.max())}."
            )
    nodes = torch.cat([residents, *hops]).sort().values if hops else residents[:0]
    if (again := nodes[1:][nodes[1:] == nodes[:-1]]).numel():
        raise ValueError(
            f"{name} must return each outside node once, in the first hop that reaches it, and no node of the part, "
            f"got node {int(again[0])} again."
        )


def _is_vector_of_ids(hop: object) -> bool:
    return isinstance(hop, Tensor) and hop.dim() == 1 and hop.dtype == torch.int64


class ReadPart(NamedTuple):
    """What a rank trains on in a super-epoch.

    Attributes:
        graph: Its nodes and the edges among them: the rank's own nodes first, then others that send messages. Of a
            typed graph, the nodes are in the order of their ids.
        bytes_read: Bytes that were read from the whole graph.
        is_resident: Which of its nodes the boundary did not add.
        seconds: How long reading and building the part took.
    """

    graph: Graph
    bytes_read: int
    is_resident: Tensor
    seconds: float


class _OnHost(RowSource):
    """Rows of a graph on this host, read where they are, twice if a boundary looks at them: nothing is held.

    Args:
        graph: The whole graph.

    Attributes:
        bytes_read: What the part took of it.
    """

    def __init__(self, graph: Graph) -> None:
        self.sizes, self.bytes_read = graph, 0

    def edges_into(self, nodes: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        graph, done = self.sizes, 0
        for some, at in row_pieces(graph.indptr, nodes):
            rows = torch.arange(done, done + some.numel()).repeat_interleave(degrees_of(graph.indptr, some))
            yield rows, graph.indices[at].to(torch.int64)
            done += some.numel()

    def among(self, nodes: Tensor, hops: list[Tensor]) -> Graph:
        graph, receives = self.sizes, Lookup(torch.cat(hops)).contains(nodes)
        of_edges = count_edges(graph.indptr, nodes[receives]) * (graph.indices.element_size() + bytes_per_edge(graph))
        self.bytes_read = nodes.numel() * bytes_per_node(graph) + of_edges
        return typed_graph(*induced(graph.indptr, graph.indices, graph.types, nodes, receives), node_arrays={})


class Parts(OnePart):
    """What a rank holds in any super-epoch: the running part, and if parts change, the next one, read meanwhile.

    A part depends on the arguments alone, so ranks need not communicate.

    Args:
        plan: How the whole graph, usually a memory map, is cut, and who holds what of it.
        rank: Whose parts they are.
        boundary: Which nodes around a part come along.
        coverage: Writes each node's weight to ``node_arrays["coverage"]``. With None there are no weights.
        in_background: Whether a thread reads ahead. Without it, a part is read when it is due.
    """

    def __init__(
        self, plan: Plan, rank: int, boundary: Boundary, coverage: Coverage | None, *, in_background: bool = False
    ) -> None:
        self.plan, self._rank, self._boundary, self._coverage = plan, rank, boundary, coverage
        self._changes = plan.sweep > 1
        self._thread = ThreadPoolExecutor(1, f"{THREAD_NAME}.parts") if in_background and self._changes else None
        self._current: tuple[int, ReadPart] | None = None
        self._next: tuple[int, Future[ReadPart]] | None = None
        counted = "data/switches", "data/switch_bytes", "data/switch_waited_seconds"
        self.figures: dict[str, float] = dict.fromkeys(counted, 0.0)
        if plan.turns > 1:
            self.figures["data/sweep_bytes"] = 0.0  # read since the epoch began, which goes through all chunks

    def at(self, super_epoch: int) -> Graph:
        super_epoch = super_epoch if self._changes else 0
        if self._current is None or self._current[0] != super_epoch:
            started, (ahead, self._next) = time.perf_counter(), (self._next, None)
            part = ahead[1].result() if ahead is not None and ahead[0] == super_epoch else self.read(super_epoch)
            self._record(super_epoch, part, time.perf_counter() - started)
            self._current = super_epoch, part
            if self._thread is not None:
                self._next = super_epoch + 1, self._thread.submit(self.read, super_epoch + 1)
        return self._current[1].graph

    def current(self) -> Graph:
        return self.at(self._current[0] if self._current else 0)

    @property
    def uncovered(self) -> tuple[int, int]:  # type: ignore[override]
        if self._coverage is None or self._coverage.level == "batch":
            return 0, 0
        coverage = (part := self.current()).node_arrays["coverage"][part.split("train")]
        return int((coverage == 0).sum()), coverage.numel()

    @property
    def is_resident(self) -> Tensor:
        self.current()
        assert self._current is not None
        return self._current[1].is_resident

    def read(self, super_epoch: int) -> ReadPart:
        """Return the part of a super-epoch."""
        started, plan = time.perf_counter(), self.plan
        # A memory map for this call alone, so that the pages it reads are freed after the copy.
        graph = reopened(plan.graph)
        if graph.fingerprint != plan.graph.fingerprint:
            raise ValueError(
                f"{graph.path} holds another graph than when the fit began: graphs that are trained on must stay "
                "as they are. Write the other one to another path."
            )
        held = plan.residency.held(super_epoch, self._rank, plan.num_parts, plan.seed)
        is_alone = isinstance(self._boundary, Isolated) and not held.others and not plan.holding.extra_nodes
        if is_alone and self._read_chunks is not None:
            part, nodes, bytes_read = self._read_chunks(held.own)
            is_own = is_resident = torch.ones(nodes.numel(), dtype=torch.bool)
        else:
            residents, own = plan.residents(self._rank, super_epoch)
            source = _OnHost(graph)
            part, nodes, is_own = around(source, residents, own, self._boundary, plan.seed)
            bytes_read, is_resident = source.bytes_read, Lookup(residents).contains(nodes)
        part.node_arrays["n_id"] = nodes
        part.node_arrays["train_mask"] = is_own & learned_from(part, plan.graph.types.seeds)
        if self._coverage is not None:
            part.node_arrays["coverage"] = self._coverage.weights(part, degrees_of(graph.indptr, nodes), is_own)
        return ReadPart(part, bytes_read, is_resident, time.perf_counter() - started)

    @cached_property
    def _read_chunks(self) -> ReadChunks | None:
        """What reads chunks of a graph that is saved chunk by chunk, if it is cut so."""
        reader = getattr(self.plan.partitioner, "reader", None)
        return None if reader is None else reader(self.plan.graph)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._thread = self._next = self._current = None

    def _record(self, super_epoch: int, part: ReadPart, waited: float) -> None:
        figures, graph, turns = self.figures, part.graph, self.plan.turns
        figures["data/switches"] += self._current is not None
        figures["data/switch_bytes"] += part.bytes_read
        figures["data/switch_waited_seconds"] += waited
        if turns > 1:
            before = figures["data/sweep_bytes"] if super_epoch % turns else 0.0
            figures["data/sweep_bytes"] = before + part.bytes_read
        if "coverage" in graph.node_arrays:
            figures["data/coverage"] = float(graph.node_arrays["coverage"][graph.split("train")].mean())
        log.info(
            "Super-epoch %d: %d nodes, %d edges; read %.1f MB in %.2f s, of which training waited %.2f s",
            super_epoch,
            graph.num_nodes,
            graph.num_edges,
            part.bytes_read / 1e6,
            part.seconds,
            waited,
        )
