"""Tables under Grappa: its steps are those of one process on the batches of all ranks."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch_geometric.data import Data

from lightning_gnn_dist import GrappaStrategy, LocalSGDStrategy, Rounded
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import (
    NUM_ROWS,
    SIZES,
    WIDTH,
    Made,
    Table,
    batches_of,
    optimizer_of,
    owned,
    state_of,
)
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import differs, fit

BATCHES, EPOCHS = 4, 2


class OfData(Table):
    """Reads batches that say how many seeds they have."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step([batch.x, batch.ids, batch.y])


class Loader:
    """The batches of a rank."""

    def __init__(self, rank: int) -> None:
        self._made = [Data(x=x, ids=ids, y=y, batch_size=len(x)) for x, ids, y in batches_of(rank, BATCHES)]

    @property
    def num_seeds(self) -> int:
        return sum(each.batch_size for each in self._made)

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Any:
        return iter(self._made)


def grappa(
    rank: int, world_size: int, is_owned: bool, optimizer: str, options: dict[str, Any], settings: dict[str, Any]
) -> Made:
    module = owned(OfData(optimizer)) if is_owned else OfData(optimizer)
    strategy = GrappaStrategy(**settings, **PATIENCE)
    fit(rank, strategy, module, devices=world_size, train=Loader(rank), max_epochs=EPOCHS, **options)
    assert len(module.rows.weight) == (NUM_ROWS // world_size if is_owned else NUM_ROWS)
    return state_of(module)


def by_hand(world_size: int, optimizer: str, *, accumulate: int = 1, clip: float = 0.0) -> Made:
    """One process and a dense table, along the mean of all seeds of a step."""
    net = Table(optimizer, sparse=optimizer != "SGD")
    stepper = optimizer_of(optimizer, net.parameters())
    of_ranks = [batches_of(rank, BATCHES) for rank in range(world_size)]
    seeds = sum(SIZES[:world_size])
    for _ in range(EPOCHS):
        stepper.zero_grad()
        for number in range(BATCHES):
            for size, batches in zip(SIZES, of_ranks, strict=False):
                (net.training_step(batches[number]) * size / seeds / accumulate).backward()
            if (number + 1) % accumulate == 0:
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                stepper.step()
                stepper.zero_grad()
    return state_of(net)


@pytest.mark.parametrize("is_owned", [False, True])
@pytest.mark.parametrize(
    ("world_size", "optimizer", "options"),
    [
        (3, "LazyAdam", {}),
        (2, "SGD", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}),
        pytest.param(2, "LazyAdam", {"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param(3, "Adagrad", {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of torch's Adagrad
def test_steps_are_those_of_one_process_on_all_batches(
    world_size: int, optimizer: str, options: dict[str, Any], is_owned: bool
) -> None:
    ranks = run_ranks(grappa, world_size, is_owned, optimizer, options, {})
    hand = {"accumulate": options.get("accumulate_grad_batches", 1), "clip": options.get("gradient_clip_val", 0.0)}
    expected = by_hand(world_size, optimizer, **hand)
    for state in ranks:
        assert differs(state, ranks[0]) == 0.0
    assert differs(ranks[0], expected) < 1e-12


@pytest.mark.slow
def test_the_ledger_counts_the_bytes_of_touched_rows() -> None:
    """Ids go to all, a row of both ranks goes to one of them, and each sum to the other."""
    with_rows, without = (run_ranks(sent, 2, flag) for flag in (True, False))
    more = sum(own - other for own, other in zip(with_rows, without, strict=True))
    expected = 2 * BATCHES * (8 * 2 + 4 * 2 / 2)  # of each rank and step: two lengths, and the flags
    expected += 2 * 12 * WIDTH * 8 / 2  # the table, at the start
    for batch, other in zip(*(batches_of(rank, BATCHES) for rank in range(2)), strict=True):
        own, theirs = set(batch[1].flatten().tolist()), set(other[1].flatten().tolist())
        expected += (len(own) + len(theirs)) * 4 + len(own & theirs) * 8 * WIDTH + len(own | theirs) * 8 * WIDTH
    assert more == pytest.approx(expected)


def sent(rank: int, world_size: int, trains: bool) -> float:
    module = OfData()
    module.rows.requires_grad_(trains)
    before = collectives.traffic.bytes_sent
    fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank), max_epochs=1)
    return collectives.traffic.bytes_sent - before


@pytest.mark.slow
def test_other_gradients_may_be_rounded_and_rows_are_not() -> None:
    first, second = run_ranks(grappa, 2, False, "LazyAdam", {}, {"reducer": Rounded(8)})
    assert differs(first, second) == 0.0
    assert differs(first, by_hand(2, "LazyAdam")) < 0.05


class Sometimes(OfData):
    """Uses its table on rank 0 alone, or never."""

    def __init__(self, on: set[int]) -> None:
        super().__init__()
        self.on = on

    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank in self.on:
            return super().training_step(batch)
        return (self.head(batch.x).tanh() - batch.y).square().mean()


def sometimes(rank: int, world_size: int, on: set[int]) -> Made:
    module = Sometimes(on)
    fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank), max_epochs=1)
    assert on or not module.trainer.optimizers[0].state[module.rows.weight]
    return state_of(module)


