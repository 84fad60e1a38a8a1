"""Runs the kernel of sampling per edge type."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.engine.hops import sample_hops
from lightning_gnn_dist.engine.intrinsics import RUN
from lightning_gnn_dist.engine.kernels import Array, Rule, Table, Work
from lightning_gnn_dist.engine.rng import typed_keys
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.engine.typed.kernels import Draws, sample_typed
from lightning_gnn_dist.engine.weighted.draws import EVEN
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import GraphTypes

_THREAD = threading.local()


def edge_types_of(types: GraphTypes) -> Array:
    """The type of each edge, as kernels take it: empty where there is one type alone."""
    numbers: Array = types.edge_type[: 0 if len(types.edge_types) == 1 else None].numpy()
    return numbers


def sample_per_type(graph: Graph, seeds: Tensor, fanouts: Array, batch_key: BatchKey, *, replace: bool) -> Sample:
    """Draw so many neighbours of each edge type at each hop, ``fanouts[hop, type]``; the sample has ``edge_kinds``."""
    assert graph.types is not None
    keys = typed_keys(*batch_key, *fanouts.shape)
    draws = Draws(edge_types_of(graph.types), fanouts, keys, Rule(EVEN, replace))
    dtype = graph.types.edge_type.numpy().dtype

    def kernel(indptr: Array, indices: Array, ids: Array, _: Array, work: Work, table: Table, *counts: Array) -> int:
        kinds = _kinds_of_thread(dtype, len(work.positions))
        return int(sample_typed(indptr, indices, ids, draws, kinds, work, table, *counts))

    sample = sample_hops(graph, seeds, keys[:, 0], kernel)
    drawn = _kinds_of_thread(dtype, 0)[: sample.indices.numel()]
    return sample._replace(edge_kinds=torch.from_numpy(drawn.copy()))


def _kinds_of_thread(dtype: np.dtype[Any], room: int) -> Array:
    """The calling thread's own array, with room for the types of so many edges at least, and a run past them."""
    mine: dict[str, Array] = _THREAD.__dict__
    found = mine.get(dtype.name)
    if found is None or len(found) < room + RUN:
        found = mine[dtype.name] = np.empty(room + RUN, dtype)
    return found
