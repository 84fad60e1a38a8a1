"""Parameters that not all ranks use, or that are frozen and freed in a fit of Grappa."""

import copy
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import HeteroData
from torch_geometric.nn import HeteroConv, SAGEConv

from lightning_gnn_dist import EverySeconds, EverySteps, LocalSGDStrategy, TMAStrategy
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, hear, local_sgd, state_of
from tests.strategies.weighted_fitting import grappa


class Heads(Net):
    """The head of a rank alone changes what it returns; a table of which rows take part; a head that nobody uses."""

    def __init__(self, users: list[int]) -> None:
        torch.manual_seed(3)
        super().__init__(lr=0.05)
        self.head, self.table = nn.Linear(1, 1), nn.Embedding(5, 1)
        self.users = users
        self.double()

    def training_step(self, batch: list[Tensor]) -> Tensor:
        x, y = (each.double() for each in batch)
        return self.loss(x, y, self.global_rank in self.users)

    def loss(self, x: Tensor, y: Tensor, uses: bool) -> Tensor:
        out = self.layers(x)
        if uses:
            out = self.head(out) + self.table(torch.arange(len(x)) % 3)
        return nn.functional.mse_loss(out, y)


def by_hand(users: list[int], world_size: int, per_step: int = 1, epochs: int = 2) -> State:
    """SGD along the mean of all ranks' gradients; a rank that does not use a parameter has a gradient of zero."""
    module = Heads(users)
    parameters = list(module.parameters())
    data = [[(x.double(), y.double()) for x, y in batches(rank)] for rank in range(world_size)]
    for _ in range(epochs):
        for start in range(0, len(data[0]), per_step):
            total = [torch.zeros_like(parameter) for parameter in parameters]
            for rank in range(world_size):
                for x, y in data[rank][start : start + per_step]:
                    loss = module.loss(x, y, rank in users) / (per_step * world_size)
                    own = torch.autograd.grad(loss, parameters, allow_unused=True)
                    total = [a if b is None else a + b for a, b in zip(total, own, strict=True)]
            with torch.no_grad():
                for parameter, gradient in zip(parameters, total, strict=True):
                    parameter -= 0.05 * gradient
    return state_of(module)


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({}, {"accumulate_grad_batches": 2}),
    ({"find_unused_parameters": True}, {}),
]


def used_by_some(rank: int, world_size: int) -> list[State]:
    states = []
    for options, limits in CASES:
        module = Heads([1])
        fit(rank, grappa(**options), module, devices=world_size, max_epochs=2, **limits)
        states.append(state_of(module))
    return states


def test_who_does_not_use_a_parameter_has_a_gradient_of_zero() -> None:
    expected = [by_hand([1], 2, limits.get("accumulate_grad_batches", 1)) for _, limits in CASES]
    for states in run_ranks(used_by_some, 2):
        assert max(differs(*pair) for pair in zip(states, expected, strict=True)) < 1e-12


def used_by_none(rank: int, world_size: int, limits: dict[str, Any]) -> None:
    fit(rank, grappa(), Heads([]), devices=world_size, **limits)


@pytest.mark.parametrize("limits", [{}, {"max_epochs": 1, "limit_train_batches": 1}], ids=["some steps", "one step"])
def test_a_parameter_that_nobody_uses_is_named(limits: dict[str, Any]) -> None:
    with pytest.raises(RankError, match=r"head\.weight, head\.bias, table\.weight had no part") as error:
        run_ranks(used_by_none, 2, limits)
    assert all("find_unused_parameters=True" in text for text in error.value.failures.values())


EDGES = [("author", "writes", "paper"), ("paper", "is_by", "author")]


class Types(pl.LightningModule):
    """Two layers for papers and authors. No loss reads what the last one makes of authors."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList(
            HeteroConv({kind: SAGEConv((width, width), 4) for kind in EDGES}) for width in (6, 4)
        )

    def training_step(self, batch: HeteroData) -> Tensor:
        x = batch.x_dict
        for conv in self.convs:
            x = {kind: rows.tanh() for kind, rows in conv(x, batch.edge_index_dict).items()}
        return nn.functional.cross_entropy(x["paper"], batch["paper"].y)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.01)


def typed_batches(rank: int, count: int = 4) -> DataLoader[Any]:
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(count):
        data = HeteroData()
        for kind in ("paper", "author"):
            data[kind].x = torch.randn(9, 6, generator=generator)
        for kind in EDGES:
            data[kind].edge_index = torch.randint(9, (2, 30), generator=generator)
        data["paper"].y = torch.randint(4, (9,), generator=generator)
        found.append(data)
    return DataLoader(found, batch_size=None, collate_fn=lambda data: data)  # type: ignore[arg-type]


def typed_and_resumed(rank: int, world_size: int, folder: str) -> tuple[list[State], int]:
    """Two epochs; the second of them from a checkpoint; two with DDP's own search; how often a line was written."""
    lines, states = hear(), []
    for looks, ckpt_path in ((False, None), (False, f"{folder}/epoch=0.ckpt"), (True, None)):
        module, saves = Types(), ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)
        options: dict[str, Any] = {"max_epochs": 2, "enable_checkpointing": True, "callbacks": [saves]}
        strategy, data = grappa(find_unused_parameters=looks), typed_batches(rank)
        fit(rank, strategy, module, devices=world_size, train=data, ckpt_path=ckpt_path, **options)
        states.append(state_of(module))
    return states, sum("convs.1.convs." in line and "count as zero" in line for line in lines)


