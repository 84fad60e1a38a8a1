"""A checksum that ranks compare."""

import pytest
import torch

from lightning_gnn_dist.wire import octets
from lightning_gnn_dist.wire.collectives import checksum


@pytest.mark.parametrize("where", ["here", "there"], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.cfloat])
def test_a_checksum_sees_every_bit(dtype: torch.dtype, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(octets, "_hash_here", getattr(octets, f"_hash_{where}"))
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {checksum([torch.zeros(3), tensor])}
    held = tensor.view(torch.uint8)
    bits = range(8 * held.numel()) if dtype != torch.bool else range(0, 8 * held.numel(), 8)
    for bit in bits:
        held[bit // 8] ^= 1 << bit % 8
        sums.add(checksum([torch.zeros(3), tensor]))
        held[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + len(bits)
    assert checksum([torch.zeros(3), tensor.clone()]) in sums
    assert checksum([tensor, torch.zeros(3)]) not in sums


def test_a_checksum_takes_empty_and_strided_tensors() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert checksum([torch.empty(0), matrix.t()]) == checksum([matrix.t().contiguous()]) != 0
