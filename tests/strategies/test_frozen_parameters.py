"""Parameters without gradients that ranks change, a GAN's frozen half or a teacher, are equal after meetings."""

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gnn_dist import EverySeconds, EverySteps, LocalSGDStrategy, TMAStrategy
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import State, differs, fit, local_sgd, state_of

STEPS, ROUNDS, NUM_RANKS = 3, 3, 3
ENCODER_BYTES = 8 * 200_000


class Frozen(pl.LightningModule):
    """A critic that is frozen while the maker learns, at meetings too; a teacher of the critic; a large encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.critic, self.maker = (nn.Linear(2, 1, dtype=torch.float64) for _ in range(2))
        self.teacher = copy.deepcopy(self.critic).requires_grad_(False)
        self.encoder = nn.Parameter(torch.ones(ENCODER_BYTES // 8, dtype=torch.float64), requires_grad=False)

    def training_step(self, batch: Tensor) -> None:
        for net, optimizer in zip((self.critic, self.maker), self.optimizers(), strict=True):  # type: ignore[arg-type]
            net.requires_grad_(True)
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.critic, self.maker, batch))
            optimizer.step()
            self.critic.requires_grad_(False)

    def on_train_start(self) -> None:
        self.bytes_at_start = collectives.traffic.bytes_sent

    def on_train_batch_end(self, *args: Any) -> None:
        follow(self.teacher, self.critic)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(net.parameters(), lr=0.1) for net in (self.critic, self.maker)]


def loss_of(critic: nn.Module, maker: nn.Module, batch: Tensor) -> Tensor:
    return (critic(batch) + maker(batch) - batch.sum(1, keepdim=True)).square().mean()


def follow(teacher: nn.Module, critic: nn.Module) -> None:
    for own, other in zip(teacher.parameters(), critic.parameters(), strict=True):
        own.data.lerp_(other.data, 0.2)  # past what autograd sees: the tensor's version stays as it is


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(STEPS * ROUNDS)]


def loader(rank: int) -> DataLoader[Any]:
    return DataLoader(batches(rank), batch_size=None)  # type: ignore[arg-type]


def learn(rank: int, world_size: int) -> tuple[State, float]:
    module = Frozen()
    fit(rank, local_sgd(EverySteps(STEPS)), module, devices=world_size, train=loader(rank), max_epochs=ROUNDS)
    return state_of(module), collectives.traffic.bytes_sent - module.bytes_at_start


def learn_by_hand() -> State:
    """Batch after batch on each rank; the mean of all nets after the last of a round, before the teacher's step."""
    replicas = [Frozen() for _ in range(NUM_RANKS)]
    data = [batches(rank) for rank in range(NUM_RANKS)]
    for step in range(STEPS * ROUNDS):
        for replica, own in zip(replicas, data, strict=True):
            for net in (replica.critic, replica.maker):
                weights = list(net.parameters())
                slopes = torch.autograd.grad(loss_of(replica.critic, replica.maker, own[step]), weights)
                for weight, slope in zip(weights, slopes, strict=True):
                    weight.data -= 0.1 * slope
        if step % STEPS == STEPS - 1:
            for same in zip(*(replica.parameters() for replica in replicas), strict=True):
                mean = torch.stack([weight.data for weight in same]).mean(0)
                for weight in same:
                    weight.data = mean.clone()
        for replica in replicas:
            follow(replica.teacher, replica.critic)
    assert differs(state_of(replicas[0]), state_of(replicas[1])) == 0.0
    return state_of(replicas[0])


def test_what_is_frozen_at_a_meeting_and_has_changed_is_averaged_and_nothing_else_is_sent() -> None:
    outcomes, by_hand = run_ranks(learn, NUM_RANKS), learn_by_hand()
    for state, bytes_sent in outcomes:
        assert differs(state, outcomes[0][0]) == 0.0
        assert differs(state, by_hand) < 1e-14
        assert bytes_sent < ENCODER_BYTES / 100
    assert differs(by_hand, state_of(Frozen())) > 0.01


def stop_and_resume(rank: int, world_size: int, folder: Path) -> float:
    save = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    options: dict[str, Any] = {"devices": world_size, "train": loader(rank), "enable_checkpointing": True}
    options |= {"callbacks": [save], "max_epochs": ROUNDS}
    whole, resumed = Frozen(), Frozen()
    fit(rank, local_sgd(EverySteps(STEPS)), whole, **options)
    fit(rank, local_sgd(EverySteps(STEPS)), resumed, ckpt_path=str(folder / "epoch=0.ckpt"), **options)
    return differs(state_of(whole), state_of(resumed))


def test_a_resumed_run_has_the_same_teacher_to_the_bit(tmp_path: Path) -> None:
    assert run_ranks(stop_and_resume, NUM_RANKS, tmp_path) == [0.0] * NUM_RANKS


class TakesTurns(Frozen):
    """The ranks are at different turns when they meet."""

    def training_step(self, batch: Tensor) -> None:
        super().training_step(batch)
        self.critic.requires_grad_(self.global_rank == 0)


class Gradients(MeetingHook):
    """Would exchange the gradients of what is trained."""

    def sizes(self) -> list[int]:
        return [sum(each.numel() for each in self.fit.lightning_module.parameters() if each.requires_grad)]


class SharesGradients(LocalSGDStrategy):
    def hooks(self, fit: Fit) -> list[MeetingHook]:
        return [*super().hooks(fit), Gradients()]


def meet_in_turns(rank: int, world_size: int, strategy: Any) -> State:
    module = TakesTurns()
    fit(rank, strategy, module, devices=world_size, train=loader(rank), max_epochs=2)
    return state_of(module)


def test_what_is_frozen_on_some_ranks_only_is_averaged() -> None:
    first, second = run_ranks(meet_in_turns, 2, TMAStrategy(EverySeconds(0.05), **PATIENCE))
    assert differs(first, second) == 0.0


def test_where_gradients_are_averaged_too_it_is_refused() -> None:
    with pytest.raises(RankError, match="a parameter is frozen where gradients are averaged too, on some ranks only"):
        run_ranks(meet_in_turns, 2, SharesGradients(EverySteps(STEPS), **PATIENCE))
