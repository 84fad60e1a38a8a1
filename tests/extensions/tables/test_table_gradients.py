"""Tables under Grappa: its steps are those of one process on the batches of all ranks."""

import copy
import io
import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gnn_dist import GrappaStrategy, LazyAdam, LocalSGDStrategy, OwnedEmbedding, Rounded
from lightning_gnn_dist.extensions.tables.owned_embedding import initial_rows_
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
from tests.memory import Peak, reads_memory
from tests.ranks import run_ranks
from tests.strategies.fitting import differs, fit

BATCHES, EPOCHS = 4, 2


class Loader(DataLoader[Any]):
    """The batches of a rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(batches_of(rank, BATCHES), batch_size=None)  # type: ignore[arg-type]
        self.num_seeds = BATCHES * SIZES[rank]


def grappa(rank: int, world_size: int, is_owned: bool, optimizer: str, options: dict[str, Any]) -> Made:
    module = owned(Table(optimizer)) if is_owned else Table(optimizer)
    options = {"train": Loader(rank), "max_epochs": EPOCHS} | options
    fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, **options)
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
def test_steps_are_those_of_one_process_on_all_batches(
    world_size: int, optimizer: str, options: dict[str, Any], is_owned: bool
) -> None:
    ranks = run_ranks(grappa, world_size, is_owned, optimizer, options)
    hand = {"accumulate": options.get("accumulate_grad_batches", 1), "clip": options.get("gradient_clip_val", 0.0)}
    expected = by_hand(world_size, optimizer, **hand)
    for state in ranks:
        assert differs(state, ranks[0]) == 0.0
    assert differs(ranks[0], expected) < 1e-12


class Wrong(Table):
    """With what no table can have."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.rows = nn.Embedding(12, WIDTH, sparse=True, dtype=torch.float64, **options)
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Tied(Table):
    """Multiplies by the whole table."""

    def training_step(self, batch: Any) -> Tensor:
        return super().training_step(batch) + self.rows.weight.square().mean()