@pytest.mark.slow
@pytest.mark.parametrize("on", [{0}, set()], ids=["one rank", "no rank"])
def test_ranks_may_leave_the_table_alone(on: set[int]) -> None:
    first, second = run_ranks(sometimes, 2, on)
    assert differs(first, second) == 0.0
    assert (differs({"rows": first["rows.weight"]}, {"rows": state_of(Table())["rows.weight"]}) > 0) == bool(on)


def alone(rank: int, world_size: int) -> None:
    module = OfData()
    module.head.requires_grad_(False)
    fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank))


@pytest.mark.slow
def test_a_table_alone_is_refused() -> None:
    with pytest.raises(RankError, match=r"rows\.weight is all that trains"):
        run_ranks(alone, 2)


class Wrong(OfData):
    """With what no table can have."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(12, WIDTH, sparse=True, dtype=torch.float64, **options)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Tied(OfData):
    """Multiplies by the whole table."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + self.rows.weight.square().mean()


class Parameter(OfData):
    """Looks rows up in what is no nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Parameter(torch.zeros(12, WIDTH, dtype=torch.float64))

    def training_step(self, batch: Any) -> Tensor:
        ids = torch.arange(3)
        return super().training_step(batch) + nn.functional.embedding(ids, self.others, sparse=True).sum()


def without_a_table(rank: int, world_size: int) -> None:
    fit(rank, GrappaStrategy(**PATIENCE), Parameter(), devices=world_size, train=Loader(rank))


@pytest.mark.slow
def test_sparse_gradients_of_no_table_are_explained() -> None:
    with pytest.raises(RankError, match="has a sparse gradient, and is no table that ranks know"):
        run_ranks(without_a_table, 2)


SGD = torch.optim.SGD
WRONG: dict[str, tuple[Any, str]] = {
    "adam": (lambda: Wrong(torch.optim.Adam), "torch's Adam takes none: use LazyAdam"),
    "momentum": (lambda: Wrong(lambda each: SGD(each, 0.1, momentum=0.9)), "SGD with momentum=0.9 would go on moving"),
    "decay": (lambda: Wrong(lambda each: SGD(each, 0.1, weight_decay=0.1)), "weight_decay=0.1"),
    "max_norm": (lambda: Wrong(SGD, max_norm=1.0), "max_norm=1.0, which changes rows in every forward"),
    "a parameter": (
        Parameter,
        "has a sparse gradient, and is no table that ranks know: look rows up in an nn.Embedding",
    ),
    "tied": (Tied, "rows.weight has a dense gradient, though its sparse=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_rows_cannot_have_is_refused_on_one_rank_already(name: str) -> None:
    make, message = WRONG[name]
    module: pl.LightningModule = make()
    with pytest.raises(ValueError, match=message):
        fit(0, LocalSGDStrategy(**PATIENCE), module, devices=1, train=Loader(0))
