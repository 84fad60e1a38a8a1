"""Times of edges and seeds: found by name, checked, and each row's edges in their order.

The order of a graph's edges is made once, and kept beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import holds_integers, shown
from lightning_gnn_dist.engine.kernels import Array
from lightning_gnn_dist.graph.convert import index_dtype, without_time
from lightning_gnn_dist.graph.graph import EDGES_AT_ONCE, Graph
from lightning_gnn_dist.graph.memo import remembered
from lightning_gnn_dist.graph.rows import row_slices
from lightning_gnn_dist.graph.typed.types import folder_of, within

BEFORE_ALL = -(2**63)  # before every time
Span = tuple[float, float]  # the first time and the last


class TimeSource(NamedTuple):
    """Where the time of the edges of one type stands.

    Attributes:
        times: A time for each edge of the type, or for each node that may send along it.
        first_sender: The id of the first of these nodes; None if the times are of edges.
    """

    times: Tensor
    first_sender: int | None

    def of(self, first: int, senders: Tensor) -> Tensor:
        """The times of some edges of the type, from number ``first`` on, given the ids of their senders."""
        if self.first_sender is None:
            return self.times[first : first + senders.numel()]
        return self.times[senders.to(torch.int64) - self.first_sender]


def sources_of(graph: Graph, name: str) -> list[TimeSource | None]:
    """For each edge type, the times called ``name``: of its edges, else of the nodes that send, else None.

    A name that nobody has is refused, and so are times that are no numbers.
    """
    return remembered(graph, ("times", name), lambda: _checked_sources(graph, name), arrays_of(graph, name))


def spans_by_type(graph: Graph, name: str) -> dict[str, Span | None]:
    """For each edge type, in words, the first and the last of the times called ``name``; None without any."""

    def find() -> dict[str, Span | None]:
        sources = zip(words_of_types(graph), sources_of(graph, name), strict=True)
        return {kind: None if source is None else span_of(source.times) for kind, source in sources}

    return remembered(graph, ("spans of times", name), find, arrays_of(graph, name))


def words_of_types(graph: Graph) -> list[str]:
    """How each edge type is called in what is told."""
    return [folder_of(kind) or "all edges" for kind in graph.types.edge_types]


def span_of(times: Tensor) -> Span | None:
    """The first and the last of some times; None if there are none."""
    return (times.min().item(), times.max().item()) if times.numel() else None


def arrays_of(graph: Graph, name: str) -> list[Tensor | None]:
    """The arrays of all edges and nodes that are called ``name``, None where there is none."""
    kinds = graph.types.edge_arrays, graph.types.node_arrays
    return [arrays.get(name) for of in kinds for arrays in of.values()]


def _checked_sources(graph: Graph, name: str) -> list[TimeSource | None]:
    types, found = graph.types, list[TimeSource | None]()
    for kind in types.edge_types:
        of_edges, of_senders = types.edge_arrays[kind].get(name), types.node_arrays[kind[0]].get(name)
        with within(kind if of_edges is not None else kind[0]):
            if of_edges is not None:
                check_times(name, of_edges, "edge")
                found.append(TimeSource(of_edges, None))
            elif of_senders is not None:
                check_times(name, of_senders, "node")
                found.append(TimeSource(of_senders, types.nodes_of(kind[0]).start))
            else:
                found.append(None)
    if all(source is None for source in found):
        names = {name for arrays in (*types.node_arrays.values(), *types.edge_arrays.values()) for name in arrays}
        raise ValueError(
            f"time names the array {shown(name)}, and neither edges nor nodes of the graph have it (they have: "
            f"{shown(sorted(names))}): set it in the data before Graph.from_pyg(data)."
        )
    return found


def check_times(name: str, times: Tensor, row: str) -> None:
    """Refuse times that are not one integer for each ``row``, and those that stand for no time."""
    if times.dim() != 1 or not holds_integers(times):
        raise ValueError(
            f"{name} must hold one integer for each {row}, such as seconds since 1970, got {shown(times)}: "
            f"data.{name} = (1000 * data.{name}).round().long() keeps thousandths; in tables write whole numbers."
        )
    if times.dtype == torch.int64 and bool((missing := times == BEFORE_ALL).any()):
        raise ValueError(
            f"{name} of {row} {int(missing.nonzero()[0])} is -2**63, which pandas writes where there is no time (NaT): "
            f"{without_time(row)}."
        )


def times_of_seeds(graph: Graph, name: str, seeds: Tensor) -> Tensor:
    """The time of each seed, of the node array ``name``."""
    types = graph.types
    numbers, local = types.to_local(seeds)
    kinds = [types.node_types[int(number)] for number in numbers.unique()]
    if len(kinds) > 1:
        raise ValueError(f"The seeds of a batch must be nodes of one type, got some of {kinds}.")
    return node_times(graph, name, kinds[0] if kinds else types.seed_type())[local]


def node_times(graph: Graph, name: str, kind: str, argument: str = "seed_time") -> Tensor:
    """The times called ``name`` of all nodes of a type; ``argument`` gave this name."""
    arrays = graph.types.node_arrays[kind]

    def find() -> Tensor:
        if name not in arrays:
            whose, place = ("Nodes", "data") if not kind else (f"Nodes of type {kind!r}", f"data[{kind!r}]")
            raise ValueError(
                f"{whose} have no {shown(name)} to say at what time each of them is a seed (they have: "
                f"{shown(sorted(arrays))}): set it in {place} as a tensor of numbers, or name another array of "
                f"theirs as {argument}."
            )
        check_times(name, arrays[name], "node")
        return arrays[name]

    return remembered(graph, ("times of nodes", name, kind), find, [arrays.get(name)])


def times_of_receivers(graph: Graph, time: str, kind: str) -> Tensor | None:
    """Since when each node that may receive is there, if nodes have an array of that name."""
    return node_times(graph, time, kind, "time") if time in graph.types.node_arrays[kind] else None


class TimeOrder(NamedTuple):
    """What a kernel needs to find the edges of a time: 12 bytes an edge, or 8 where rows are in that order already.

    Attributes:
        times: The times of each row's edges in increasing order, those of each edge type by themselves, int64.
        places: Which edge of its row each of them is of; empty if they are in order as they are.
        has_time: Whether the edges of each type have times; all others are always seen.
    """

    times: Array
    places: Array
    has_time: Array


def time_order(graph: Graph, name: str) -> TimeOrder:
    """The order of a graph's edges by the times called ``name``, made anew once these have changed."""

    def find() -> TimeOrder:
        graph.check_edges()  # these loops follow them
        return ordered(graph, sources_of(graph, name))

    return remembered(graph, ("time order", name), find, arrays_of(graph, name))


