"""What a data module takes of a sampler that draws by time."""

from __future__ import annotations

from lightning_gnn_dist.boundary.boundary import Boundary, History
from lightning_gnn_dist.data.settings import BatchSettings
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.temporal.sampler import TemporalSampler


def check_temporal(graph: Graph, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse a graph without the times that samplers draw by, and a boundary that does not know times."""
    for sampler in (settings.of_parts(), settings.of_corrections(), settings.of_evaluation()):
        if not isinstance(sampler, TemporalSampler):
            continue
        sampler.check_graph(graph)
        if isinstance(boundary, History):
            raise ValueError(
                "boundary=History() keeps one row of each node, whatever the time of the seed that reads it, and "
                f"{sampler} draws by time: take Isolated(), Halo() or Fetch()."
            )
