"""Tables under strategies of rounds: their rows against means by hand, replicas to the bit, bytes to the number."""

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_gnn_dist import EverySteps, LazyAdam, LocalSGDStrategy, Outer, TMAStrategy
from lightning_gnn_dist.extensions.elastic.living_peers import refuse_states
from lightning_gnn_dist.extensions.tables.learned_tables import LearnedRows
from lightning_gnn_dist.extensions.tables.touched_rows import Touches
from lightning_gnn_dist.rounds.clock import RoundProgress
from lightning_gnn_dist.rounds.partitioned_strategy import states_of
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
    rows_by_hand,
    state_of,
)
from tests.ranks import run_ranks
from tests.rounds.test_meeting_hook import OwnLinear
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


def local_sgd(rank: int, world_size: int, optimizer: str, options: dict[str, Any]) -> list[Made]:
    return train(rank, LocalSGDStrategy(EverySteps(STEPS), **options, **PATIENCE), Table(optimizer), world_size)


def by_hand(optimizer: str, num_steps: list[int], *, moments: bool) -> list[Made]:
    """Replicas with a table of dense numbers, row after row, of ranks that take so many steps in a round."""
    world_size = len(num_steps)
    nets = [Table(optimizer) for _ in range(world_size)]
    steppers = [optimizer_of(optimizer, net.parameters()) for net in nets]
    states = []
    for round_idx in range(ROUNDS):
        steps = torch.zeros(world_size, NUM_ROWS)
        for rank, (net, stepper) in enumerate(zip(nets, steppers, strict=True)):
            for step in range(num_steps[rank]):
                batch = batches_of(rank, BATCHES)[(round_idx * num_steps[rank] + step) % BATCHES]
                stepper.zero_grad()
                net.training_step(batch).backward()
                stepper.step()
                steps[rank, batch.ids.unique()] += 1
        with torch.no_grad():
            meet(nets, steppers, steps, torch.tensor(num_steps).double() / sum(num_steps), moments=moments)
        states.append(state_of(nets[0]))
    return states


def meet(nets: list[Table], steppers: list[Any], steps: Tensor, weights: Tensor, *, moments: bool) -> None:
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
        mean = torch.einsum("p,p...->...", weights, torch.stack([tensor.detach().double() for tensor in tensors]))
        for tensor in tensors:
            tensor.copy_(mean)


@pytest.mark.parametrize(
    ("world_size", "optimizer", "options"),
    [
        (3, "LazyAdam", {"average_optimizer": True}),
        pytest.param(2, "LazyAdam", {}, marks=pytest.mark.slow),
        pytest.param(3, "SGD", {}, marks=pytest.mark.slow),
        pytest.param(2, "Adagrad", {"average_optimizer": True}, marks=pytest.mark.slow),
    ],
)
def test_rounds_are_those_by_hand(world_size: int, optimizer: str, options: dict[str, Any]) -> None:
    ranks = run_ranks(local_sgd, world_size, optimizer, options)
    moments = bool(options)
    for states in zip(*ranks, by_hand(optimizer, [STEPS] * world_size, moments=moments), strict=True):
        *replicas, expected = states
        shared = replicas[0].keys() if moments else expected.keys()
        for other in replicas[1:]:
            assert all(torch.equal(replicas[0][name], other[name]) for name in shared)
        assert differs({name: replicas[0][name] for name in expected}, expected) < 1e-12
    start = Table().rows.weight[-1]
    assert torch.equal(ranks[0][-1]["rows.weight"][-1], start)  # nobody has it


class Counted(LocalSGDStrategy):
    """Notes what a meeting sends for rows, and which rows each rank has touched."""

    def end_round(self) -> None:
        (rows,) = (hook for hook in self.meeting.hooks if isinstance(hook, LearnedRows))
        before = collectives.traffic.bytes_sent
        rows.contribute()
        self.sent = collectives.traffic.bytes_sent - before
        (steps,) = rows._steps
        self.touched = steps.nonzero().flatten().tolist()
        super().end_round()


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


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "accumulate_grad_batches": 2}


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.05}, BY_VALUE])
def test_sparse_gradients_are_clipped_and_added_up_as_dense_ones(options: dict[str, Any]) -> None:
    sparse, dense = (run_ranks(clipped, 1, flag, options)[0] for flag in (True, False))
    assert differs(sparse, dense) < 1e-14


# Rounds of unequal steps, tables that stop training, ranks that are left out, and runs that go on.


class UnequalSteps:
    """Each rank ends its rounds after a number of steps of its own."""

    def is_over(self, progress: RoundProgress) -> bool:
        return progress.local_steps >= 1 + 2 * collectives.rank()


