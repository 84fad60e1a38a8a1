"""A folder of shards, as a data module is given it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.boundary.coverage import Coverage
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.data.task import NodeTask
from lightning_gnn_dist.extensions.links.bounds import LinkBounds
from lightning_gnn_dist.extensions.links.task import without_labels
from lightning_gnn_dist.extensions.shards.edges import ShardEdges
from lightning_gnn_dist.extensions.shards.home import ShardHome
from lightning_gnn_dist.extensions.shards.index import Bounds
from lightning_gnn_dist.graph.storage.store import tables_at
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.graph.value_check import ValueCheck
from lightning_gnn_dist.homes.access import chosen_seed_type
from lightning_gnn_dist.homes.residency import Holding
from lightning_gnn_dist.homes.run import RunContext
from lightning_gnn_dist.homes.settings import BatchSettings
from lightning_gnn_dist.sampling.whole import WholePartSampler


@dataclass(frozen=True)
class Shards:
    """A folder that ``save_shards`` has written, or what of it one host needs."""

    path: Path

    @property
    def tables(self) -> Tables | None:
        """What became of the tables of a database."""
        return tables_at(self.path)

    def nodes(
        self,
        running: RunContext,
        boundary: Boundary,
        coverage: Coverage | None,
        values: ValueCheck,
        *,
        task: str | None,
        partitioner: object,
        holding: Holding,
    ) -> NodeTask:
        """Return its nodes as what is learned; of a graph with types those of one type."""
        self.refuse_to_cut(partitioner, holding)
        bounds = Bounds.read(self.path)
        kind = chosen_seed_type(bounds.types, task, f"that of {self.path}")
        if bounds.links is not None:
            raise ValueError(
                f"{self.path} holds a split ({bounds.links}): learn edges with LinkDataModule(path), or for nodes "
                "divide the graph that was split, which has its masks."
            )
        bounds = bounds if kind is None else replace(bounds, types=bounds.types.with_seeds(kind))
        return NodeTask(ShardHome(self.path, bounds, running, boundary, coverage), values)

    @property
    def links(self) -> LinkBounds:
        """Which edges it holds."""
        bounds = self._bounds_of_links()
        assert bounds.links is not None
        return bounds.links

    def edges(self, running: RunContext, boundary: Boundary, values: ValueCheck, num_negatives: int) -> ShardEdges:
        """Return its edges as what is learned."""
        _check_settings_of_edges(running.settings, boundary)
        bounds, links = self._bounds_of_links(), self.links
        hidden = None if links.labels is None else partial(without_labels, links)
        home = ShardHome(self.path, bounds, running, boundary, None, hidden)
        return ShardEdges(home, values, links, num_negatives)

    def refuse_to_cut(self, partitioner: object, holding: Holding) -> None:
        """Refuse to cut a graph that is in shards."""
        for name, value in (("partitioner", partitioner), ("holding", None if holding == Holding() else holding)):
            if value is not None:
                raise ValueError(
                    f"{self.path} holds shards, and a graph is cut when it is divided: leave {name}={shown(value)} "
                    "out, or give every host the whole graph."
                )

    def _bounds_of_links(self) -> Bounds:
        """Return where shards of a split begin; of a graph with types the type of the receivers is chosen."""
        bounds = Bounds.read(self.path)
        if bounds.links is None:
            raise ValueError(
                f"{self.path} holds shards of a graph whose edges are not split: divide a split, as in "
                "save_shards(split_edges(graph), partition, path), or learn from its nodes with PartitionedDataModule."
            )
        kind, types = bounds.links.edge_type, bounds.types
        return bounds if kind is None or types.seeds is not None else replace(bounds, types=types.with_seeds(kind[2]))


def _check_settings_of_edges(settings: BatchSettings, boundary: Boundary) -> None:
    """Refuse settings that do not suit a split in shards."""
    if isinstance(settings.sampler, WholePartSampler) and boundary.sees_whole_graph:
        raise ValueError(
            "WholePartSampler takes a whole part for each batch, and with boundary=Fetch() that is the whole graph: "
            "take NeighborSampler, or boundary=Isolated()."
        )
