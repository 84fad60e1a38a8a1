"""Ranks on processors of different kinds, whose results differ in the last digits, have equal replicas all the same."""

import pytest
import torch

from lightning_gnn_dist import EverySteps, LocalSGDStrategy
from lightning_gnn_dist.rounds import meeting, premises
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, fit, same_start, state_of


class Computes(LocalSGDStrategy):
    """What each rank computes for itself at a meeting comes out differently, by so much."""

    def __init__(self, error: float) -> None:
        super().__init__(EverySteps(3), average_optimizer=True, **PATIENCE)
        self.error = error

    def end_round(self) -> None:
        super().end_round()
        for parameter in self._module().parameters():
            parameter.data *= 1 + self.error * self.global_rank


def train(rank: int, world_size: int, error: float, processors: list[int]) -> tuple[State, list[str]]:
    premises.processor_of = lambda device: processors[rank]
    said: list[str] = []
    meeting.rank_zero_info = said.append
    module = same_start(optimizer="Adam", batch_norm=True)
    fit(rank, Computes(error), module, devices=world_size)
    return state_of(module), [line for line in said if "processors" in line]


def test_replicas_that_differ_in_the_last_digits_are_those_of_rank_0() -> None:
    by_rank_0 = run_ranks(train, 2, 0.0, [1, 1])[0][0]
    outcomes = run_ranks(train, 2, 1e-6, [1, 2])
    assert [differs(state, by_rank_0) for state, _ in outcomes] == [0.0, 0.0]
    assert len(outcomes[0][1]) == 1 and "all take rank 0's" in outcomes[0][1][0]


@pytest.mark.parametrize(("error", "processors"), [(0.1, [1, 2]), (1e-6, [1, 1])])
def test_what_processors_do_not_explain_is_refused(error: float, processors: list[int]) -> None:
    message = r"replicas of ranks \[1\] differ from that of rank 0, by more than processors of different kinds explain"
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(train, 2, error, processors)
    assert set(caught.value.failures) == {0, 1}


def test_equal_processors_have_equal_names(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    own = premises.processor_of(cpu)
    assert own == premises.processor_of(cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SOME OTHER")
    assert premises.processor_of(cpu) != own