def unequal(rank: int, world_size: int, folder: str) -> Made:
    """The end of a fit whose ranks take unequal steps, resumed half-way."""
    path = str(Path(folder, "half.ckpt"))
    for rounds, ckpt_path in ((ROUNDS // 2, None), (ROUNDS, path)):
        strategy, module = TMAStrategy(UnequalSteps(), weights="steps", **PATIENCE), Table()
        options: dict[str, Any] = {"train": loader_of(rank, BATCHES), "max_epochs": rounds, "ckpt_path": ckpt_path}
        fit(rank, strategy, module, devices=world_size, **options).save_checkpoint(path)
    return state_of(module)


def test_unequal_rounds_resumed_half_way_are_those_by_hand(tmp_path: Path) -> None:
    first, *others = run_ranks(unequal, 3, str(tmp_path))
    assert all(differs(first, other) == 0.0 for other in others)
    assert differs(first, by_hand("LazyAdam", [1, 3, 5], moments=False)[-1]) < 1e-12


class Freezes(pl.Callback):
    """The table trains in the first two rounds alone."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.rows.requires_grad_(trainer.current_epoch < 2)


class Breaks(pl.Callback):
    """What rank 1 has trained becomes NaN in the second round."""

    def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        if trainer.global_rank == 1 and trainer.current_epoch == 1:
            module.head.weight.data.fill_(torch.nan)


SETTINGS: dict[str, tuple[dict[str, Any], pl.Callback]] = {
    "frozen": ({}, Freezes()),
    "left out": ({"nonfinite": "leave_out", "outer": Outer.diloco(), "average_optimizer": True}, Breaks()),
}


def settings(rank: int, world_size: int) -> dict[str, list[Made]]:
    found = {}
    for name, (options, callback) in SETTINGS.items():
        strategy, module = LocalSGDStrategy(EverySteps(2), **options, **PATIENCE), Table()
        states = train(rank, strategy, module, world_size, callbacks=[callback])
        found[name] = [{key: state[key] for key in module.state_dict()} for state in states]
    return found


@pytest.mark.slow
def test_replicas_stay_equal_where_tables_freeze_and_ranks_are_left_out() -> None:
    first, *ranks = run_ranks(settings, 3)
    for found in ranks:
        for name, states in found.items():
            for one, same in zip(states, first[name], strict=True):
                assert differs(one, same) == 0.0, name
                assert all(bool(value.isfinite().all()) for value in one.values()), name
    rows = [Table().rows.weight, *(state["rows.weight"] for state in first["frozen"])]
    assert [torch.equal(one, other) for one, other in pairwise(rows)] == [False, False, True, True]


# LazyAdam against torch's Adam and SparseAdam.


def nets() -> tuple[nn.ModuleList, nn.ModuleList]:
    torch.manual_seed(0)
    made = nn.ModuleList([nn.Embedding(40, 4, sparse=True), nn.Linear(4, 3)])
    return made, copy.deepcopy(made)


def loss_of(net: nn.ModuleList, ids: Tensor) -> Tensor:
    loss: Tensor = net[1](net[0](ids)).square().sum()
    return loss


def test_each_kind_of_gradient_steps_as_with_torch() -> None:
    ours, theirs = nets()
    groups = [{"params": ours[1].parameters(), "weight_decay": 0.1}, {"params": ours[0].parameters()}]
    optimizer = LazyAdam(groups, lr=0.02, betas=(0.8, 0.9), eps=1e-6)
    settings = {"lr": 0.02, "betas": (0.8, 0.9), "eps": 1e-6}
    adam = torch.optim.Adam(theirs[1].parameters(), weight_decay=0.1, **settings)  # type: ignore[arg-type]
    sparse = torch.optim.SparseAdam(theirs[0].parameters(), **settings)  # type: ignore[arg-type]
    for step in range(12):
        ids = torch.randint(0, 30, (0 if step == 5 else 7,))
        for net, steppers in ((ours, [optimizer]), (theirs, [adam, sparse])):
            net.zero_grad()
            loss_of(net, ids).backward()
            for stepper in steppers:
                stepper.step()
    assert torch.equal(ours[1].weight, theirs[1].weight)
    assert torch.equal(ours[0].weight, theirs[0].weight)
    assert torch.equal(ours[0].weight[30:], nets()[0][0].weight[30:])
    state = optimizer.state[ours[0].weight]
    assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"] and int(state["step"]) == 12


def test_its_state_is_saved_and_restored() -> None:
    ours, others = nets()
    first, second = LazyAdam(ours.parameters()), LazyAdam(others.parameters())
    for _ in range(2):
        first.zero_grad()
        loss_of(ours, torch.tensor([1, 1, 3])).backward()
        first.step()
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        others.load_state_dict(ours.state_dict())
    for net, stepper in ((ours, first), (others, second)):
        net.zero_grad()
        stepper.step(lambda net=net: loss_of(net, torch.tensor([2])).backward())  # type: ignore[misc]
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), others.parameters(), strict=True))


def test_decay_of_rows_is_refused() -> None:
    net, _ = nets()
    loss_of(net, torch.tensor([1])).backward()
    with pytest.raises(ValueError, match=r"weight_decay=0\.1 with sparse gradients: .* a group of their own"):
        LazyAdam(net.parameters(), weight_decay=0.1).step()


def test_elastic_ranks_refuse_tables() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has sparse gradients, and with peers=Elastic\(\) .*sparse=False"):
        refuse_states(module := nets()[0], states_of(module))


# Who puts together the rows that ranks have touched is known with two waits.


OF_RANKS = [[0, 2, 3, 7, 8], [], [2, 3, 4, 8, 9, 11], [3, 7]]


@pytest.mark.gpu
def test_the_host_waits_for_the_number_of_ids_and_for_counts() -> None:
    notes = pytest.importorskip("pretend", reason="only pretended devices count how often the host waits").notes
    of_ranks = [torch.tensor(ids, dtype=torch.int64, device="cuda") for ids in OF_RANKS]
    notes.clear()
    touches = Touches(of_ranks)
    for rank in range(4):
        touches.of_home(rank), [touches.sent(rank, home) for home in range(4)]
    assert sum(times for (kind, _, _), times in notes.items() if kind == "sync") == 2, notes


def test_a_sparse_embedding_brings_rows_beside_what_is_of_a_rank_alone() -> None:
    both = nn.Sequential(OwnLinear(2, 2), nn.Embedding(3, 2, sparse=True), nn.Embedding(4, 2))
    _, rows = states_of(both)
    assert [*rows.rows().values()] == ["1.weight"] and not rows.excluded()
