"""Sums over ranks of several hosts: the sums of all ranks, for the bytes between hosts of one rank each."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.collectives import Sent, traffic
from lightning_gnn_dist.wire.hosts import HostGradients, find_hosts
from tests.ranks import join, run_ranks

HOSTS, NUMBERS = 2, 1000
WEIGHTS = [1.0, 0.0, 2.5, 0.5]


def of_rank(rank: int) -> Tensor:
    return torch.randn(NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def mean_by_hand() -> Tensor:
    return sum(weight * of_rank(rank) for rank, weight in enumerate(WEIGHTS)) / sum(WEIGHTS)  # type: ignore[return-value]


def sent_by(work: Callable[[], object]) -> Sent:
    before = Sent(traffic.bytes_sent, traffic.bytes_between_hosts)
    work()
    return Sent(traffic.bytes_sent - before.all, traffic.bytes_between_hosts - before.between_hosts)


def meet(rank: int, world_size: int, hosts: list[int]) -> dict[str, Any]:
    join(rank, world_size)
    find_hosts(hosts[rank], HOSTS)
    find_hosts(hosts[rank], HOSTS)  # of a second fit: nothing is made anew
    mean, count = of_rank(rank), torch.tensor([rank])
    sent = sent_by(lambda: collectives.average_([mean, count], WEIGHTS[rank]))
    sent_row = sent_by(lambda: collectives.all_gather_rows(torch.zeros(1)))
    dist.barrier()
    return {"mean": mean, "count": int(count), "sent": sent, "row": sent_row}


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 1, 1]], ids=str)
def test_a_mean_is_that_of_all_ranks_and_leaves_a_host_once(hosts: list[int]) -> None:
    found = run_ranks(meet, 4, hosts)
    num_bytes = 8 * (NUMBERS + 1) + 8  # and the weight, and the integer
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["mean"], mean_by_hand(), rtol=0, atol=1e-12)
        assert one["mean"].equal(found[0]["mean"]) and one["count"] == 3
        others, is_first = hosts.count(hosts[rank]) - 1, rank == hosts.index(hosts[rank])
        between = 2 * num_bytes * (HOSTS - 1) / HOSTS if is_first else 0.0
        within = num_bytes * (others if is_first else 1)
        assert one["sent"] == Sent(within + between, between)
        assert one["row"] == Sent(12, 12 if hosts[(rank + 1) % 4] != hosts[rank] else 0)


def go_back(rank: int, world_size: int) -> list[Tensor]:
    join(rank, world_size)
    find_hosts(rank // 2, HOSTS)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600), nn.Linear(600, 1)).double())
    gradients = HostGradients(ddp, collectives.hosts)
    ddp(of_rank(rank)[:30].view(10, 3)).square().mean().backward()
    gradients.close()
    dist.barrier()
    return [parameter.grad for parameter in ddp.parameters()]  # type: ignore[misc]


def test_gradients_are_means_over_all_ranks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600), nn.Linear(600, 1)).double()
    torch.stack([model(of_rank(rank)[:30].view(10, 3)).square().mean() for rank in range(4)]).mean().backward()
    for found in run_ranks(go_back, 4):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=1e-12)
