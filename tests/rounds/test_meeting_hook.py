"""A hook of a user's own meets with those of the package, and goes on where a checkpoint stands."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import Optimizer

from lightning_gnn_dist import EverySteps, GrappaStrategy, LocalSGDStrategy, Outer, names
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook, ReplicaState
from lightning_gnn_dist.rounds.partitioned_strategy import states_of
from lightning_gnn_dist.rounds.reducer import Groups
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, State, fit, same_start, state_of

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


class TwoOfOneName(WithHook):
    def hooks(self, fit: Fit) -> list[MeetingHook]:
        return [*super().hooks(fit), StepsOfAll()]


def refused(rank: int, world_size: int) -> tuple[str, int]:
    module = same_start()
    with pytest.raises(ValueError, match="hooks") as told:
        fit(rank, TwoOfOneName(StepsOfAll()), module, devices=world_size)
    return str(told.value), module.trainer.global_step


def test_two_hooks_of_one_name_are_refused_before_a_step() -> None:
    assert all(
        said.startswith("Two hooks of meetings have a state named 'total'") and steps == 0
        for said, steps in run_ranks(refused, 2)
    )


# What ranks do not have alike: a module brings it, no strategy touches it, and extensions are imported when asked.


class Own(ReplicaState):
    def __init__(self, module: nn.Module) -> None:
        layers = [(name, each) for name, each in module.named_modules() if isinstance(each, OwnLinear)]
        self.names = {f"{name}.{each}" for name, layer in layers for each in layer.state_dict()}

    def excluded(self) -> set[str]:
        return self.names


class OwnLinear(nn.Linear):
    """A layer of each rank's own, which puts another buffer in the place of the one before."""

    def __init__(self, *size: int) -> None:
        super().__init__(*size)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + x.detach().mean()
        return super().forward(x)

    def replica_state(self, module: nn.Module) -> ReplicaState:
        return Own(module)


def net() -> Net:
    torch.manual_seed(0)
    module = Net(optimizer="Adam")
    module.layers[4] = OwnLinear(8, 1)
    return module


def trained(rank: int, world_size: int, kind: str) -> State:
    strategies: dict[str, Any] = {
        "grappa": lambda: GrappaStrategy(**PATIENCE),
        "mean": lambda: LocalSGDStrategy(EverySteps(3), average_optimizer=True, **PATIENCE),
        "outer": lambda: LocalSGDStrategy(EverySteps(3), outer=Outer(momentum=0.5), **PATIENCE),
    }
    module = net()
    fit(rank, strategies[kind](), module, devices=world_size)
    return state_of(module)


@pytest.mark.parametrize("kind", ["grappa", "mean", "outer"])
def test_what_a_rank_has_alone_stays_its_own(kind: str) -> None:
    first, second = run_ranks(trained, 2, kind)
    own = {"layers.4.weight", "layers.4.bias", "layers.4.seen"}
    differing = {name for name in first if not torch.equal(first[name], second[name])}
    assert differing == own
    start = net().state_dict()
    assert not any(torch.equal(start[name], first[name]) for name in first)  # all of it has trained


def test_one_state_is_of_all_modules_of_a_kind() -> None:
    (own,) = states_of(nn.Sequential(OwnLinear(2, 2), OwnLinear(2, 2), nn.Embedding(4, 2)))
    assert isinstance(own, Own) and len(own.excluded()) == 6


def test_an_extension_that_was_taken_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.EXTENSIONS, "sparse rows", "lightning_gnn_dist.extensions.no_such.file:Tables")
    with pytest.raises(ImportError, match="needs 'sparse rows', which this copy of lightning_gnn_dist lacks"):
        states_of(nn.Embedding(3, 2, sparse=True))
