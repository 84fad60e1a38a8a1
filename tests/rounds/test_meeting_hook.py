"""A hook of a user's own meets with those of the package, and goes on where a checkpoint stands."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.optim import Optimizer

from lightning_gnn_dist import EverySteps, LocalSGDStrategy
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.rounds.reducer import Groups
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import fit, same_start

ROUNDS, STEPS = 3, 2


class StepsOfAll(MeetingHook):
    """Counts the local steps of a round, and adds up their means over ranks. Rank 1 counts each twice."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.total = 0.0

    def begin(self, fit: Fit) -> None:
        super().begin(fit)
        self.said.append("begin")

    def begin_round(self) -> None:
        self.said.append(f"round {self.fit.round.round_idx}")
        self.count = torch.zeros(1)

    def before_step(self, optimizer: Optimizer) -> None:
        assert optimizer is self.fit.optimizers[0]
        self.count += 1 + collectives.rank()

    def contribute(self) -> Groups:
        return {"whole": [self.count]}

    def apply(self) -> None:
        self.total += self.count.item()

    def equal(self) -> list[torch.Tensor]:
        return [self.count]

    def state(self) -> dict[str, Any]:
        return {"total": self.total}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.said.append("restore")
        self.total = state["total"]

    def end(self) -> None:
        self.said.append("end")


class WithHook(LocalSGDStrategy):
    def __init__(self, hook: MeetingHook) -> None:
        super().__init__(EverySteps(STEPS), **PATIENCE)
        self.hook = hook

    def hooks(self, fit: Fit) -> list[MeetingHook]:
        return [*super().hooks(fit), self.hook]


def resumed(rank: int, world_size: int, folder: str) -> list[tuple[list[str], float]]:
    found = []
    for rounds, path in ((ROUNDS - 1, None), (ROUNDS, f"{folder}/last.ckpt")):
        hook, saver = StepsOfAll(), ModelCheckpoint(folder, save_last=True, save_top_k=0)
        options: dict[str, Any] = {"max_epochs": rounds, "enable_checkpointing": True, "callbacks": [saver]}
        fit(rank, WithHook(hook), same_start(), devices=world_size, ckpt_path=path, **options)
        found.append((hook.said, hook.total))
    return found


def test_a_hook_of_ones_own_shares_the_exchange_and_is_resumed(tmp_path: Any) -> None:
    for (said, total), (said_again, again) in run_ranks(resumed, 2, str(tmp_path)):
        assert said == ["begin", "round 0", "round 1", "round 2", "end"]
        assert said_again == ["begin", "round 2", "restore", "round 3", "end"]
        assert total == (ROUNDS - 1) * STEPS * 1.5 and again == ROUNDS * STEPS * 1.5


class OfBefore(LocalSGDStrategy):
    def stages(self, fit: Fit) -> list[list[MeetingHook]]:
        return [[StepsOfAll()]]


def test_hooks_that_nobody_would_call_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^OfBefore\.stages went: list all hooks, .* in hooks\(fit\)"):
        OfBefore()
