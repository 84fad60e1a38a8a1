"""Tables that live with one rank each: what cannot be trained so, and what becomes of the others after a fault."""

import copy
import pickle
import threading
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.callbacks.averaged_rounds import AveragedRounds
from lightning_gnn_dist.extensions.asking.asking import THREAD_NAME
from lightning_gnn_dist.extensions.elastic.living_peers import refuse_states
from lightning_gnn_dist.rounds.partitioned_strategy import states_of
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import owned
from tests.extensions.tables.test_table_gradients import Loader, Owned
from tests.extensions.tables.test_without_features import Rows, uneven_data_module
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import fit

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Faulty(Owned):
    """Rank 1 raises in its third step, while others ask it for rows."""

    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            raise KeyError("a fault")
        return super().training_step(batch)


def faulty(rank: int, world_size: int) -> None:
    launch = lgd.Launch(timeout=timedelta(minutes=10))  # who waits so long does not finish in time
    strategy = lgd.GrappaStrategy(launch=launch)
    try:
        fit(rank, strategy, Faulty(), devices=world_size, train=Loader(rank), max_epochs=2)
    finally:
        left = [each.name for each in threading.enumerate() if each.name.startswith(THREAD_NAME)]
        assert not left, f"threads are left: {left}"


def test_a_rank_that_raises_ends_all_with_its_own_error() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(faulty, 3, grace=60)
    assert len(caught.value.failures) == 3
    assert caught.value.failures[1].endswith("KeyError: 'a fault'\n")  # others may see it gone before it has ended
    assert "threads are left" not in str(caught.value)


def refusals(rank: int, world_size: int) -> dict[str, str]:
    """What each strategy says, by its name."""
    strategies: dict[str, Any] = {
        "LLCGStrategy": lgd.LLCGStrategy(lgd.EverySteps(3), **PATIENCE),
        "LocalSGDStrategy": lgd.LocalSGDStrategy(**PATIENCE),
        "TMAStrategy": lgd.TMAStrategy(**PATIENCE),
        "DDP": "ddp",
    }
    said, module = {}, owned(Rows(), "table")
    module.table = lgd.OwnedEmbedding(*module.table.weight.shape).double()  # its rows are not made
    for name, strategy in strategies.items():
        with pytest.raises(ValueError, match="table") as caught:
            trainer(world_size, strategy).fit(module, uneven_data_module(world_size))
        said[name] = str(caught.value)
    averaging = trainer(world_size, lgd.GrappaStrategy(**PATIENCE), callbacks=[AveragedRounds()])
    with pytest.raises(ValueError, match="table") as caught:
        averaging.fit(owned(Rows(), "table"), uneven_data_module(world_size))
    said["AveragedRounds"] = str(caught.value)
    return said


def test_other_strategies_refuse_the_table_by_name() -> None:
    for said in run_ranks(refusals, 2):
        for name, text in said.items():
            assert name in text
            assert ("use GrappaStrategy()" in text) is (name != "AveragedRounds")
            assert text.count(". ") == 0


def wrong_ids(rank: int, world_size: int) -> dict[str, str]:
    module, said = owned(Rows(), "table"), {}
    fitted = trainer(world_size, lgd.GrappaStrategy(**PATIENCE), limit_val_batches=0)
    fitted.fit(module, uneven_data_module(world_size))
    wrong: dict[str, Any] = {
        "Row 90 ": lambda: module.table(torch.tensor([3, 90])),
        "Row -1 ": lambda: module.table(torch.tensor([-1])),
        "must be a tensor of integers": lambda: module.table(torch.tensor([0.5])),
        "cannot be copied": lambda: copy.deepcopy(module),
        "sent to another process": lambda: pickle.dumps(module.table),
        "outside a fit nobody takes": lambda: module.table(torch.tensor([3])).sum().backward(),
    }
    for name, call in wrong.items():
        with pytest.raises((IndexError, TypeError, RuntimeError)) as caught:
            call()
        said[name] = str(caught.value)
    assert module.table(torch.empty(0, 2, dtype=torch.int32)).shape == (0, 2, 4)
    fitted.strategy.barrier()
    return said


def test_wrong_ids_are_named() -> None:
    for said in run_ranks(wrong_ids, 2):
        for expected, text in said.items():
            assert expected in text


class Late(Owned):
    """Looks rows up when others may have stepped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rows(torch.tensor([0, 11]))


class Tied(Owned):
    """Multiplies by the rows that lie here."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + self.rows.weight.square().mean()


class Alone(Owned):
    """Trains rows alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)


class Other(Owned):
    """Has another table on rank 1."""

    def setup(self, stage: str) -> None:
        self.rows = lgd.OwnedEmbedding(12 + self.global_rank, 3).double()


class Infinite(Owned):
    """The loss of rank 1 is infinite."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) / (self.global_rank == 0)


def fits(rank: int, world_size: int, kind: type[Owned]) -> None:
    fit(rank, lgd.GrappaStrategy(**PATIENCE), kind(), devices=world_size, train=Loader(rank))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Tied, "product with it is not one with the whole table: look rows up"),
        (Alone, r"rows\.weight is all that trains, .* too: add a layer"),
        (Late, "look them up before the backward or after the step"),
        (Other, "Ranks have other tables than rank 0"),
        (Infinite, "loss of rank 1 is NaN"),
    ],
)
def test_what_rows_cannot_have_is_refused(kind: type[Owned], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(fits, 2, kind)


def test_ranks_that_may_die_refuse_the_table() -> None:
    with pytest.raises(ValueError, match=r"OwnedEmbedding, .*peers=Elastic\(\)\).*use GrappaStrategy\(\)"):
        refuse_states(module := owned(Rows(), "table"), states_of(module))