def ordered(graph: Graph, sources: Sequence[TimeSource | None]) -> TimeOrder:
    """The order of a graph's edges by the times of each type; None where a type has none."""
    times, has_time = torch.full((graph.num_edges,), BEFORE_ALL), np.array([of is not None for of in sources])
    for number, source in enumerate(sources):
        for first, piece in zip(count(0, EDGES_AT_ONCE), _pieces(graph, number), strict=False):
            if source is not None:
                times[piece] = source.of(first, graph.indices[piece]).long()
    kinds = None if len(has_time) == 1 else graph.types.edge_type
    if all(bool(_follows(graph.indptr, kinds, times, rows)[1].all()) for rows in row_slices(graph.indptr)):
        return TimeOrder(times.numpy(), np.empty(0, np.int32), has_time)
    places = torch.empty(times.numel(), dtype=index_dtype(int(graph.degrees().max())))
    for rows in row_slices(graph.indptr):
        at = slice(int(graph.indptr[rows.start]), int(graph.indptr[rows.stop]))
        begins, _ = _follows(graph.indptr, kinds, times, rows)
        order = times[at].argsort(stable=True)
        order = order[begins.cumsum(0)[order].argsort(stable=True)]
        starts = graph.indptr[rows.start : rows.stop + 1]
        times[at] = times[at][order]
        places[at] = (order + at.start - starts[:-1].repeat_interleave(starts.diff())).to(places.dtype)
    return TimeOrder(times.numpy(), places.numpy(), has_time)


def _pieces(graph: Graph, number: int) -> Iterator[slice | Tensor]:
    """Yield the positions of the edges of a type, ``EDGES_AT_ONCE`` at a time."""
    if len(graph.types.edge_types) > 1:
        yield from graph.types.edges_of(graph.types.edge_types[number]).split(EDGES_AT_ONCE)
        return
    for first in range(0, graph.num_edges, EDGES_AT_ONCE):
        yield slice(first, first + EDGES_AT_ONCE)


def _follows(indptr: Tensor, kinds: Tensor | None, times: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Of the edges of some rows: which begin the edges of a type in their row, and which are as late as the one before.

    Those that begin count as late.
    """
    starts = indptr[rows.start : rows.stop + 1]
    at = slice(int(starts[0]), int(starts[-1]))
    begins = torch.zeros(at.stop - at.start, dtype=torch.bool)
    begins[(starts[:-1] - at.start)[starts.diff() > 0]] = True
    if kinds is not None:
        begins[1:] |= kinds[at][1:] != kinds[at][:-1]
    late = begins.clone()
    late[1:] |= times[at][1:] >= times[at][:-1]
    return begins, late