class Parameter(Table):
    """Looks rows up in what is no nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.others = nn.Parameter(torch.zeros(12, WIDTH, dtype=torch.float64))

    def training_step(self, batch: Any) -> Tensor:
        ids = torch.arange(3)
        return super().training_step(batch) + nn.functional.embedding(ids, self.others, sparse=True).sum()


SGD = torch.optim.SGD
WRONG: dict[str, tuple[Any, str]] = {
    "adam": (lambda: Wrong(torch.optim.Adam), "torch's Adam takes none: use LazyAdam"),
    "momentum": (lambda: Wrong(lambda each: SGD(each, 0.1, momentum=0.9)), "SGD with momentum=0.9 would go on moving"),
    "decay": (lambda: Wrong(lambda each: SGD(each, 0.1, weight_decay=0.1)), "weight_decay=0.1"),
    "max_norm": (lambda: Wrong(SGD, max_norm=1.0), "max_norm=1.0, which changes rows in every forward"),
    "a parameter": (Parameter, "has a sparse gradient, and is no table that ranks know: look rows up in an nn.Emb"),
    "tied": (Tied, "rows.weight has a dense gradient, though its sparse=True"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_rows_cannot_have_is_refused_on_one_rank_already(name: str) -> None:
    make, message = WRONG[name]
    module: pl.LightningModule = make()
    with pytest.raises(ValueError, match=message):
        fit(0, LocalSGDStrategy(**PATIENCE), module, devices=1, train=Loader(0))


# Tables that live with one rank each: fits of them are those of tables that every rank holds whole.


class Owned(Table):
    """Regression on rows that begin as those of a Table."""

    def __init__(self, optimizer: str = "LazyAdam") -> None:
        super().__init__(optimizer)
        self.rows: Any  # as parts of a module are
        owned(self)

    def validation_step(self, batch: Any) -> None:
        self.log("val_loss", self.training_step(batch), sync_dist=True, batch_size=batch.batch_size)


class SometimesSteps(Owned):
    """Steps after every second batch alone; its table may be frozen."""

    def __init__(self, *, is_frozen: bool, is_owned: bool) -> None:
        super().__init__()
        if not is_owned:
            self.rows = Table().rows
        self.rows.requires_grad_(not is_frozen)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


def sometimes_steps(rank: int, world_size: int, options: dict[str, Any]) -> list[list[Made]]:
    found = []
    for is_frozen in (False, True):
        modules = [SometimesSteps(is_frozen=is_frozen, is_owned=is_owned) for is_owned in (True, False)]
        for module in modules:
            strategy = GrappaStrategy(**options, **PATIENCE)
            fit(rank, strategy, module, devices=world_size, train=Loader(rank), max_epochs=2)
        found.append([state_of(module) for module in modules])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"reducer": Rounded(16)}], ids=str)
def test_other_settings_are_those_of_a_table_that_all_ranks_hold(options: dict[str, Any]) -> None:
    for rank in run_ranks(sometimes_steps, 2, options):
        for whole, replicated in rank:
            assert differs(whole, replicated) < (1e-12 if "reducer" not in options else 1e-3)


class Measured(Owned):
    """Knows what is sent while it trains."""

    sent = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.sent = collectives.traffic.bytes_sent

    def on_train_end(self) -> None:
        self.sent = collectives.traffic.bytes_sent - self.sent


class WithoutRows(Measured):
    """Leaves its rows alone."""

    def training_step(self, batch: Any) -> Tensor:
        loss: Tensor = (self.head(batch.x).tanh() - batch.y).square().mean()
        return loss


def measured(rank: int, world_size: int) -> list[float]:
    found = []
    for module in (Measured(), WithoutRows()):
        fit(rank, GrappaStrategy(**PATIENCE), module, devices=world_size, train=Loader(rank), max_epochs=1)
        found.append(module.sent)
    return found


@pytest.mark.slow
def test_the_ledger_counts_questions_answers_and_gradients() -> None:
    """A question has ids of 4 bytes, an answer rows; a gradient goes to the owner of its row with the row's id."""
    more = [own - other for own, other in run_ranks(measured, 2)]
    expected = [0, 0]
    for batches in zip(*(batches_of(rank, BATCHES) for rank in range(2)), strict=True):
        for rank, batch in enumerate(batches):
            others = sum(int(row) // (NUM_ROWS // 2) != rank for row in batch.ids.unique())
            if others:
                expected[rank] += 8 + 8 * (2 + 2 * 3) + 16 + 4 * others  # a header; the table's number and age; ids
                expected[1 - rank] += 8 + 8 * (2 + 4) + 8 * WIDTH * others
                expected[rank] += (4 + 8 * WIDTH) * others
    assert more == expected


@pytest.mark.parametrize(("first", "last"), [(0, 5), (1000, 1030), (1024, 4000), (2047, 2049), (7, 7)])
def test_rows_at_the_start_depend_on_the_seed_and_their_ids_alone(first: int, last: int) -> None:
    whole, some = torch.empty(4000, 3), torch.empty(last - first, 3)
    initial_rows_(whole, 0, 5, 0.1)
    initial_rows_(some, first, 5, 0.1)
    assert torch.equal(some, whole[first:last])
    assert float(whole.std()) == pytest.approx(0.1, rel=0.05)
    assert len(whole.unique(dim=0)) == 4000
    other = torch.empty(4000, 3)
    initial_rows_(other, 0, 6, 0.1)
    assert float((other - whole).abs().min()) > 0


def test_in_one_process_it_is_an_embedding_with_sparse_gradients() -> None:
    table = OwnedEmbedding(7, 3, seed=1)
    plain = torch.nn.Embedding(7, 3, sparse=True)
    plain.load_state_dict(table.state_dict())
    ids = torch.tensor([[2, 5], [2, 0]])
    for each in (table, plain):
        optimizer = LazyAdam(each.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(ids).square().sum().backward()
            optimizer.step()
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    assert torch.equal(table.weight, plain.weight)
    assert torch.equal(table(ids), plain(ids))


def test_rows_that_are_not_made_may_be_copied_cast_and_sent() -> None:
    table = OwnedEmbedding(3000, 4, std=0.5, seed=9)
    expected = OwnedEmbedding(3000, 4, std=0.5, seed=9).weight
    found = [copy.deepcopy(table), pickle.loads(pickle.dumps(table)), copy.deepcopy(table).double().float()]
    assert len(pickle.dumps(table)) < 4000
    for each in found:
        assert each.parameter.shape == (3000, 4)
        assert each.parameter.data.stride(0) == 0  # in the memory of one row
        assert torch.equal(each.weight, expected)
    made = pickle.loads(pickle.dumps(found[0]))
    assert torch.equal(made.weight, expected)
    file = io.BytesIO()
    torch.save(table.state_dict(), file)
    file.seek(0)
    other = OwnedEmbedding(3000, 4)
    other.load_state_dict(torch.load(file))
    assert torch.equal(other.weight, expected)


def test_optimizers_may_be_made_before_the_rows() -> None:
    table = OwnedEmbedding(7, 3, seed=1)
    expected = OwnedEmbedding(7, 3, seed=1).weight.detach().clone()
    optimizer = torch.optim.Adagrad(table.parameters(), lr=0.1)  # which makes its state at once
    with torch.inference_mode():
        table(torch.tensor([1]))  # as a sanity check does
    table(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    moved = (table.weight.detach() - expected).abs().sum(1)
    assert moved.nonzero().flatten().tolist() == [1, 3]


def test_a_state_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"weight has the shape \(6, 3\) in the state, and \(7, 3\) here"):
        OwnedEmbedding(7, 3).load_state_dict({"weight": torch.zeros(6, 3)})
    with pytest.raises(RuntimeError, match="Missing key"):
        OwnedEmbedding(7, 3).load_state_dict({})


@reads_memory
def test_making_the_table_takes_no_memory() -> None:
    with Peak("RssAnon") as peak:
        table = OwnedEmbedding(100_000_000, 64)
        assert torch.nn.ModuleDict({"a": table}).double().float()
    assert peak.added_bytes < 50 << 20
