"""What a sampler is: it takes the seeds of many batches and returns the sampled neighbourhood of each."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    MAX_HOPS,
    MAX_INTEGER,
    check_at_least,
    check_ids,
    check_instance,
    check_list,
    is_integer,
    shown,
)
from lightning_gnn_dist.engine.sample import MAX_ENTRIES, BatchKey, Sample
from lightning_gnn_dist.graph.graph import Graph


@runtime_checkable
class Sampler(Protocol):
    """Draws the neighbourhoods that batches compute on. A new sampler is a frozen dataclass with these two members.

    What it draws for a batch may depend on the graph, the batch's seeds and its key alone: not on the other batches
    of the bulk, nor on the thread. It runs in several threads at once.
    """

    @property
    def num_hops(self) -> int:
        """The number of layers that a batch is made for."""
        ...

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        """Sample one batch for every entry of ``seeds``, each of which holds distinct ids."""
        ...


@runtime_checkable
class OrdersSeeds(Protocol):
    """A sampler that also chooses the order in which seeds are dealt to the batches of a pass."""

    def order(self, graph: Graph, seeds: Tensor, seed: int, epoch: int) -> Tensor:
        """A permutation of the positions in ``seeds``, int64. It depends on the arguments alone."""
        ...


@runtime_checkable
class SeesByTime(Sampler, Protocol):
    """A sampler that draws for each seed apart, of what was before its time. All of a data module are such, or none."""

    @property
    def sight(self) -> object:
        """What decides which events a seed must not see, the same of all samplers of a data module."""
        ...

    def of_evaluation(self) -> Sampler:
        """Return what evaluates a model that was trained with this one."""
        ...

    def check_graph(self, graph: Graph) -> None:
        """Refuse a graph without such times."""
        ...

    def check_data(self, graph: Graph) -> None:
        """Refuse a graph without such times, or with times that do not fit together."""
        ...

    def check_shard(self, rows: Graph) -> None:
        """Do so by the times of all ranks, of which each has some rows. Collective."""
        ...


def check_bulk(
    graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey], *, untyped: str | None = None
) -> list[tuple[Tensor, BatchKey]]:
    """Refuse wrong arguments of ``sample_bulk``; return the seeds and the key of each batch.

    With ``untyped``, the name of a sampler that knows no types, a typed graph is refused.
    """
    if not isinstance(graph, Graph):
        check_instance("graph", graph, Graph, "a Graph, made by Graph.from_pyg(data)")
    graph.check_whole()
    if untyped is not None and graph.types.have_names:
        raise ValueError(
            f"{untyped} draws from graphs without types, and this one has {len(graph.types.node_types)} node types: "
            "use NeighborSampler, ShadowSampler, RandomWalkSampler(num_hops, visits=0) or "
            "WholePartSampler, or a graph made by Graph.from_pyg(data.to_homogeneous())."
        )
    if not isinstance(seeds, list) or not isinstance(keys, list):
        check_list("seeds", seeds, "[torch.arange(8)], a tensor for each batch")
        check_list("keys", keys, "[BatchKey(seed=0, epoch=0, batch=0)], one for each batch")
    if len(seeds) != len(keys):
        raise ValueError(
            f"Each batch needs a key, got {len(seeds)} lists of seeds and {len(keys)} keys: seeds and keys must be as "
            "long as each other."
        )
    num_nodes = graph.num_nodes
    if not all(type(key) is BatchKey and all(type(n) is int and 0 <= n <= MAX_INTEGER for n in key) for key in keys):
        keys = [_checked(key) for key in keys]
    return [(check_seeds(ids, num_nodes), key) for ids, key in zip(seeds, keys, strict=True)]


def check_samples(sampler: Sampler, graph: Graph) -> None:
    """Refuse a sampler of one's own if no batches can be made of what it draws around two nodes, the later one first.

    Such a fit would learn from other nodes than its seeds, without a word.
    """
    kind, seeds = type(sampler), torch.tensor(graph.types.seed_ids[:2][::-1])
    if kind.__module__.partition(".")[0] == __name__.partition(".")[0] or not len(seeds):
        return
    samples = sampler.sample_bulk(graph, [seeds, seeds[:1]], [BatchKey(0, 0, 0), BatchKey(0, 0, 1)])
    name = f"{kind.__name__}.sample_bulk()"
    if len(samples) != 2:
        raise ValueError(f"{name} must return a sample for each batch, got {len(samples)} for 2.")
    for sample, ids in zip(samples, [seeds, seeds[:1]], strict=True):
        found = sample.nodes[: len(ids)]
        if sample.num_sampled_nodes[0] != len(ids) or not (sample.is_constant or found.equal(ids)):
            raise ValueError(
                f"{name} must return the seeds first, in their order, and count them as hop 0: seeds {ids.tolist()} "
                f"came back as nodes that begin with {found.tolist()}, {sample.num_sampled_nodes[0]} of them in hop 0."
            )
        counts = sum(sample.num_sampled_nodes), sum(sample.num_sampled_edges)
        if counts != (len(sample.nodes), len(sample.indices)):
            raise ValueError(
                f"{name} must count all nodes and edges in num_sampled_nodes and num_sampled_edges, got "
                f"{counts[0]} of {len(sample.nodes)} nodes and {counts[1]} of {len(sample.indices)} edges."
            )


def _checked(key: BatchKey) -> BatchKey:
    if not isinstance(key, tuple | list) or len(key) != len(BatchKey._fields):
        raise TypeError(f"keys must hold BatchKey(seed, epoch, batch), got {shown(key)}.")
    check_at_least(0, **dict(zip(BatchKey._fields, key, strict=True)))
    return BatchKey(*map(int, key))


def check_seeds(seeds: Tensor, num_nodes: int) -> Tensor:
    """Refuse seeds that are not a vector of ids of the graph; return them as contiguous int64."""
    is_plain = isinstance(seeds, Tensor) and seeds.layout == torch.strided and seeds.is_cpu
    if not is_plain or seeds.dtype != torch.int64 or seeds.dim() != 1:
        check_ids("The seeds of a batch", seeds)
    seeds = seeds.to(torch.int64).contiguous()
    low, high = (int(seeds.min()), int(seeds.max())) if seeds.numel() else (0, -1)
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"The seeds of a batch must lie in [0, {num_nodes}), got {low} to {high}: they are ids of "
            "the graph that is sampled, which for a part means local ids."
        )
    return seeds


def check_numbers(
    name: str, numbers: Sequence[int], example: str, *, or_all: bool = False, or_none: bool = False
) -> tuple[int, ...]:
    """Refuse anything but a list of one positive integer per hop; ``or_all`` allows -1, and ``or_none`` 0."""
    if isinstance(numbers, str | bytes | bytearray) or not isinstance(numbers, Sequence):
        raise ValueError(f"{name} must list one number per hop, got {shown(numbers)}. For two hops write {example}.")
    if not numbers:
        raise ValueError(f"{name} is empty: give one number per layer of the model, as in {example}.")
    if len(numbers) > MAX_HOPS:
        raise ValueError(f"{name} may list up to {MAX_HOPS} hops, got {len(numbers)}: give one number per layer.")
    for number in numbers:
        if not is_integer(number) or not (number > 0 or (or_all and number == -1) or (or_none and number == 0)):
            otherwise = (", or -1 for all neighbours" if or_all else "") + (", or 0 for none" if or_none else "")
            raise ValueError(
                f"{name} must hold positive integers{otherwise}, got {shown(number)} in {shown(list(numbers))}."
            )
        if number > MAX_ENTRIES:
            raise ValueError(
                f"{name} may hold numbers up to {MAX_ENTRIES}, got {shown(number)} in {shown(list(numbers))}."
            )
    return tuple(operator.index(number) for number in numbers)
