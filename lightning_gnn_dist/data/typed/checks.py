"""What a data module takes of a graph with types: seeds of one type, and samplers and boundaries that know types."""

from __future__ import annotations

from lightning_gnn_dist.boundary.auto import Auto
from lightning_gnn_dist.boundary.boundary import Boundary, Exchange, History
from lightning_gnn_dist.boundary.prices import short_name
from lightning_gnn_dist.data.settings import BatchSettings
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import have_names
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


def with_one_type_of_seeds(graph: Graph) -> Graph:
    """Return the graph, of which a typed one has chosen the type of its seeds: that with a ``train_mask``."""
    if not have_names(graph.types) or graph.types.seeds is not None:
        return graph
    return graph.with_seeds(graph.types.seed_type())


def check_typed(graph: Graph, settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse samplers, boundaries and places that do not take a typed graph, if this is one."""
    if not have_names(graph.types):
        return
    for sampler in settings.samplers:
        if isinstance(sampler, NeighborSampler):
            sampler.of_types(graph.types)
        sampler.sample_bulk(graph, [], [])  # refuses the graph, or draws nothing
    if isinstance(boundary, Exchange | History) or (isinstance(boundary, Auto) and boundary.exchange):
        name = "Auto(exchange=True)" if isinstance(boundary, Auto) else short_name(boundary)
        raise ValueError(
            f"boundary={name} is for graphs without types: take Isolated(), Halo() or Fetch() for this one."
        )
    if settings.loading.sample_on == "device":
        raise ValueError('sample_on="device" is for graphs without types: leave it out, and batches are drawn in RAM.')
