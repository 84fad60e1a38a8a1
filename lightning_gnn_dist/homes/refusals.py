"""What does not work where each rank has a shard: refused when a data module is made, or on all ranks in ``setup``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, Fetch, Halo, Isolated
from lightning_gnn_dist.boundary.refusals import check_seed_hops
from lightning_gnn_dist.engine.temporal.times import sources_of
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.homes.opening import check_typed
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.homes.times import check_units, spans_of
from lightning_gnn_dist.prepare.shard import Bounds
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.temporal import TemporalSampler
from lightning_gnn_dist.sharded.source import check_sampler
from lightning_gnn_dist.wire.collectives import all_gather_rows

_MOST_BYTES = 2048  # of what is said


def check_shards(bounds: Bounds, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse settings, boundaries and samplers that do not work without the whole graph, or not with its types."""
    if not isinstance(boundary, Isolated | Halo | Exchange | Fetch):
        raise ValueError(f"boundary must be Isolated(), Halo(), Exchange() or Fetch() for shards, got {boundary}.")
    if settings.loading.sample_on != "cpu":
        raise ValueError(f'sample_on must be "cpu" for shards, whose batches are made in RAM, got {settings.loading}.')
    check_typed(bounds.types, settings, boundary)
    check_seed_hops(boundary, is_typed=have_names(bounds.types))
    across = [settings.of_corrections()]  # these are asked of the ranks that own what they draw
    across += [settings.of_evaluation()] if have_names(bounds.types) else []
    across += [settings.of_parts()] if boundary.sees_whole_graph else []
    for sampler in across:
        check_sampler(sampler, bounds.types)


def check_copies(path: Path, bounds: Bounds, num_ranks: int) -> None:
    """Refuse an exchange among ranks of which several hold the same shard."""
    if num_ranks != bounds.num_shards:
        raise ValueError(
            f"boundary=Exchange() takes one rank for each shard, and {num_ranks} ranks hold the {bounds.num_shards} "
            f"shards of {path}: start {bounds.num_shards} ranks, divide the graph into {num_ranks} shards, or take "
            "boundary=Halo()."
        )


def check_units_of_shards(rows: Graph, sampler: Sampler) -> None:
    """Refuse times of which no seed of any shard is later than any event. Collective."""
    if not isinstance(sampler, TemporalSampler):
        return
    of_seeds, of_types = spans_of(rows, sampler)
    row = [(*(span or (0, 0)), span is not None) for span in (of_seeds, *of_types.values())]
    sources = [source for source in sources_of(rows, sampler.time) if source is not None]
    floating = any(source.times.is_floating_point() for source in sources)
    of_ranks = all_gather_rows(torch.tensor(row, dtype=torch.float64 if floating else torch.int64))
    seeds, *events = (_span(ranks[ranks[:, 2] > 0]) for ranks in of_ranks.unbind(1))
    check_units(sampler, seeds, dict(zip(of_types, events, strict=True)))


def _span(ranks: Tensor) -> tuple[float, float] | None:
    return (ranks[:, 0].min().item(), ranks[:, 1].max().item()) if len(ranks) else None


def check_on_all_ranks(check: Callable[[], None], shard: int) -> None:
    """Check the own shard. All ranks raise or none: whose shard is right says why another is refused. Collective.

    Args:
        check: Raises a ValueError if the shard is refused.
        shard: The number of the own shard.
    """
    refusal: ValueError | None = None
    try:
        check()
    except ValueError as error:
        refusal = error
    said = b"" if refusal is None else f"Shard {shard}: {refusal}".encode()[:_MOST_BYTES]
    row = torch.zeros(_MOST_BYTES, dtype=torch.uint8)
    row[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in all_gather_rows(row)]
    if refusal is not None:
        raise refusal
    if others := [text for text in texts if text]:
        raise ValueError(others[0])
