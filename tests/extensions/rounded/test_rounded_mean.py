"""Means in fewer bits over members that come and go, held against their true means and what members say they lost."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.rounded import rounded_mean
from lightning_gnn_dist.extensions.rounded.reducers import RoundedMeans
from lightning_gnn_dist.extensions.rounded.rounded_mean import Codec, RoundedMean, means_together
from lightning_gnn_dist.rounds.reducer import is_rounded
from lightning_gnn_dist.wire.channel import Channel
from tests.wire.threads import Seated, Table

LENGTH = 1300  # six rows, of which the last is not full
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 2.0, "d": 0.5}
Members = dict[str, RoundedMean]


def seated(names: str, start: Callable[[str, Channel], RoundedMean]) -> Members:
    table = Table(len(names))
    return {name: start(name, Seated(table, place)) for place, name in enumerate(names)}


def meet(means: Members, vectors: dict[str, Tensor], weights: dict[str, float], number: int) -> list[Tensor]:
    def mean_of(name: str) -> Tensor:
        return means_together([means[name]], [vectors[name]], weights[name], number)[0]

    with ThreadPoolExecutor(len(means)) as pool:
        return list(pool.map(mean_of, means))


def lost(means: Members, weights: dict[str, float]) -> Tensor:
    """What members have lost of their numbers, in the mean, and of the pieces of the mean itself."""
    total = sum(weights[name] for name in means)
    own = sum(weights[name] / total * mean.lost[0].double().view(-1)[:LENGTH] for name, mean in means.items())
    return own + torch.cat([mean.lost[1].double().view(-1) for mean in means.values()])[:LENGTH]


def drawn(number: int, names: Sequence[str]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return {name: torch.randn(LENGTH, generator=generator, dtype=torch.float64) for name in names}


def true_mean(vectors: dict[str, Tensor], weights: dict[str, float]) -> Tensor:
    total = sum(weights[name] for name in vectors)
    return torch.stack([weights[name] / total * vector for name, vector in vectors.items()]).sum(0)


@pytest.mark.parametrize("bits", [8, 16])
def test_ranks_add_what_they_have_lost(bits: int) -> None:
    means = seated("abc", lambda name, channel: RoundedMean(channel, Codec(bits), LENGTH))
    for number in range(4):
        owed, vectors = lost(means, WEIGHTS), drawn(number, "abc")
        found = meet(means, vectors, WEIGHTS, number)
        assert all(torch.equal(each, found[0]) for each in found)
        expected = true_mean(vectors, WEIGHTS) + owed - lost(means, WEIGHTS)
        assert torch.allclose(found[0].double(), expected, rtol=0, atol=2e-6)
        assert 0 < float((found[0] - true_mean(vectors, WEIGHTS)).abs().max()) < (0.1 if bits == 8 else 0.05)


def test_who_does_not_count_changes_nothing_and_owes_what_it_owed() -> None:
    found = []
    for vector in (torch.zeros(LENGTH), torch.full((LENGTH,), 9.0)):
        means = seated("abc", lambda name, channel: RoundedMean(channel, Codec(8), LENGTH))
        meet(means, drawn(0, "abc"), WEIGHTS, 0)
        owed = means["c"].lost[0].clone()
        found.append(meet(means, drawn(1, "abc") | {"c": vector}, WEIGHTS | {"c": 0.0}, 1)[0])
        assert torch.equal(means["c"].lost[0], owed)
    assert torch.equal(*found)


def test_without_any_weight_all_members_refuse() -> None:
    means = seated("ab", lambda name, channel: RoundedMean(channel, Codec(8), LENGTH))
    with pytest.raises(ValueError, match=r"add up to 0\.0"):
        meet(means, drawn(0, "ab"), {"a": 0.0, "b": 0.0}, 0)


def test_many_rows_are_rounded_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for at_once in (1, 2, 1 << 12):
        monkeypatch.setattr(rounded_mean, "_ROWS_AT_ONCE", at_once)
        means = seated("abc", lambda name, channel: RoundedMean(channel, Codec(8), LENGTH))
        found.append([meet(means, drawn(number, "abc"), WEIGHTS, number)[0] for number in range(2)])
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


# Which tensors of a meeting are rounded. What rounding does is in test_outer.py and test_rounded_mean.py.


def some(number: float) -> list[Tensor]:
    whole, count = torch.full((3,), int(number)), torch.tensor(number)
    return [torch.full((2, 2), number), torch.full((3,), complex(number, -number)), whole, count]


def test_counts_and_whole_numbers_are_not_rounded_and_complex_numbers_are_two() -> None:
    assert [is_rounded(each) for each in some(1.0)] == [True, True, False, False]
    table = Table(2)

    def meet(rank: int) -> list[Tensor]:
        means, (real, complex_, _, _) = RoundedMeans(8), some([1.0, 5.0][rank])
        means._channel = Seated(table, rank)
        means.mean_({"moments": [real, complex_]}, [3.0, 1.0][rank])
        return [real, complex_]

    with ThreadPoolExecutor(2) as pool:
        for real, complex_ in pool.map(meet, range(2)):
            assert torch.equal(real, some(2.0)[0]) and torch.equal(complex_, some(2.0)[1])


# Rows in fewer bytes: near what they were, right in the mean, and the same for the same draw.


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
