"""Tables that live with one rank each: faults, what is refused, steps by hand, and the memory of a rank."""

import copy
import pickle
import threading
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

import lightning_gnn_dist as lgd
from lightning_gnn_dist.callbacks.averaged_rounds import AveragedRounds
from lightning_gnn_dist.extensions.asking.asking import THREAD_NAME
from lightning_gnn_dist.extensions.elastic.living_peers import refuse_states
from lightning_gnn_dist.rounds.partitioned_strategy import states_of
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import Made, Table, owned, state_of
from tests.extensions.tables.test_table_gradients import Loader, Owned
from tests.extensions.tables.test_without_features import Rows, uneven_data_module
from tests.memory import Peak, give_back_at_once, reads_memory
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import differs, fit
from tests.wire.test_hosts import InTraining, check_stalled


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


# From end to end: steps by hand, a rank that stands still, and what a rank holds.


class ByHand(Table):
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


def both(rank: int, world_size: int) -> list[Made]:
    """The end of fits of a table that all ranks hold, and of one that no rank does."""
    modules = [ByHand(), owned(ByHand())]
    for module in modules:
        fit(rank, lgd.GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank), max_epochs=2)
    return [state_of(module) for module in modules]


@pytest.mark.slow
def test_steps_by_hand_are_those_of_a_table_that_all_ranks_hold() -> None:
    (first, _), (second, _) = ranks = run_ranks(both, 2)
    assert differs(first, second) == 0.0
    for replicated, whole in ranks:
        assert differs(whole, replicated) < 1e-12


class AtOwnedRows(InTraining, Owned):
    pass


def at_rows(rank: int, world_size: int, launch: lgd.Launch) -> None:
    fit(rank, lgd.GrappaStrategy(launch=launch), AtOwnedRows(), devices=world_size, train=Loader(rank), max_epochs=2)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named() -> None:
    check_stalled(at_rows)


NUM_ROWS, WIDTH, RANKS, TENSORS = 1_000_000, 64, 4, 3  # the table and two moments


class Large(pl.LightningModule):
    """Regression on rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = lgd.OwnedEmbedding(NUM_ROWS, WIDTH, seed=0)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any) -> Tensor:
        return (self.head(self.rows(batch.ids)) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return lgd.LazyAdam(self.parameters(), lr=0.01)


def batches(rank: int) -> list[Data]:
    chance = torch.Generator().manual_seed(rank)
    return [Data(ids=torch.randint(NUM_ROWS, (1000,), generator=chance), batch_size=1000) for _ in range(5)]


def peaks(rank: int, world_size: int, path: str) -> list[int]:
    give_back_at_once()
    found = []
    for epochs, ckpt_path in ((1, None), (2, path)):
        loader: Any = DataLoader(batches(rank), batch_size=None)  # type: ignore[arg-type]
        options: dict[str, Any] = {"train": loader, "max_epochs": epochs, "ckpt_path": ckpt_path}
        with Peak("RssAnon") as peak:
            fitted = fit(rank, lgd.GrappaStrategy(**PATIENCE), Large(), devices=world_size, **options)
        found.append(peak.added_bytes)
        if ckpt_path is None:
            with Peak("RssAnon") as peak:
                fitted.save_checkpoint(path)
            found.append(peak.added_bytes)
    return found


@pytest.mark.slow
@pytest.mark.alone
@reads_memory
def test_a_rank_holds_its_rows_alone(tmp_path: Any) -> None:
    whole = NUM_ROWS * WIDTH * 4
    most = TENSORS * whole / RANKS + (100 << 20)
    assert most < 1.2 * whole  # less than what a table with its moments takes, by far
    first, *others = run_ranks(peaks, RANKS, str(tmp_path / "large.ckpt"), timeout=300)
    for in_fit, in_save, resumed in others:
        assert in_fit < most
        assert in_save < 50 << 20
        assert resumed < most
    assert first[0] < most
    assert TENSORS * whole < first[1] < 2 * TENSORS * whole + (100 << 20)  # Lightning writes a copy in memory
    assert first[2] < most
