"""Elastic ranks that send fewer bits, against steps by hand."""

from typing import NamedTuple

import pytest

from lightning_gnn_dist import Elastic, EverySteps, Outer, Rounded, TMAStrategy
from lightning_gnn_dist.extensions.rounded.rounded_mean import ROW
from lightning_gnn_dist.wire.collectives import traffic
from tests.ranks import run_ranks
from tests.rounds.means.test_outer import ROUNDS, STEPS, by_hand
from tests.strategies.fitting import Net, State, differs, fit, same_start, state_of

pytest.importorskip("torchft", reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")

OUTER = Outer(momentum=0.5)
NUMBERS_OF_A_ROW = 10 + 4 + 1  # what a rank tells the others, a checksum of each parameter, a weight


class Ended(NamedTuple):
    state: State
    sent: list[float]


def train(rank: int, world_size: int) -> Ended:
    sent: list[float] = []
    Net.on_train_epoch_end = lambda self: sent.append(traffic.bytes_sent)  # type: ignore[method-assign]
    module, elastic = same_start(), Elastic(patience=60, timeout=60, ranks=world_size)
    strategy = TMAStrategy(EverySteps(STEPS), peers=elastic, outer=OUTER, reducer=Rounded(8))
    fit(rank, strategy, module, devices=1, max_epochs=ROUNDS)
    return Ended(state_of(module), sent)


@pytest.mark.usefixtures("lighthouse")
def test_members_send_less_and_end_where_steps_by_hand_do() -> None:
    first, second = run_ranks(train, 2)
    assert differs(first.state, second.state) == 0.0
    assert 0 < differs(first.state, by_hand(2, OUTER)) < 3e-2
    a_meeting = (
        2 * 8 * NUMBERS_OF_A_ROW + 16 + 2 * (ROW + 8)
    )  # rows, weight and length, a piece to the other, the own mean
    assert {after - before for before, after in zip(first.sent, first.sent[1:], strict=False)} == {a_meeting}
