"""Averages, broadcasts and the count of bytes, on several ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.collectives import flatten, write_back
from tests.ranks import RankError, join, run_ranks


def grouped(rank: int, world_size: int, function: Callable[[int], Any]) -> Any:
    join(rank, world_size)
    return function(rank)


def average(rank: int) -> list[Tensor]:
    tensors = [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * rank,
        torch.tensor(float(rank), dtype=torch.float64),
        torch.tensor([10 * rank]),  # integers: the maximum
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor([1.0 + 1.0j]) * rank,
    ]
    before = [tensor.data_ptr() for tensor in tensors]
    collectives.average_(tensors, weight=1.0 if rank < 2 else 2.0)
    assert before == [tensor.data_ptr() for tensor in tensors]
    return tensors


def test_average_weighs_floats_and_takes_the_maximum_of_integers() -> None:
    mean = (0 * 1 + 1 * 1 + 2 * 2) / 4
    for matrix, number, count, half, _, wave in run_ranks(grouped, 3, average):
        assert torch.equal(matrix, torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * mean)
        assert number.item() == mean
        assert number.dtype == torch.float64
        assert count.tolist() == [20]
        assert half.tolist() == [mean] * 3
        assert wave.tolist() == [(1 + 1j) * mean]


@pytest.mark.gpu
def test_tensors_of_two_devices_meet_on_the_one_that_trains() -> None:
    """Adam keeps its `step` in RAM, and its moments where the parameters are."""
    values = [torch.tensor(float(i)) if i % 2 else torch.arange(4.0) + i for i in range(8)]
    tensors = [value.clone() if i % 2 else value.cuda() for i, value in enumerate(values)]
    given = [*tensors, torch.tensor([7])]
    flats = flatten(given, 2.0, collectives.meeting_place(given))
    assert [flat.device.type for flat, _ in flats] == ["cuda", "cuda"]
    assert len(flats[0][0]) == 4 * 4 + 4 + 1
    flats[0][0].mul_(3.0)  # as if two other ranks held the same
    write_back(flats)
    assert [flat.device.type for flat, _ in flatten(tensors, 1.0, torch.device("cpu"))] == ["cpu"]
    assert [tensor.is_cuda for tensor in tensors] == [True, False] * 4
    assert [tensor.tolist() for tensor in tensors] == [value.tolist() for value in values]


def no_weight(rank: int) -> None:
    collectives.average_([torch.ones(2)], weight=0.0)


def test_weights_must_have_a_positive_sum() -> None:
    with pytest.raises(RankError, match="add up to 0"):
        run_ranks(grouped, 2, no_weight)


def broadcast(rank: int) -> list[Tensor]:
    tensors = [torch.full((2, 2), float(rank)), torch.tensor([rank == 1]), torch.tensor(rank)]
    collectives.broadcast_(tensors, source=1)
    return tensors


def test_broadcast_keeps_types_and_shapes() -> None:
    for floats, flag, number in run_ranks(grouped, 3, broadcast):
        assert floats.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert flag.tolist() == [True]
        assert number.item() == 1


def gather(rank: int) -> tuple[Tensor, Any]:
    return collectives.all_gather_rows(torch.tensor([rank, -rank])), collectives.gather_objects({"rank": rank})


def test_gather() -> None:
    (first, objects), (second, nothing) = run_ranks(grouped, 2, gather)
    assert first.tolist() == second.tolist() == [[0, 0], [1, -1]]
    assert objects == [{"rank": 0}, {"rank": 1}]
    assert nothing is None


def count(rank: int) -> float:
    start = collectives.traffic.bytes_sent
    collectives.average_([torch.ones(999)])  # and one more for the sum of weights
    return collectives.traffic.bytes_sent - start


def test_bytes_are_those_of_a_ring() -> None:
    assert run_ranks(grouped, 4, count) == [2 * 4000 * 3 / 4] * 4


def checked(rank: int) -> tuple[int, str]:
    collectives.check_group(1), collectives.check_group(2)
    try:
        collectives.check_group(3)
    except RuntimeError as error:
        return rank, str(error)
    return rank, ""


def test_a_group_of_an_earlier_fit_is_no_group_of_another_size() -> None:
    for _, said in run_ranks(grouped, 2, checked):
        assert said.startswith("This process is in a group of 2 rank(s) of an earlier fit") and "this fit has 3" in said


def test_alone_everything_is_a_no_op() -> None:
    tensor = torch.tensor([1.0, 2.0])
    collectives.average_([tensor], weight=0.0)
    collectives.broadcast_([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert collectives.all_gather_rows(tensor).tolist() == [[1.0, 2.0]]
    assert collectives.gather_objects("me") == ["me"]
    assert (collectives.rank(), collectives.world_size()) == (0, 1)


def hashed_there(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(collectives.hash_there(collectives.octets(each)) for each in tensors)


@pytest.mark.parametrize("hashed", [collectives.checksum, hashed_there], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.cfloat])
def test_a_checksum_sees_every_bit(dtype: torch.dtype, hashed: Callable[[list[torch.Tensor]], Any]) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {hashed([torch.zeros(3), tensor])}
    held = tensor.view(torch.uint8)
    bits = range(8 * held.numel()) if dtype != torch.bool else range(0, 8 * held.numel(), 8)
    for bit in bits:
        held[bit // 8] ^= 1 << bit % 8
        sums.add(hashed([torch.zeros(3), tensor]))
        held[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + len(bits)
    assert hashed([torch.zeros(3), tensor.clone()]) in sums
    assert hashed([tensor, torch.zeros(3)]) not in sums


def test_a_checksum_takes_empty_and_strided_tensors() -> None:
    matrix, checksum = torch.arange(12.0).view(3, 4), collectives.checksum
    assert checksum([torch.empty(0), matrix.t()]) == checksum([matrix.t().contiguous()]) != 0
