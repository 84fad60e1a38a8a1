"""Rows that live with one rank each, in rounds from end to end: graphs, other ways to step, bytes, faults."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_gnn_dist import EverySteps, GrappaStrategy, Launch, LocalSGDStrategy
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import NUM_ROWS, WIDTH, Made, batches_of, owned, state_of
from tests.extensions.tables.test_table_gradients import Loader, Measured, OfData, Owned, WithoutRows
from tests.extensions.tables.test_touched_rows import train
from tests.ranks import run_ranks
from tests.strategies.fitting import differs, fit
from tests.wire.test_channel import InTraining, check_stalled

# Ways to step.


class ByHand(OfData):
    """Steps two optimizers by hand, one of which takes sparse gradients alone, and throws some gradients away."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any) -> Any:
        optimizers: Any = self.optimizers()
        self.manual_backward(super().training_step(batch) * 100)
        for each in optimizers:
            each.zero_grad()
        self.manual_backward(super().training_step(batch))
        self.manual_backward(super().training_step(batch) / 2)
        for each in optimizers:
            self.clip_gradients(each, 0.1)
            each.step()

    def configure_optimizers(self) -> Any:
        others = torch.optim.SGD(self.head.parameters(), lr=0.1)
        return [torch.optim.SparseAdam(list(self.rows.parameters()), lr=0.05), others]


def in_rounds(steps: int, *, moments: bool) -> LocalSGDStrategy:
    return LocalSGDStrategy(EverySteps(steps), average_optimizer=moments, **PATIENCE)


def in_half(module: Any) -> dict[str, Any]:
    """Let a model compute in narrow numbers."""
    module.float()
    return {"precision": "bf16-mixed", "gradient_clip_val": 0.5}


def halves(rank: int) -> DataLoader[Any]:
    made = [each.clone() for each in Loader(rank)]
    for each in made:
        each.x, each.y = each.x.float(), each.y.float()
    return DataLoader(made, batch_size=None)  # type: ignore[arg-type]


WAYS: dict[str, tuple[type[OfData], list[Callable[[], Any]], float]] = {  # a model, its fits, and how far they differ
    "by hand": (ByHand, [lambda: GrappaStrategy(**PATIENCE)], 1e-12),
    "by hand, in rounds": (ByHand, [lambda: in_rounds(3, moments=True)], 1e-12),
    "in half": (OfData, [lambda: in_rounds(3, moments=True)], 1e-6),
    "one after the other": (
        OfData,
        [
            lambda: in_rounds(3, moments=False),
            lambda: GrappaStrategy(**PATIENCE),
            lambda: in_rounds(2, moments=True),
        ],
        1e-12,
    ),
}


def both(rank: int, world_size: int, way: str) -> list[Made]:
    """The end of fits of a table that all ranks hold, and of one that no rank does."""
    kind, strategies, _ = WAYS[way]
    modules = [kind(), owned(kind())]
    for module in modules:
        options = in_half(module) if way == "in half" else {"max_epochs": 2}
        for strategy in strategies:
            train: Any = halves(rank) if way == "in half" else Loader(rank)
            fit(rank, strategy(), module, devices=world_size, train=train, **options)
    return [state_of(module) for module in modules]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_step_are_those_of_a_table_that_all_ranks_hold(way: str) -> None:
    (first, _), (second, _) = ranks = run_ranks(both, 2, way)
    assert differs(first, second) == 0.0
    for replicated, whole in ranks:
        assert differs(whole, replicated) < WAYS[way][2]


# What is sent.


def measured(rank: int, world_size: int) -> list[float]:
    found = []
    for module in (Measured("SGD"), WithoutRows("SGD")):
        strategy = LocalSGDStrategy(EverySteps(4), **PATIENCE)
        fit(rank, strategy, module, devices=world_size, train=Loader(rank), max_epochs=1)
        found.append(module.sent)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_ledger_counts_questions_answers_and_rows() -> None:
    """A row is asked for once in a round, and goes to its owner with its id and a count, of 4 bytes each."""
    more = [own - other for own, other in run_ranks(measured, 2)]
    expected = [0, 0]
    for rank in range(2):
        known: set[int] = set()
        for _, ids, _ in batches_of(rank, 4):
            new = {int(row) for row in ids.unique()} - known
            known |= new
            others = sum(row // (NUM_ROWS // 2) != rank for row in new)
            if others:
                expected[rank] += 8 + 8 * (2 + 2 * 3) + 16 + 4 * others  # a header; the table's number and age; ids
                expected[1 - rank] += 8 + 8 * (2 + 4) + 8 * WIDTH * others
        expected[rank] += sum(row // (NUM_ROWS // 2) != rank for row in known) * (4 + 4 + 8 * WIDTH)
    assert more == expected


# Faults.


class LooksAround(pl.Callback):
    """Looks rows up in a round, also without a gradient, and finds those that this rank has trained."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
        if trainer.is_last_batch:
            return
        ids = torch.arange(NUM_ROWS)
        with torch.no_grad():
            rows = module.rows(ids)
        assert torch.equal(rows, module.rows(ids).detach())
        assert torch.equal(rows[[2, 5, 11]], module.rows(torch.tensor([2, 5, 11])).detach())
        if trainer.global_rank == 0:  # which has trained some, and not those of rank 1
            moved = (rows != module.start).any(1)
            assert int(moved[:6].sum()) > 0
            assert trainer.current_epoch or not bool(moved[7:].any())
        with pytest.raises(RuntimeError, match=r"inside a round, .*: load them between rounds"):
            module.rows.load_state_dict({"weight": rows})


def looks_around(rank: int, world_size: int) -> list[Made]:
    module = owned(OfData())
    module.training_step = super(OfData, module).training_step
    module.start = module.rows.weight.detach().clone()
    return train(rank, LocalSGDStrategy(EverySteps(3), **PATIENCE), module, world_size, callbacks=[LooksAround()])


@pytest.mark.slow
def test_a_rank_sees_what_it_has_trained() -> None:
    first, second = run_ranks(looks_around, 2)
    assert all(differs(one, other) == 0.0 for one, other in zip(first, second, strict=True))


# A rank that stands still while others wait for its rows is named by them.


class AtOwnedRows(InTraining, Owned):
    pass


def at_rows(rank: int, world_size: int, launch: Launch) -> None:
    fit(rank, GrappaStrategy(launch=launch), AtOwnedRows(), devices=world_size, train=Loader(rank), max_epochs=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_rank_that_stands_still_is_named() -> None:
    check_stalled(at_rows)
