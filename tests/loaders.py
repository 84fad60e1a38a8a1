"""A loader over a small graph, and what to ask of its batches."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist import Graph, NeighborSampler
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.batches import THREAD_NAME, Batches, Deal, Learning
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from tests.sampling.reference import random_graph

GRAPH = random_graph(300, 3000, seed=1)


SEEDS = torch.arange(10, 67)


def batches_of_part(learning: Learning, **options: Any) -> Batches:
    """The batches of a part that never changes."""
    made = Batches(lambda _: learning, learning.deal.num_batches, **options)
    made.learning(0)
    return made


def over(
    source: BatchSource,
    seeds: Tensor,
    num_batches: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    inputs: Tensor | None = None,
    **options: Any,
) -> Batches:
    """The batches of one set of seeds."""
    return batches_of_part(Learning(source, Deal(seeds, num_batches, seed, shuffle, inputs)), **options)


def loader(num_batches: int = 5, *, seeds: Tensor = SEEDS, sampler: object = None, **options: object) -> Batches:
    sampler = NeighborSampler([3, 2]) if sampler is None else sampler
    of_source = {name: options.pop(name) for name in ("widen", "stream") if name in options}
    source = GraphSource(options.pop("graph", GRAPH), sampler, **of_source)
    return over(source, seeds, num_batches, **options)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]


def same(left: SampledData, right: SampledData) -> bool:
    return all(torch.equal(left[name], right[name]) for name in ("n_id", "x", "y", "edge_index", "edge_attr"))


def seeds_of(batches: Sequence[SampledData]) -> list[list[int]]:
    return [batch.n_id[: batch.batch_size].tolist() for batch in batches]


@dataclass(frozen=True)
class Recorder:
    """A sampler that remembers which batches it was asked for, and fails at one of them."""

    fails_at: int = -1
    seconds: float = 0.0
    asked: list[int] = field(default_factory=list)
    num_hops: int = 1

    def sample_bulk(self, graph: Graph, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> list[Sample]:
        time.sleep(self.seconds)
        self.asked.extend(key.epoch * 5 + key.batch for key in keys)
        if any(key.batch == self.fails_at for key in keys):
            raise KeyError("no such neighbourhood")
        return NeighborSampler([2]).sample_bulk(graph, seeds, keys)
