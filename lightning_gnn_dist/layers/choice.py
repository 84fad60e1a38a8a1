"""How an evaluation is done at the least cost: how many seeds at once, and whether layer by layer for all of them.

    full neighbourhoods:  each batch computes the inner layers of all nodes that it reaches, again for every batch
    layer by layer:       each layer once for the nodes that any seed reaches, shared by the ranks

Both give the same rows. What they cost is counted, not guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_gnn_dist.batches.batches import batches_of_ranks, slice_of
from lightning_gnn_dist.checks import is_limit
from lightning_gnn_dist.engine.sample import BatchKey, graph_is_damaged
from lightning_gnn_dist.engine.subgraph_kernels import reach
from lightning_gnn_dist.graph.graph import Graph, bytes_per_edge, numbers_per_node
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.layers.through_layers import BYTES_OF_AN_EDGE, COPIES
from lightning_gnn_dist.sampling.base import Sampler

_LOOKS = 5  # batches whose neighbourhoods are counted, spread over all
_MARGIN = 1.1  # a batch may reach further than those, and a pass has work of its own
_TREES = 64  # trees by time that are measured, spread over all seeds
_TREES_MARGIN = 2.0  # those of a batch may be larger than these

ALL = np.iinfo(np.int64).max
EDGES_OF_A_NODE = 8  # a row of a node costs a layer about as much as so many edges


class Reach(NamedTuple):
    """The neighbourhood of some seeds.

    Attributes:
        nodes: How many nodes lie within 0, 1, 2 ... hops.
        edges: How many edges lead to nodes within 0, 1 ... hops: those of the innermost layer, of the one before, ...
    """

    nodes: list[int]
    edges: list[int]

    @property
    def work(self) -> float:
        """What the layers of a model cost on it, in edges."""
        return float(sum(self.edges) + EDGES_OF_A_NODE * sum(self.nodes[:-1]))


class Neighbourhoods:
    """Counts the neighbourhoods of a graph. It holds 9 bytes for each node.

    Args:
        graph: The graph.
        num_hops: The hops of a neighbourhood.
    """

    def __init__(self, graph: Graph, num_hops: int) -> None:
        self._graph, self._num_hops = graph, num_hops
        self._found = np.zeros(graph.num_nodes, np.bool_)
        self._queue = np.empty(graph.num_nodes, np.int64)

    def of(self, seeds: Tensor, most_edges: int = ALL) -> Reach:
        """Count the neighbourhood of distinct seeds; stop soon after ``most_edges`` edges."""
        nodes, edges = np.zeros(self._num_hops + 1, np.int64), np.zeros(self._num_hops, np.int64)
        graph = self._graph
        csr = graph.indptr.numpy(), graph.indices.numpy()
        if not reach(*csr, seeds.numpy(), most_edges, self._found, self._queue, nodes, edges):
            raise graph_is_damaged(graph)
        return Reach(nodes.tolist(), edges.tolist())

    def hops(self, seeds: Tensor) -> list[Tensor]:
        """Return the nodes 0, 1, 2 ... hops away from distinct seeds."""
        ends = [0, *self.of(seeds).nodes]
        return [torch.from_numpy(self._queue[start:end].copy()) for start, end in pairwise(ends)]

    def senders(self, nodes: Tensor) -> Tensor:
        """Return these nodes and all that send to them, in increasing order."""
        return torch.cat(self.hops(nodes)[:2]).sort().values


class Targets(NamedTuple):
    """What a batch of an evaluation asks for.

    Attributes:
        nodes: Its seeds: in increasing order, if they are of several types.
        others: What else the batch has, by name.
        edge_type: In a graph with types the type of the edges that it asks for, if it asks for edges.
    """

    nodes: Tensor
    others: Mapping[str, Any] = {}
    edge_type: EdgeType | None = None


@dataclass(frozen=True)
class Judged:
    """What all ranks evaluate together.

    Attributes:
        ids: The ids of nodes or numbers of held edges, in the order in which ranks share them.
        num_ranks: How many ranks share them.
        whose: Says of how many there are, for an error.
        sampler: Returns what draws batches around them, with so many hops more than an evaluation takes.
        targets: Returns what a batch of some of them asks for.
        dealt: Returns the sampler for so many batches.
    """

    ids: Tensor | range
    num_ranks: int
    whose: str
    sampler: Callable[[int], Sampler]
    targets: Callable[[Tensor], Targets] = Targets
    dealt: Callable[[Sampler, int], Sampler] = lambda sampler, _: sampler

    def check_shared(self, num_ranks: int) -> None:
        """Refuse fewer of them than there are ranks."""
        if len(self.ids) < num_ranks:
            raise ValueError(
                f"{self.whose}, but {num_ranks} ranks share the evaluation: mark more, take "
                "fewer ranks, or leave it out, limit_val_batches=0."
            )

    @property
    def most(self) -> int:
        """How many of them a rank has at most."""
        return -(-len(self.ids) // self.num_ranks)

    def num_batches(self, batch_size: int) -> int:
        """Return the batches of each rank."""
        return batches_of_ranks(len(self.ids), self.num_ranks, batch_size)

    def nodes_of(self, ids: Tensor) -> Tensor:
        """Return the distinct nodes whose rows some of them need."""
        nodes: Tensor = self.targets(ids).nodes.unique()
        return nodes

    def at(self, places: Tensor) -> Tensor:
        """Return those at some places."""
        return places + self.ids.start if isinstance(self.ids, range) else self.ids[places]

    def share(self, place: int) -> Tensor:
        """Return one of as many equal shares of them as there are ranks."""
        places = share_of(len(self.ids), self.num_ranks, place)
        return self.at(torch.arange(places.start, places.stop))

    def some(self, num_batches: int) -> Iterator[Tensor]:
        """Yield the nodes of a few batches, if every rank has so many."""
        total = num_batches * self.num_ranks
        for number in sorted({(total - 1) * look // (_LOOKS - 1) for look in range(_LOOKS)}):
            share, batch = self.share(number // num_batches), number % num_batches
            yield self.nodes_of(share[slice_of(share.numel(), num_batches, batch)])

    @cached_property
    def nodes(self) -> Tensor:
        """The distinct nodes whose rows are needed for all of them."""
        return self.nodes_of(self.at(torch.arange(len(self.ids))))


def share_of(count: int, num_ranks: int, place: int) -> range:
    """Return which of so many things are in one of the equal shares, of which the first ones may have one more."""
    size, more = divmod(count, num_ranks)
    first = place * size + min(place, more)
    return range(first, first + size + (place < more))


class Counter:
    """Counts what the batches of an evaluation cost, before they are made.

    Args:
        graph: The whole graph.
        num_hops: Hops that a batch samples.
        module: The model.
    """

    def __init__(self, graph: Graph, num_hops: int, module: nn.Module | None) -> None:
        self._graph, self._reached = graph, Neighbourhoods(graph, num_hops)
        self._bytes_out = widest_row(module)

    def bytes_of(self, nodes: int, edges: int) -> int:
        """Return the bytes of a batch."""
        return bytes_of_batch(self._graph, self._bytes_out, nodes, edges)

    def batch_size(self, seeds: Judged, least: int, budget_bytes: int) -> int:
        """Return how many ids a batch should have: as many as fit the budget, and at least ``least``."""
        most = seeds.most
        if most <= least or self.bytes_of(self._graph.num_nodes, self._graph.num_edges) <= budget_bytes:
            return max(most, least)
        parts = 1
        while (size := -(-most // parts)) > least:
            some = seeds.some(seeds.num_batches(size))
            if all(self._within(nodes, budget_bytes)[0] <= budget_bytes for nodes in some):
                return size
            parts *= 2
        return least

    def _within(self, nodes: Tensor, budget_bytes: int) -> tuple[int, Reach]:
        """Return the bytes of a batch, or more than the budget where it has more, and how far it was counted."""
        at_most = budget_bytes // self.bytes_of(0, 1)
        reached = self._reached.of(nodes, at_most)
        return self.bytes_of(reached.nodes[-1], reached.edges[-1]), reached

    def bytes_around(self, nodes: Tensor, budget_bytes: int) -> int | None:
        """Return the bytes of a batch; None where these are more than the budget, or its last hop brings no edge."""
        needed, reached = self._within(nodes, budget_bytes)
        return needed if needed <= budget_bytes and reached.edges[-1] > reached.edges[-2] else None

    def is_cheaper_by_layer(self, seeds: Judged, batch_size: int) -> bool:
        """Return whether one pass over the layers costs a rank less than its batches of full neighbourhoods.

        It never computes more rows than these do together. But where they do not overlap, it gathers rows for every
        layer, and they do so once.
        """
        num_batches = seeds.num_batches(batch_size)
        works = [self._reached.of(nodes).work for nodes in seeds.some(num_batches)]
        together = self._reached.of(seeds.nodes).work / seeds.num_ranks
        return _MARGIN * together < num_batches * sum(works) / len(works)


def seeds_at_once(graph: Graph, sampler: Sampler, seeds: Judged, counter: Counter, most: int, budget_bytes: int) -> int:
    """Return how many seeds a batch of trees by time should have: up to ``most``, if their trees keep to the budget.

    Trees share nothing, so each takes memory of its own. The number depends on the graph and the seeds alone, so that
    it is the same on all ranks that have one budget.
    """
    count = len(seeds.ids)
    looks = torch.linspace(0, count - 1, min(_TREES, count)).round().to(torch.int64)
    some = list(seeds.at(looks).split(1))
    samples = sampler.sample_bulk(graph, some, [BatchKey(0, 0, 0)] * len(some))
    num_bytes = sum(counter.bytes_of(sample.nodes.numel(), sample.indices.numel()) for sample in samples)
    return min(most, max(1, int(budget_bytes * len(some) / (_TREES_MARGIN * max(1, num_bytes)))))


def bytes_of_batch(rows: Graph, bytes_out: int, nodes: int, edges: int) -> int:
    """Return the bytes of a batch, if a layer makes a message for each edge.

    Args:
        rows: A graph, or some rows of it, with the batch's arrays.
        bytes_out: The bytes of the widest row that the model makes.
        nodes: How many nodes the batch has.
        edges: How many edges it has.
    """
    bytes_in = 4 * numbers_per_node(rows)  # as float32
    of_edge = BYTES_OF_AN_EDGE + bytes_per_edge(rows) + max(bytes_in, bytes_out)
    return nodes * (COPIES * bytes_in + 2 * bytes_out) + edges * of_edge


def widest_row(module: nn.Module | None) -> int:
    """Return the bytes of the widest row that a layer of the module makes, as far as its weights tell."""
    widths = [
        weight.shape[0]
        for child in (module.modules() if module is not None else [])
        if not isinstance(child, nn.Embedding | nn.EmbeddingBag)
        for weight in child.parameters(recurse=False)
        if not is_lazy(weight) and weight.dim() == 2
    ]
    return 4 * max(widths, default=0)


def is_limited(trainer: Trainer | None) -> bool:
    """Return whether a trainer asks for some batches of an evaluation only. They have the size of training batches."""
    if trainer is None:
        return False
    names = {TrainerFn.TESTING: "limit_test_batches", TrainerFn.PREDICTING: "limit_predict_batches"}
    name = next((name for fn, name in names.items() if fn == trainer.state.fn), "limit_val_batches")
    return is_limit(getattr(trainer, name))
