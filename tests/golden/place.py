"""Where runs find what several of them read: saved graphs, splits and shards; and data modules over them.

Names that merges will change are looked up here, and nowhere else in these runs.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.shards.one_shard import OneShard
from lightning_gnn_dist.sampling.base import Sampler
from tests.golden.device import chosen
from tests.golden.graphs import SPLITS, plain, simple, typed, typed_in_time

GRAPHS = {"plain": plain, "simple": simple, "typed": typed, "timed": typed_in_time}
RANKS = 2  # of the shards that are prepared
AT_ONCE = lgd.Loading(num_threads=0)


@dataclass(frozen=True)
class Place:
    """A folder that all runs share, and one that is a run's own."""

    shared: Path
    own: Path

    def prepare(self) -> None:
        """Write what is read."""
        for name, make in GRAPHS.items():
            make().save(self.shared / name)
            lgd.save_shards(make(), lgd.RandomPartitioner()(make(), RANKS, 0), self.shared / f"{name}_shards")
        for name, make_split in SPLITS.items():
            split = make_split()
            split.save(self.shared / f"{name}_split")
            lgd.save_shards(split, lgd.RandomPartitioner()(split.graph, RANKS, 0), self.shared / f"{name}_split_shards")

    def nodes(self, graph: str, store: str, **options: Any) -> Any:
        """A data module of nodes of a graph: in ``"ram"``, in ``"files"`` or in ``"shards"``."""
        options = _defaults(lgd.NeighborSampler([4, 3]), 32) | options
        if store == "shards":
            return lgd.PartitionedDataModule(self.shared / f"{graph}_shards", **options)
        where: lgd.Graph | Path = GRAPHS[graph]() if store == "ram" else self.shared / graph
        options = {"partitioner": lgd.RandomPartitioner()} | options | {"holding": self._holding(options)}
        return lgd.PartitionedDataModule(where, **options)

    def _holding(self, options: dict[str, Any]) -> lgd.Holding:
        holding: lgd.Holding = options.get("holding", lgd.Holding())
        return replace(holding, cache_dir=self.own)

    def links(self, split: str, store: str, **options: Any) -> Any:
        """A data module of the edges of a split."""
        time = {"events": "edge_time", "labelled_events": "edge_time", "typed_events": "time"}.get(split)
        sampler = lgd.NeighborSampler([4, 3]) if time is None else lgd.TemporalSampler([4, 3], time)
        options = _defaults(sampler, 48) | options
        if store == "shards":
            return lgd.LinkDataModule(self.shared / f"{split}_split_shards", **options)
        where = SPLITS[split]() if store == "ram" else self.shared / f"{split}_split"
        options = {"partitioner": lgd.RandomPartitioner()} | options | {"holding": self._holding(options)}
        return lgd.LinkDataModule(where, **options)


def _defaults(sampler: Sampler, batch_size: int) -> dict[str, Any]:
    loading = replace(AT_ONCE, sample_on=chosen("sample_on"))
    return {"sampler": sampler, "batch_size": batch_size, "loading": loading, "seed": 3}


def prepare_a_shard(source: Path, folder: Path, index: int, count: int, **options: Any) -> None:
    shard = OneShard(index, count, options.pop("assignment", None))
    lgd.prepare_graph(source, folder, shard=shard, **options)
