"""Meetings that send few bits: how many bytes that saves, how near the means are, and a run that is resumed."""

from functools import partial
from pathlib import Path

import pytest

from lightning_gnn_dist import GrappaStrategy, LocalSGDStrategy, Outer, Overlapped, Rounded
from lightning_gnn_dist.extensions.rounded.rounded_mean import ROW
from lightning_gnn_dist.wire.collectives import traffic
from tests.ranks import run_ranks
from tests.rounds.means.test_outer import stopped_and_resumed
from tests.strategies.fitting import State, differs, fit, local_sgd, same_start, state_of


def sent(rank: int, world_size: int, reducers: list[Rounded | None]) -> tuple[list[State], list[float]]:
    states, counted = [], []
    for reducer in reducers:
        numbers = []
        for rounds in (1, 3):
            module, before = same_start(), traffic.bytes_sent
            fit(rank, local_sgd(outer=Outer.diloco(), reducer=reducer), module, devices=world_size, max_epochs=rounds)
            numbers.append(traffic.bytes_sent - before)
        states.append(state_of(module))
        counted.append((numbers[1] - numbers[0]) / 2)
    return states, counted


def test_fewer_bits_are_fewer_bytes_and_nearly_the_same() -> None:
    of_ranks = run_ranks(sent, 2, [None, Rounded(16), Rounded(8)])
    for (exact, sixteen, eight), (whole, half, quarter) in of_ranks:
        assert 0 < differs(exact, sixteen) < 3e-3
        assert 0 < differs(exact, eight) < 3e-2
        assert differs(eight, of_ranks[0][0][2]) == differs(sixteen, of_ranks[0][0][1]) == 0.0
        rest = whole - 4 * (1 + sum(tensor.numel() for tensor in exact.values()))  # the ring of two ranks
        assert half - rest == 8 + 2 * (2 * ROW)  # the weight; a row to the other rank, and the mean of the own row
        assert quarter - rest == 8 + 2 * (ROW + 8)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(partial(stopped_and_resumed, reducer=Rounded(8)), 2, tmp_path):
        assert differs(whole, resumed) == 0.0


def test_what_cannot_send_means_is_refused() -> None:
    with pytest.raises(TypeError, match=r"reducer must say how means are sent, as Rounded\(8\) does, .* got 8"):
        LocalSGDStrategy(reducer=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reducer must say how means are sent"):
        GrappaStrategy(reducer=Rounded)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bits must be one of \[8, 16\], got 4"):
        Rounded(4)  # type: ignore[arg-type]


def late_gradients(rank: int, world_size: int) -> str:
    try:
        fit(rank, GrappaStrategy(reducer=Overlapped()), same_start(), devices=world_size)
    except ValueError as error:
        return str(error)
    return ""


def test_gradients_of_a_step_cannot_come_late() -> None:
    assert all("use reducer=Rounded(8), or a strategy of rounds" in told for told in run_ranks(late_gradients, 2))
