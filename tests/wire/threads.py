"""Ranks that are threads of one process."""

from threading import Barrier

import torch
from torch import Tensor

from lightning_gnn_dist.wire.channel import Channel


class Table:
    """Where threads put down what they send each other."""

    def __init__(self, size: int) -> None:
        self.barrier, self.put = Barrier(size, timeout=60), [list[Tensor]() for _ in range(size)]


class Seated(Channel):
    """A rank that is a thread."""

    def __init__(self, table: Table, rank: int) -> None:
        super().__init__(None, len(table.put), rank)
        self.table = table

    def _all_to_all(
        self, received: Tensor, sent: Tensor, to_receive: list[int], to_send: list[int], **how: bool
    ) -> None:
        self.table.put[self.rank] = list(sent.split(to_send))
        self.table.barrier.wait()
        received.copy_(torch.cat([pieces[self.rank] for pieces in self.table.put]))
        self.table.barrier.wait()
