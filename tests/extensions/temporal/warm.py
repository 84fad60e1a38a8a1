"""What is loaded once for all ranks: loops that draw by time."""

from collections.abc import Iterator
from typing import Any

from lightning_gnn_dist import Graph, PartitionedDataModule, TemporalSampler


def data_modules(typed: Graph, few: dict[str, Any]) -> Iterator[Any]:
    yield PartitionedDataModule(typed, sampler=TemporalSampler([2, 2], "time"), **few)
