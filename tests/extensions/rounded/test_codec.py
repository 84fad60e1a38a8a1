"""Rows in fewer bytes: near what they were, right in the mean, and the same for the same draw."""

import math

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.rounded.codec import Codec

DRAWS = 2000


def chance(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def there_and_back(bits: int, rows: Tensor, seed: int = 0) -> Tensor:
    codec = Codec(bits)
    packed = codec.pack(rows, chance(seed))
    assert packed.dtype == torch.uint8
    assert packed.shape == (len(rows), codec.bytes_of_row(rows.shape[1:].numel()))
    return codec.unpack(torch.cat([packed[:1], packed])[1:], rows[:0])  # as one of several pieces


def by_hand(bits: int, rows: Tensor, seed: int) -> Tensor:
    """The same by the definition, number by number."""
    flat, out = rows.reshape(len(rows), -1), rows.clone()
    if bits == 16:
        drawn = torch.randint(1 << 16, flat.shape, generator=chance(seed), dtype=torch.int32)
    else:
        drawn = torch.rand(flat.shape, generator=chance(seed))
    for row, numbers in enumerate(flat.tolist()):
        least, step = min(numbers), (max(numbers) - min(numbers)) / 255
        for place, number in enumerate(numbers):
            share = float(drawn[row, place])
            if bits == 8:
                found = least + step * math.floor((number - least) / step + share)
            else:
                exponent = math.frexp(number)[1] - 8  # a bfloat16 has 8 digits
                found = math.copysign(math.floor(abs(number) / 2.0**exponent + share / 2**16), number) * 2.0**exponent
            out.view(len(rows), -1)[row, place] = found
    return out


@pytest.mark.parametrize("bits", [8, 16])
def test_numbers_are_rounded_as_defined(bits: int) -> None:
    rows = torch.randn(7, 2, 3, generator=chance(5)) * 10
    assert torch.allclose(there_and_back(bits, rows, 3), by_hand(bits, rows, 3), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("bits", "error"), [(8, 10 / 255), (16, 10 / 128)])
def test_the_mean_of_many_draws_is_the_row(bits: int, error: float) -> None:
    rows = torch.rand(3, 5, generator=chance(5)) * 10
    drawn = torch.stack([there_and_back(bits, rows, seed) for seed in range(DRAWS)])
    assert float((drawn - rows).abs().max()) <= error
    assert float((drawn.mean(0) - rows).abs().max()) <= 5 * error / math.sqrt(12 * DRAWS)
    assert torch.equal(there_and_back(bits, rows), there_and_back(bits, rows))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_any_rows_come_back_in_their_type_and_shape(bits: int, dtype: torch.dtype) -> None:
    for shape in ((0, 4), (3, 0), (1, 5), (2, 1), (4, 2, 3)):
        rows = torch.ones(shape, dtype=dtype)
        found = there_and_back(bits, rows)
        assert found.dtype == dtype and torch.equal(found, rows)


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_not_finite_stays_so(bits: int) -> None:
    rows = torch.tensor([[1.0, math.nan, 2.0], [1.0, math.inf, 2.0], [1.0, 1.5, 2.0]])
    found = there_and_back(bits, rows)
    assert not found[0].isfinite().all() and not found[1].isfinite().all() and found[2].isfinite().all()


@pytest.mark.parametrize("bits", [8, 16])
def test_what_is_rounded_away_is_known(bits: int) -> None:
    rows = torch.randn(5, 7, generator=chance(5))
    rows[3, 2], rows[4, 0] = math.inf, math.nan
    codec, lost = Codec(bits), torch.empty_like(rows)
    packed = codec.pack(rows, chance(), lost)
    assert torch.equal(packed, codec.pack(rows, chance()))
    expected = rows - codec.unpack(packed, rows)
    assert torch.equal(lost, torch.where(expected.isfinite(), expected, 0.0)) and float(lost[:3].abs().max()) > 0
