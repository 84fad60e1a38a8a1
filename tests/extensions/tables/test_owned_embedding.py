"""Tables that live with one rank each: fits of them are those of tables that every rank holds whole."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import GrappaStrategy, LazyAdam, OwnedEmbedding, Rounded
from lightning_gnn_dist.extensions.tables.owned_embedding import initial_rows_
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import NUM_ROWS, WIDTH, Made, Table, batches_of, owned, state_of
from tests.extensions.tables.test_table_gradients import BATCHES, Loader, OfData
from tests.memory import Peak, reads_memory
from tests.ranks import run_ranks
from tests.strategies.fitting import differs, fit


class Owned(OfData):
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
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
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
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_the_ledger_counts_questions_answers_and_gradients() -> None:
    """A question has ids of 4 bytes, an answer rows; a gradient goes to the owner of its row with the row's id."""
    more = [own - other for own, other in run_ranks(measured, 2)]
    expected = [0, 0]
    for batches in zip(*(batches_of(rank, BATCHES) for rank in range(2)), strict=True):
        for rank, (_, ids, _) in enumerate(batches):
            others = sum(int(row) // (NUM_ROWS // 2) != rank for row in ids.unique())
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


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
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
