"""Small graphs that are opened from shards, and what is drawn of them."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.ahead import Bulk
from lightning_gnn_dist.extensions.shards.index import Shard
from lightning_gnn_dist.extensions.shards.remote_graph import ShardedGraph, ShardedSampler
from lightning_gnn_dist.wire.channel import Channel, open_channel
from tests.ranks import join


def change(file: Path, within: str, **entries: Any) -> None:
    """Change entries of a description in JSON."""
    about = json.loads(file.read_text())
    about[within] |= entries
    file.unlink()  # it may be read-only
    file.write_text(json.dumps(about))


class CountingGraph(ShardedGraph):
    """Knows how often it asked other ranks something."""

    turns = 0

    def ask(self, questions: list[Any]) -> list[Any]:
        self.turns += 1
        return super().ask(questions)


@contextmanager
def joined(rank: int, world_size: int, num_shards: int = 0) -> Iterator[Channel]:
    """The channel to the ranks that hold other shards of as many as there are ranks, or fewer."""
    join(rank, world_size)
    yield open_channel(num_shards or world_size)
    dist.destroy_process_group()


@contextmanager
def opened(
    rank: int, world_size: int, folder: str | Path, num_shards: int = 0, **options: Any
) -> Iterator[CountingGraph]:
    """A graph in shards as a rank has it."""
    with joined(rank, world_size, num_shards) as channel:
        graph = CountingGraph(Shard.open(folder, channel.rank), channel, **options)
        yield graph
        graph.close()


def drawn_of(graph: ShardedGraph, sampler: ShardedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey]) -> Bulk:
    """The batches of a bulk, without their arrays."""
    return graph.seek(graph.answered(graph.draw(sampler, seeds, keys)))


def made_of(
    graph: ShardedGraph, sampler: ShardedSampler, seeds: Sequence[Tensor], keys: Sequence[BatchKey], **options: Any
) -> list[Any]:
    """The batches of a bulk, made at once."""
    return graph.answered(graph.fill(drawn_of(graph, sampler, seeds, keys), **options))
