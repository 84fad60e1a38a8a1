"""Sums over ranks of several hosts: within each host first, between hosts once, and back within each.

    within      all ranks of a host give what they have to its first rank, which adds it up
    between     the first ranks make the sum over hosts, as so many ranks alone would
    within      the first rank gives it to the others

So what leaves a host is what would leave it with one rank. On GPUs NCCL finds a way of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.addresses import kept_on_host
from lightning_gnn_dist.wire.channel import CPU, Background, Channel, open_channel, patience
from lightning_gnn_dist.wire.collectives import Sent, gather_numbers, rank, world_size

THREAD_NAME = "lightning_gnn_dist.wire.hosts"


class Hosts:
    """The hosts of all ranks. Collective.

    Args:
        of_ranks: The number of each rank's host.
    """

    def __init__(self, of_ranks: Sequence[int]) -> None:
        self.world = dist.group.WORLD
        self._of_ranks = of_ranks
        ranks = [[r for r, host in enumerate(of_ranks) if host == own] for own in dict.fromkeys(of_ranks)]
        (own,) = [each for each in ranks if rank() in each]
        self.num_hosts, self._size, self._first = len(ranks), len(own), own[0]
        self.place = ranks.index(own)
        self.is_first = rank() == own[0]
        self.are_shared = max(map(len, ranks)) > 1 and "gloo" in dist.get_backend_config()
        if self.are_shared:
            with kept_on_host():
                groups = [dist.new_group(each, patience(), "gloo") for each in ranks]
                self.between = dist.new_group([each[0] for each in ranks], patience(), "gloo")
            self._within = groups[self.place]

    def sum_(self, flat: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor in RAM by the sum over all ranks, or what else ``op`` makes. Collective, not counted."""
        self.sum_on_first_(flat, op)
        if self.is_first:
            dist.all_reduce(flat, op, self.between)
        self.spread_(flat)

    def sum_on_first_(self, flat: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Replace a tensor by the sum over the ranks of the host, on its first rank; on others it is lost."""
        if self._size > 1:
            dist.reduce(flat, self._first, op, self._within)

    def spread_(self, flat: Tensor) -> None:
        """Replace a tensor by that of the first rank of the host."""
        if self._size > 1:
            dist.broadcast(flat, self._first, self._within)

    def sent_within(self, num_bytes: float) -> Sent:
        """Return what this rank sends for a sum within its host, and for what comes back."""
        return Sent(num_bytes * (self._size - 1 if self.is_first else 1), 0.0)

    def sent(self, num_bytes: float) -> Sent:
        """Return what this rank sends for a sum over all ranks."""
        between = 2 * num_bytes * (self.num_hosts - 1) / self.num_hosts if self.is_first else 0.0
        return Sent(self.sent_within(num_bytes).all + between, between)

    def sent_in_ring(self, num_bytes: float) -> Sent:
        """Return what this rank sends where each sends to the next: the last one of a host sends to another."""
        following = self._of_ranks[(rank() + 1) % world_size()]
        return Sent(num_bytes, num_bytes if following != self._of_ranks[rank()] else 0.0)

    def sent_to(self, num_bytes: Sequence[int], first: int) -> Sent:
        """Return what this rank sends, given the bytes for each rank from ``first`` on."""
        own = self._of_ranks[rank()]
        others = [count for to, count in enumerate(num_bytes, first) if self._of_ranks[to] != own]
        return Sent(sum(num_bytes) - num_bytes[rank() - first], sum(others))


def find_hosts(own: int, num_hosts: int) -> None:
    """Let ranks sum within hosts first from now on, if there are several hosts. Collective.

    Args:
        own: The number of this rank's host, as its launcher says.
        num_hosts: How many there are.
    """
    if num_hosts == 1 or world_size() == 1:
        collectives.hosts = None
    elif collectives.hosts is None or collectives.hosts.world is not dist.group.WORLD:
        collectives.hosts = Hosts([host for (host,) in gather_numbers([own], CPU)])


class GradientSums:
    """Leaves them to DDP. What sends gradients otherwise overrides what it does otherwise."""

    is_of_ddp = True  # whether DDP sends them, in buckets that it makes

    def begin(self, step: int) -> None:
        """Get ready for a backward pass whose gradients are averaged."""

    def finish(self) -> None:
        """Replace the gradients by their means over ranks, after the backward pass. Collective."""

    def close(self) -> None:
        """End what is under way. Not collective."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold of this rank."""
        return {}

    def restore(self, lost: Sequence[Tensor]) -> None:
        """Go on with the ``lost`` that :meth:`state` had in the fit of a checkpoint."""


class HostGradients(GradientSums):
    """Lets DDP average gradients within hosts first, in the background of the backward pass. Make it on all ranks.

    Args:
        ddp: The module, whose parameters are in RAM.
        hosts: The hosts.
    """

    def __init__(self, ddp: DistributedDataParallel, hosts: Hosts) -> None:
        self._hosts, self._thread = hosts, Background(THREAD_NAME)
        # It refuses a hook whose annotations are text.
        ddp.register_comm_hook(None, lambda _, bucket: self._begun(bucket.buffer()))

    def close(self) -> None:
        """End the thread. Not collective."""
        self._thread.close()

    def _begun(self, gradients: Tensor) -> Any:
        future: Any = torch.futures.Future()
        self._thread.submit(lambda: self._average(gradients, future))
        return future

    def _average(self, gradients: Tensor, future: Any) -> None:
        try:
            self._hosts.sum_(gradients.div_(world_size()))
            future.set_result(gradients)
        except BaseException as error:  # raised where DDP waits for it
            future.set_exception(error)


def open_channel_of_means() -> Channel:
    """Return the channel that takes means over all ranks: of these, or of the first rank of each host. Collective."""
    hosts = collectives.hosts
    if hosts is None or not hosts.are_shared:
        return open_channel(world_size())
    return Channel(hosts.between if hosts.is_first else None, hosts.num_hosts, hosts.place, hosts=hosts)