def test_last_weights_of_other_types_count_as_zero_and_are_told_of_once_a_fit(tmp_path: Path) -> None:
    for rank, ((whole, resumed, of_search), told) in enumerate(run_ranks(typed_and_resumed, 3, str(tmp_path))):
        assert differs(whole, resumed) == 0.0 and differs(whole, of_search) < 1e-5
        assert told == (2 if rank == 0 else 0)


class Freezes(pl.Callback):
    """Trains the first layer until an epoch, or from it on."""

    def __init__(self, *, epoch: int, ranks: list[int], trains: bool) -> None:
        self.epoch, self.ranks, self.trains = epoch, ranks, trains

    def on_train_epoch_start(self, trainer: pl.Trainer, module: Any) -> None:
        if trainer.current_epoch == self.epoch and trainer.global_rank in self.ranks:
            module.layers[0].requires_grad_(self.trains)


class Unfreezes(BaseFinetuning):
    """Freezes the first layer before the fit, and trains it from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)


class Head(Net):
    """Its optimizer begins with what trains, as a fine-tuning needs it."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], self.lr)


def fine_tuned(rank: int, world_size: int, callbacks: list[pl.Callback], options: dict[str, Any]) -> list[State]:
    """The weights at the start, and after each of three epochs."""
    torch.manual_seed(2)
    module, states = Head(), list[State]()
    keeps = pl.callbacks.LambdaCallback(on_train_epoch_start=lambda _, module: states.append(state_of(module)))
    fit(rank, grappa(**options), module, devices=world_size, callbacks=[*callbacks, keeps])
    return [*states, state_of(module)]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=str)
def test_a_fine_tuning_may_unfreeze_what_was_frozen_at_the_start(options: dict[str, Any]) -> None:
    check_fine_tuning(options)


def test_a_layer_may_be_frozen_and_freed() -> None:
    both = [Freezes(epoch=1, ranks=[0, 1], trains=False), Freezes(epoch=2, ranks=[0, 1], trains=True)]
    check_fine_tuning({}, both, [True, False, True])


def check_fine_tuning(
    options: dict[str, Any], callbacks: Any = None, moves: Sequence[bool] = (False, True, True)
) -> None:
    """In which epochs the first layer moves, and that replicas end alike."""
    first, second = run_ranks(fine_tuned, 2, callbacks or [Unfreezes()], options)
    assert [not a["layers.0.weight"].equal(b["layers.0.weight"]) for a, b in pairwise(first)] == list(moves)
    assert differs(first[-1], second[-1]) == 0.0


class Toggled(Net):
    """Two optimizers in turns, of which each keeps its last gradient until its next turn."""

    automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, *_, last = self.layers.parameters()
        return [torch.optim.SGD([parameter], 0.05) for parameter in (first, last)]


def toggled(rank: int, world_size: int) -> State:
    module = Toggled()
    for parameter in list(module.layers.parameters())[1:-1]:
        parameter.requires_grad_(False)
    fit(rank, grappa(), module, devices=world_size)
    return state_of(module)


def test_gradients_of_earlier_steps_of_others_are_no_gradients() -> None:
    first, second = run_ranks(toggled, 2)
    assert differs(first, second) == 0.0 and differs(first, state_of(Toggled())) > 0


def frozen_on_one(rank: int, world_size: int) -> None:
    calls = [Freezes(epoch=1, ranks=[1], trains=False)]
    fit(rank, grappa(), Net(), devices=world_size, callbacks=calls)


def freed(rank: int, world_size: int) -> None:
    module = Net()
    module.layers[0].requires_grad_(False)
    fit(rank, grappa(), module, devices=world_size, callbacks=[Freezes(epoch=1, ranks=[0, 1], trains=True)])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (frozen_on_one, r"layers\.0\.weight is frozen on rank 1 and trained on others"),
        (freed, r"layers\.0\.weight was frozen when the fit began"),
    ],
)
def test_what_ddp_would_get_wrong_is_refused(function: Any, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(function, 2, grace=1)


# Parameters without gradients that ranks change, a GAN's frozen half or a teacher, are equal after meetings.


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


def batches_of_ranks(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 2, generator=generator, dtype=torch.float64) for _ in range(STEPS * ROUNDS)]


def loader(rank: int) -> DataLoader[Any]:
    return DataLoader(batches_of_ranks(rank), batch_size=None)  # type: ignore[arg-type]


def learn(rank: int, world_size: int) -> tuple[State, float]:
    module = Frozen()
    fit(rank, local_sgd(EverySteps(STEPS)), module, devices=world_size, train=loader(rank), max_epochs=ROUNDS)
    return state_of(module), collectives.traffic.bytes_sent - module.bytes_at_start


def learn_by_hand() -> State:
    """Batch after batch on each rank; the mean of all nets after the last of a round, before the teacher's step."""
    replicas = [Frozen() for _ in range(NUM_RANKS)]
    data = [batches_of_ranks(rank) for rank in range(NUM_RANKS)]
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
