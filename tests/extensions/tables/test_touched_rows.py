"""Tables under strategies of rounds: their rows against means by hand, replicas to the bit, bytes to the number."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import EverySteps, LocalSGDStrategy, TMAStrategy
from lightning_gnn_dist.extensions.tables.learned_rows import LearnedRows
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import (
    NUM_ROWS,
    WIDTH,
    Made,
    Table,
    batches_of,
    loader_of,
    optimizer_of,
    owned,
    rows_by_hand,
    state_of,
)
from tests.ranks import run_ranks
from tests.strategies.fitting import differs, fit

STEPS, ROUNDS, BATCHES = 3, 4, 5


class Keeps(pl.Callback):
    """The state behind each meeting, and the moments of the table."""

    def __init__(self) -> None:
        self.states: list[Made] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        moments = trainer.optimizers[0].state.get(module.rows.weight, {})
        named = {name: value.clone() for name, value in moments.items() if value.dim()}
        self.states.append(state_of(module) | named)


def train(rank: int, strategy: Any, module: Table, world_size: int, **options: Any) -> list[Made]:
    keeps = Keeps()
    options = {"callbacks": [], "max_epochs": ROUNDS} | options
    options["callbacks"] = [*options["callbacks"], keeps]
    fit(rank, strategy, module, devices=world_size, train=loader_of(rank, BATCHES), **options)
    return keeps.states


def local_sgd(rank: int, world_size: int, is_owned: bool, optimizer: str, options: dict[str, Any]) -> list[Made]:
    strategy = LocalSGDStrategy(EverySteps(STEPS), **options, **PATIENCE)
    return train(rank, strategy, owned(Table(optimizer)) if is_owned else Table(optimizer), world_size)


def by_hand(world_size: int, optimizer: str, *, moments: bool) -> list[Made]:
    """Replicas with a table of dense numbers, row after row."""
    nets = [Table(optimizer) for _ in range(world_size)]
    steppers = [optimizer_of(optimizer, net.parameters()) for net in nets]
    states, number = [], 0
    for _ in range(ROUNDS):
        steps = torch.zeros(world_size, NUM_ROWS)
        for step in range(STEPS):
            for rank, (net, stepper) in enumerate(zip(nets, steppers, strict=True)):
                batch = batches_of(rank, BATCHES)[(number + step) % BATCHES]
                stepper.zero_grad()
                net.training_step(batch).backward()
                stepper.step()
                steps[rank, batch[1].unique()] += 1
        number += STEPS
        with torch.no_grad():
            meet(nets, steppers, steps, moments=moments)
        states.append(state_of(nets[0]))
    return states


def meet(nets: list[Table], steppers: list[Any], steps: Tensor, *, moments: bool) -> None:
    ones = [1.0] * len(nets)
    names = [name for name, value in steppers[0].state[nets[0].rows.weight].items() if value.dim()] if moments else []
    tables = [[net.rows.weight for net in nets]]
    tables += [[each.state[net.rows.weight][name] for each, net in zip(steppers, nets, strict=True)] for name in names]
    for tensors in tables:
        mean = rows_by_hand(tensors, steps, ones)
        for tensor in tensors:
            tensor.copy_(mean)
    dense = [list(net.head.parameters()) for net in nets]
    if moments:
        dense = [
            [*own, *(value for p in own for value in each.state[p].values()), each.state[net.rows.weight]["step"]]
            for own, each, net in zip(dense, steppers, nets, strict=True)
        ]
    for tensors in zip(*dense, strict=True):
        mean = torch.stack([tensor.detach().clone() for tensor in tensors]).mean(0)
        for tensor in tensors:
            tensor.copy_(mean)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
@pytest.mark.parametrize(
    ("world_size", "is_owned", "optimizer", "options"),
    [
        (3, False, "LazyAdam", {"average_optimizer": True}),
        (3, True, "LazyAdam", {"average_optimizer": True}),
        pytest.param(2, False, "LazyAdam", {}, marks=pytest.mark.slow),
        pytest.param(3, True, "LazyAdam", {}, marks=pytest.mark.slow),
        pytest.param(1, True, "LazyAdam", {}, marks=pytest.mark.slow),
        pytest.param(3, False, "SGD", {}, marks=pytest.mark.slow),
        pytest.param(2, True, "SGD", {}, marks=pytest.mark.slow),
        pytest.param(2, False, "Adagrad", {"average_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(3, True, "Adagrad", {"average_optimizer": True}, marks=pytest.mark.slow),
        pytest.param(2, True, "Adagrad", {}, marks=pytest.mark.slow),
    ],
)
def test_rounds_are_those_by_hand(world_size: int, is_owned: bool, optimizer: str, options: dict[str, Any]) -> None:
    ranks = run_ranks(local_sgd, world_size, is_owned, optimizer, options)
    moments = bool(options)
    for states in zip(*ranks, by_hand(world_size, optimizer, moments=moments), strict=True):
        *replicas, expected = states
        shared = replicas[0].keys() if moments else expected.keys()
        for other in replicas[1:]:
            assert all(torch.equal(replicas[0][name], other[name]) for name in shared)
        assert differs({name: replicas[0][name] for name in expected}, expected) < 1e-12
    start = Table().rows.weight[-1]
    assert torch.equal(ranks[0][-1]["rows.weight"][-1], start)  # nobody has it


class Counted(LocalSGDStrategy):
    """Notes what a meeting sends for rows, and which rows each rank has touched."""

    def average_replicas(self) -> None:
        (rows,) = (hook for hook in self.meeting.hooks if isinstance(hook, LearnedRows))
        before = collectives.traffic.bytes_sent
        rows.contribute()
        self.sent = collectives.traffic.bytes_sent - before
        (table,) = rows._counted
        self.touched = table.steps.nonzero().flatten().tolist()
        super().average_replicas()


def bytes_of_rows(rank: int, world_size: int, moments: bool) -> tuple[float, list[int]]:
    strategy = Counted(EverySteps(STEPS), average_optimizer=moments, **PATIENCE)
    train(rank, strategy, Table(), world_size, max_epochs=1)
    return strategy.sent, strategy.touched


@pytest.mark.parametrize("moments", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_ledger_counts_the_bytes_of_touched_rows(moments: bool) -> None:
    """Ids go to all; of a row of several ranks the others send theirs to one of them, and that one its mean to all."""
    ranks = run_ranks(bytes_of_rows, 3, moments)
    touched = [ids for _, ids in ranks]
    union = sorted(set().union(*touched))
    assert 0 < len(union) < sum(map(len, touched)) < 3 * NUM_ROWS
    homes = {row: [rank for rank, ids in enumerate(touched) if row in ids] for row in union}
    numbers = 8 * WIDTH * (3 if moments else 1)  # of float64
    to_all = 4 * sum(map(len, touched)) + numbers * len(union)
    lengths = 2 * 8 * (1 + 2)  # of flags, of which there are none, and of ids; and the weight
    for rank, (sent, own) in enumerate(ranks):
        away = [row for row in own if homes[row][row % len(homes[row])] != rank]
        assert sent == pytest.approx(to_all * 2 / 3 + lengths + (4 + numbers) * len(away))


def failed(rank: int, world_size: int) -> tuple[Made, Made]:
    """A rank that counts for nothing, and the others without it."""
    strategy = TMAStrategy(EverySteps(STEPS), failed_ranks=[1], weights="steps", average_optimizer=True, **PATIENCE)
    both = train(rank, strategy, Table(), world_size)[-1]
    alone = LocalSGDStrategy(EverySteps(STEPS), average_optimizer=True, **PATIENCE)
    return both, train(0, alone, Table(), world_size)[-1]  # each with the batches of rank 0


def test_a_rank_without_weight_takes_the_rows_of_others() -> None:
    (first, alone), (second, _) = run_ranks(failed, 2)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert differs(first, alone) < 1e-12


def clipped(rank: int, world_size: int, sparse: bool, options: dict[str, Any]) -> Made:
    strategy = LocalSGDStrategy(EverySteps(4), **PATIENCE)
    return train(rank, strategy, Table("SGD", sparse=sparse), world_size, max_epochs=1, **options)[-1]


CLIPS: list[dict[str, Any]] = [
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2},
]


@pytest.mark.parametrize("options", CLIPS)
def test_sparse_gradients_are_clipped_and_added_up_as_dense_ones(options: dict[str, Any]) -> None:
    sparse, dense = (run_ranks(clipped, 1, flag, options)[0] for flag in (True, False))
    assert differs(sparse, dense) < 1e-14
