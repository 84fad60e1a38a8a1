"""Rows sent between ranks and their gradients sent back, against one process that has all rows."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist.extensions.exchange.row_exchange import Route, RowExchange, Thrift, tied
from lightning_gnn_dist.wire.channel import open_channel, patience
from tests.ranks import run_ranks

COUNTS = [4, 0, 3]  # rows of each rank
ASKED: dict[tuple[int, int], list[int]] = {(0, 2): [2, 0], (1, 0): [1, 1, 3], (1, 2): [1], (2, 0): [3, 0]}
SECONDS = timedelta(seconds=30)
DRAWS = 300


def rows_of(rank: int) -> Tensor:
    return torch.randn(COUNTS[rank], 2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def factors(rank: int, count: int) -> Tensor:
    return torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(10 + rank), dtype=torch.float64)


def route_of(rank: int) -> Route:
    told = [torch.tensor(ASKED.get((other, rank), []), dtype=torch.int64) for other in range(3)]
    lengths = [len(ASKED.get((rank, other), [])) for other in range(3)]
    places = torch.arange(sum(lengths)).flip(0)  # received rows may stand anywhere
    return Route(told, list(places.split(lengths)))


def exchanged(rank: int, world_size: int, device: str, backend: str) -> tuple[Tensor, Tensor]:
    if backend == "nccl":
        device = f"{device}:{rank}"
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=SECONDS)
    assert patience() == SECONDS
    channel = open_channel(world_size, torch.device(device))
    assert channel.device.type == ("cuda" if backend == "nccl" else "cpu")
    rows = rows_of(rank).to(device).requires_grad_()
    exchange = RowExchange(channel)
    gathered, thread = exchange.gather(rows, exchange.begin(), route_of(rank), 0)
    loss = (tied(gathered, thread) * factors(rank, len(gathered)).to(device)).sum()
    loss = loss if rank != 2 else tied(rows[:0], thread).sum()  # of one rank the loss depends on nothing
    loss.backward()
    assert rows.grad is not None
    channel.close()
    return gathered.detach().cpu(), rows.grad.cpu()


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "gloo"),
        pytest.param("cuda", "gloo", marks=pytest.mark.gpu),
        pytest.param("cuda", "nccl", marks=pytest.mark.gpu),
    ],
)
def test_rows_and_gradients_are_those_of_one_process(device: str, backend: str) -> None:
    if backend == "nccl" and torch.cuda.device_count() < 3:
        pytest.skip("fewer than three CUDA devices")
    leaves = [rows_of(rank).requires_grad_() for rank in range(3)]
    loss, expected = torch.zeros((), dtype=torch.float64), []
    for rank in range(3):
        pieces = [leaves[other][ASKED.get((rank, other), [])] for other in range(3)]
        expected.append(torch.cat([leaves[rank], torch.cat(pieces).flip(0)]))
        loss = loss + ((expected[rank] * factors(rank, len(expected[rank]))).sum() if rank != 2 else 0.0)
    loss.backward()
    for rank, (gathered, gradient) in enumerate(run_ranks(exchanged, 3, device, backend)):
        assert torch.equal(gathered, expected[rank])
        assert torch.allclose(gradient, leaves[rank].grad, rtol=0, atol=1e-14)  # type: ignore[arg-type]


def drawn(rank: int, world_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """The mean of what is gathered, and of the gradients, over many draws."""
    dist.init_process_group("gloo", timeout=SECONDS)
    exchange, sums, numbers = RowExchange(open_channel(world_size), 5, Thrift(share=0.5)), [], []
    for step in range(1, DRAWS + 1):
        exchange.begin_step(step)
        rows = rows_of(rank).requires_grad_()
        gathered, thread = exchange.gather(rows, exchange.begin(), route_of(rank), 0)
        (tied(gathered, thread) * factors(rank, len(gathered))).sum().backward()
        sums.append((gathered.detach(), rows.grad))
        numbers.append(int(gathered[len(rows) :].flatten(1).any(1).sum()))
    exchange.close()
    rows, gradients = (torch.stack(list(each)).mean(0) for each in zip(*sums, strict=True))
    return rows, gradients, numbers


@pytest.mark.slow
def test_a_share_of_the_rows_is_right_in_the_mean() -> None:
    leaves = [rows_of(rank).requires_grad_() for rank in range(3)]
    of_ranks = run_ranks(drawn, 3)
    for rank, (rows, _, numbers) in enumerate(of_ranks):
        pieces = [leaves[other][ASKED.get((rank, other), [])] for other in range(3)]
        expected = torch.cat([leaves[rank], torch.cat(pieces).flip(0)])
        (expected * factors(rank, len(expected))).sum().backward()
        assert torch.allclose(rows, expected, rtol=0, atol=0.6)
        assert set(numbers) == {sum((len(piece) + 1) // 2 for piece in pieces)}
    for (_, gradients, _), leaf in zip(of_ranks, leaves, strict=True):
        assert torch.allclose(gradients, leaf.grad, rtol=0, atol=0.6)  # type: ignore[arg-type]
