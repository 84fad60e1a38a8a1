"""Sample one batch: a kernel works in the scratch of its thread, and the batch is copied out of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.hop_kernels import ONE_TYPE, Draws, sample
from lightning_gnn_dist.engine.kernels import DAMAGED, REPEATED_SEED, Array, Rule, Work
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import MAX_ENTRIES, BatchKey, Sample, refuse_repeated
from lightning_gnn_dist.engine.scratch import Scratch, scratch_of_thread
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.graph.typed.types import GraphTypes

# (indptr, indices, seeds, *settings, work, table, num_nodes, num_edges) -> needed entries of ``work``, or an error
Kernel = Callable[..., Any]


def sample_hops(
    graph: Graph,
    seeds: Tensor,
    num_hops: int,
    kernel: Kernel,
    *settings: Any,
    tables: int = 1,
    weighs: bool = False,
    with_ids: bool | None = None,
    with_kinds: bool = False,
    num_names: int | None = None,
) -> Sample:
    """Sample one batch by ``kernel``, which runs again with more memory if it had too little.

    Args:
        graph: The graph to sample.
        seeds: The batch's first nodes, as ``check_bulk`` returns them.
        num_hops: The number of hops that the kernel counts nodes and edges of.
        kernel: Samples one batch into the ``Work`` that it is given.
        settings: What else the kernel takes.
        tables: How often the kernel opens its table.
        weighs: Whether the kernel gives edges a weight.
        with_ids: Whether the sample has ``edge_ids``. Default: if the graph has edge arrays or types.
        with_kinds: Whether it has ``edge_kinds``.
        num_names: The kernel calls nodes by names of its own, int64, below this number. Default: by their ids.
    """
    kinds = graph.types.edge_type.numpy().dtype
    scratch = scratch_of_thread(graph.indices.numpy().dtype if num_names is None else np.int64, kinds)
    reserve(scratch, seeds.numel())
    num_nodes, num_edges = np.zeros((2, num_hops + 1), np.int64)
    csr = graph.indptr.numpy(), graph.indices.numpy()
    while True:
        table = scratch.open_table(graph.num_nodes if num_names is None else num_names, tables)
        needed = kernel(*csr, seeds.numpy(), *settings, scratch.work, table, num_nodes, num_edges)
        if needed <= scratch.capacity:
            break
        reserve(scratch, needed)
    if needed == REPEATED_SEED:
        refuse_repeated(seeds)
    if needed == DAMAGED:
        raise graph_is_damaged(graph)
    with_ids = has_ids(graph) if with_ids is None else with_ids
    drawn = _copied(scratch.work, num_nodes.tolist(), num_edges[:-1].tolist(), with_ids=with_ids, weighs=weighs)
    return drawn._replace(edge_kinds=_kinds_of(graph, scratch.work, drawn)) if with_kinds else drawn


def has_ids(graph: Graph) -> bool:
    """Whether batches of the graph need to know where their edges stand in it."""
    return have_names(graph.types) or bool(graph.edge_arrays)


def graph_is_damaged(graph: Graph) -> Exception:
    """The error for a kernel that met an edge out of the graph; all edges are checked again, to say which."""
    try:
        graph.check_edges()
    except ValueError as error:
        where = f"The files of {graph.path} are" if graph.path else "An array of the graph was"
        return ValueError(f"{where} changed after the graph was checked: {error} Open or build the graph again.")
    return ValueError("The edges of the graph are being changed while they are sampled: sample a graph that stays.")


def _copied(work: Work, num_nodes: list[int], num_edges: list[int], *, with_ids: bool, weighs: bool) -> Sample:
    """The batch in arrays of its own, as the next one overwrites the scratch."""
    rows, edges = sum(num_nodes[:-1]), sum(num_edges)
    return Sample(
        nodes=torch.from_numpy(work.nodes[: sum(num_nodes)].astype(np.int64)),
        indptr=torch.from_numpy(work.starts[: rows + 1].astype(np.int32)),
        indices=torch.from_numpy(work.columns[:edges].astype(np.int32)),
        num_sampled_nodes=num_nodes,
        num_sampled_edges=num_edges,
        edge_ids=torch.from_numpy(work.positions[:edges].copy()) if with_ids else None,
        edge_weight=torch.from_numpy(work.weights[:edges].copy()) if weighs else None,
    )


def _kinds_of(graph: Graph, work: Work, drawn: Sample) -> Tensor:
    kinds = work.kinds[: drawn.indices.numel()].copy()
    if len(graph.types.edge_types) == 1:
        kinds[:] = 0  # a kernel notes none
    return torch.from_numpy(kinds)


def reserve(scratch: Scratch, entries: int) -> None:
    """Give the scratch room for ``entries`` seeds and edges, and refuse more than ``MAX_ENTRIES``."""
    if entries > MAX_ENTRIES:
        raise ValueError(
            f"A batch may have {MAX_ENTRIES} edges, but this one needs at least {entries}. "
            "Use fewer seeds a batch, or a limit instead of -1 in num_neighbors."
        )
    if entries > scratch.capacity:
        scratch.reserve(entries)


def edge_types_of(types: GraphTypes) -> Array:
    """The type of each edge, as kernels take it: empty where there is one type alone."""
    if len(types.edge_types) == 1:
        return ONE_TYPE
    numbers: Array = types.edge_type.numpy()
    return numbers


def sample_neighbors(graph: Graph, seeds: Tensor, fanouts: Array, batch_key: BatchKey, rule: Rule) -> Sample:
    """Draw so many neighbours of each edge type at each hop, ``fanouts[hop, type]``."""
    draws = Draws(edge_types_of(graph.types), fanouts, typed_keys(*batch_key, *fanouts.shape), rule)
    return sample_hops(graph, seeds, len(fanouts), sample, draws, with_kinds=have_names(graph.types))
