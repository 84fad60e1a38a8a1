"""Means in fewer bits over members that come and go, held against their true means and what members say they lost."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.rounded import rounded_mean
from lightning_gnn_dist.extensions.rounded.codec import Codec
from lightning_gnn_dist.extensions.rounded.rounded_mean import RoundedMean, means_together
from lightning_gnn_dist.wire.channel import Channel
from tests.wire.threads import Seated, Table

LENGTH = 1300  # six rows, of which the last is not full
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 2.0, "d": 0.5}
Means = dict[str, RoundedMean]


def seated(names: str, start: Callable[[str, Channel], RoundedMean]) -> Means:
    table = Table(len(names))
    return {name: start(name, Seated(table, place)) for place, name in enumerate(names)}


def meet(means: Means, vectors: dict[str, Tensor], weights: dict[str, float], number: int) -> list[Tensor]:
    def mean_of(name: str) -> Tensor:
        return means_together([means[name]], [vectors[name]], weights[name], number)[0]

    with ThreadPoolExecutor(len(means)) as pool:
        return list(pool.map(mean_of, means))


def lost(means: Means, weights: dict[str, float]) -> Tensor:
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
def test_members_add_what_they_have_lost_whoever_comes_and_goes(bits: int) -> None:
    means: Means = {}
    for number, names in enumerate(["abc", "abc", "abd", "ad", "ad", "acd"]):
        before, here = means, "".join(means)

        def start(name: str, channel: Channel, kept: Means = before) -> RoundedMean:
            return kept[name].moved(channel) if name in kept else RoundedMean(channel, Codec(bits), LENGTH)

        means = seated(names, start)
        stays = [len(here) == len(names) and here[place] == name for place, name in enumerate(names)]
        assert [bool(mean.lost[1].any()) for mean in means.values()] == stays  # who averages the piece that it had
        owed, vectors = lost(means, WEIGHTS), drawn(number, names)
        found = meet(means, vectors, WEIGHTS, number)
        assert all(torch.equal(each, found[0]) for each in found)
        expected = true_mean(vectors, WEIGHTS) + owed - lost(means, WEIGHTS)
        assert torch.allclose(found[0].double(), expected, rtol=0, atol=2e-6)
        assert 0 < float((found[0] - true_mean(vectors, WEIGHTS)).abs().max()) < (0.1 if bits == 8 else 0.05)


def test_what_was_lost_at_a_meeting_that_is_held_again_was_not_lost() -> None:
    first = seated("ab", lambda name, channel: RoundedMean(channel, Codec(8), LENGTH))
    meet(first, drawn(0, "ab"), WEIGHTS, 0)
    known = {name: [each.clone() for each in mean.lost] for name, mean in first.items()}
    found = []
    for _ in range(2):
        again = seated("ab", lambda name, channel: first[name].moved(channel))
        found.append(meet(again, drawn(1, "ab"), WEIGHTS, 1)[0])
    assert torch.equal(*found)
    assert all(torch.equal(*pair) for name in "ab" for pair in zip(first[name].lost, known[name], strict=True))


def test_who_does_not_count_changes_nothing_and_owes_what_it_owed() -> None:
    means = seated("abc", lambda name, channel: RoundedMean(channel, Codec(8), LENGTH))
    meet(means, drawn(0, "abc"), WEIGHTS, 0)
    owed, found = means["c"].lost[0].clone(), []
    for vector in (torch.zeros(LENGTH), torch.full((LENGTH,), 9.0)):
        again = seated("abc", lambda name, channel: means[name].moved(channel))
        found.append(meet(again, drawn(1, "ab") | {"c": vector}, WEIGHTS | {"c": 0.0}, 1)[0])
        assert torch.equal(again["c"].lost[0], owed)
    assert torch.equal(*found)


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each member has exchanged."""
    found = Counter[int]()
    exchange = Seated._all_to_all

    def counted(channel: Seated, *args: Any, **how: bool) -> None:
        found[channel.rank] += 1
        exchange(channel, *args, **how)

    monkeypatch.setattr(Seated, "_all_to_all", counted)
    return found


def test_several_means_take_the_exchanges_of_one_and_change_no_bit(exchanges: Counter[int]) -> None:
    shapes = [(8, LENGTH, True), (16, 2 * LENGTH, False), (8, 3, False)]  # bits, length, whether what is lost is kept
    vectors = {name: [torch.randn(length, dtype=torch.float64) for _, length, _ in shapes] for name in "abc"}

    def taken(together: bool) -> list[list[Tensor]]:
        table = Table(3)

        def of(name: str) -> list[Tensor]:
            channel, found = Seated(table, "abc".index(name)), list[Tensor]()
            means = [RoundedMean(channel, Codec(bits), length, keeps_lost=kept) for bits, length, kept in shapes]
            for number in (0, 3):
                if together:
                    found += means_together(means, vectors[name], WEIGHTS[name], number, is_agreed=True)
                    continue
                for place, (mean, vector) in enumerate(zip(means, vectors[name], strict=True), number):
                    found += means_together([mean], [vector], WEIGHTS[name], place)
            return [*found, *means[0].lost]

        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(of, "abc"))

    alone = taken(together=False)
    assert set(exchanges.values()) == {2 * 3 * 3}  # and the lengths of each
    exchanges.clear()
    joined = taken(together=True)
    assert set(exchanges.values()) == {4}  # of two meetings
    for before, after in zip(alone, joined, strict=True):
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(torch.equal(*pair) for other in joined[1:] for pair in zip(joined[0][:6], other[:6], strict=True))


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
