"""Runs the kernel of sampling by time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gnn_dist.engine.hops import edge_types_of, sample_hops
from lightning_gnn_dist.engine.kernels import Array, Rule
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.temporal.kernels import TimedDraws, Trees, sample_trees
from lightning_gnn_dist.engine.temporal.order import time_order
from lightning_gnn_dist.engine.temporal.times import BEFORE_ALL, as_integers, earlier_by, sources_of, times_of_seeds
from lightning_gnn_dist.engine.weighted.draws import EVEN
from lightning_gnn_dist.graph.graph import Graph

SEED_TIME = "seed_time"  # of what samples have beside their nodes, it alone has a row for each seed


class View(NamedTuple):
    """What a seed sees of the past.

    Attributes:
        time: The name of the array that says when edges, or the nodes that send, were there.
        seed_time: The name of the node array that says at what time each node is a seed.
        equal: Whether it sees events of its own time.
        last: It sees events up to so long before its time; None for all.
        latest: Whether nodes draw their latest neighbours, instead of any.
        replace: Whether a neighbour may be drawn more than once.
    """

    time: str
    seed_time: str
    equal: bool
    last: float | None
    latest: bool
    replace: bool


def sample_by_time(
    graph: Graph, seeds: Tensor, times: Tensor, fanouts: Array, batch_key: BatchKey, view: View
) -> Sample:
    """Draw so many neighbours of each edge type at each hop, ``fanouts[hop, type]``, for each seed apart."""
    bits = max(1, (graph.num_nodes - 1).bit_length())
    trees = Trees(seeds.numpy(), *seen_by(times, view), bits)
    keys = typed_keys(*batch_key, *fanouts.shape)
    edge_type = edge_types_of(graph.types)
    order, rule = time_order(graph, view.time), Rule(EVEN, view.replace)
    draws = TimedDraws(edge_type, order, fanouts, keys, rule, view.latest)
    roots = (torch.arange(seeds.numel()) << bits) + seeds
    sample = sample_hops(
        graph, roots, len(fanouts), sample_trees, trees, draws, num_names=max(1, seeds.numel()) << bits
    )
    extra = {"batch": sample.nodes >> bits, SEED_TIME: times}
    return sample._replace(nodes=sample.nodes & ((1 << bits) - 1), extra=extra)


def seen_by(times: Tensor, view: View) -> tuple[Array, Array]:
    """After which time, and up to which, each seed sees events, as integers."""
    upto = as_integers(times) - (0 if view.equal else 1)
    after = torch.full_like(upto, BEFORE_ALL) if view.last is None else earlier_by(times, view.last) - 1
    return after.numpy(), upto.numpy()


def checked_times(graph: Graph, seeds: Tensor, view: View) -> Tensor:
    """The time of each seed; times that do not compare exactly with those of events, and such a span, are refused."""
    sources_of(graph, view.time)  # refuses what is no time, first
    times = times_of_seeds(graph, view.seed_time, seeds)
    check_comparable(graph, times, view)
    return times


def check_comparable(graph: Graph, times: Tensor, view: View) -> None:
    """Refuse times of seeds that do not compare exactly with those of events, and such a span."""
    of_events = next(source.times.dtype for source in sources_of(graph, view.time) if source is not None)
    if of_events.is_floating_point != times.dtype.is_floating_point:
        raise ValueError(
            f"Events have times of {of_events} ({view.time!r}) and seeds of {times.dtype} ({view.seed_time!r}), which "
            "do not compare exactly: store both as integers, or both as floating point numbers."
        )
    check_span(times, view)


def check_span(times: Tensor, view: View) -> None:
    """Refuse a span of time that is no integer where times are."""
    if view.last is not None and not times.is_floating_point() and view.last != int(view.last):
        raise ValueError(f"last ({view.last}) must be an integer, as the times of {view.time!r} are: round it.")
