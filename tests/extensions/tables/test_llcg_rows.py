"""Tables under LLCG: corrections move rows on all ranks alike, and drift correction leaves them out."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist import Correction, Drift, EverySteps, LLCGStrategy
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.tables.fitting import NUM_ROWS, Made, Table, batches_of, optimizer_of, rows_by_hand, state_of
from tests.extensions.tables.test_table_gradients import Loader
from tests.ranks import RankError, run_ranks
from tests.slow import slow
from tests.strategies.fitting import differs

STEPS, ROUNDS, BATCHES, CORRECTIONS = 3, 3, 4, 2
PLAIN: dict[str, Any] = {
    "drift": None,
    "weights": "uniform",
    "average_optimizer": False,
    "outer": None,
    "correction": Correction.as_published(CORRECTIONS),
}
ON_RANK_0 = Correction.as_published(CORRECTIONS, "rank0")


def of_graph(rank: int, number: int) -> Data:
    """A rank's slice of a batch of the whole graph."""
    return batches_of(rank, 40)[BATCHES + number]


def joined(slices: list[Data]) -> Data:
    x, ids, y = (torch.cat([each[name] for each in slices]) for name in ("x", "ids", "y"))
    return Data(x=x, ids=ids, y=y, batch_size=len(x))


class Batches(pl.LightningDataModule):
    """Other batches on each rank, and slices of a global one."""

    def train_dataloader(self) -> Any:
        return Loader(self.trainer.global_rank)

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Data]:
        for number in range(start, 20 if stop is None else stop):
            ranks = [self.trainer.global_rank] if sliced else range(self.trainer.world_size)
            yield joined([of_graph(rank, 4 * round_idx + number) for rank in ranks])

    def anchor_batches(self, round_idx: int, *, of: str = "part", start: int | None = None) -> Iterator[Data]:
        yield of_graph(self.trainer.global_rank, round_idx)


def train(strategy: Any, module: Any, world_size: int, ckpt_path: str | None = None, rounds: int = ROUNDS) -> Any:
    fitted = trainer(world_size, strategy, max_epochs=rounds, use_distributed_sampler=False)
    fitted.fit(module, datamodule=Batches(), ckpt_path=ckpt_path)
    return fitted


def corrected(rank: int, world_size: int, optimizer: str, options: dict[str, Any]) -> Made:
    module = Table(optimizer)
    train(LLCGStrategy(EverySteps(STEPS), **PLAIN | options, **PATIENCE), module, world_size)
    return state_of(module)


def by_hand(world_size: int, optimizer: str) -> Made:
    """Means, then steps of an optimizer that stays, along the gradient of the whole batch."""
    nets = [Table(optimizer) for _ in range(world_size)]
    steppers = [optimizer_of(optimizer, net.parameters()) for net in nets]
    server = Table(optimizer)
    correct = optimizer_of(optimizer, server.parameters())
    for round_idx in range(ROUNDS):
        steps = torch.zeros(world_size, NUM_ROWS)
        for step in range(STEPS):
            for rank, (net, stepper) in enumerate(zip(nets, steppers, strict=True)):
                batch = list(Loader(rank))[(STEPS * round_idx + step) % BATCHES]
                advance(net, stepper, [batch])
                steps[rank, batch.ids.unique()] += 1
        server.load_state_dict(
            {name: torch.stack([net.state_dict()[name] for net in nets]).mean(0) for name in server.state_dict()}
            | {"rows.weight": rows_by_hand([net.rows.weight.data for net in nets], steps, [1.0] * world_size)}
        )
        for number in range(CORRECTIONS):
            advance(server, correct, [of_graph(rank, 4 * round_idx + number) for rank in range(world_size)])
        for net in nets:
            net.load_state_dict(server.state_dict())
    return state_of(server)


def advance(net: Any, stepper: Any, slices: list[Data]) -> None:
    stepper.zero_grad()
    seeds = sum(each.batch_size for each in slices)
    for each in slices:
        (net.training_step(each) * each.batch_size / seeds).backward()
    stepper.step()


CASES = [(3, "LazyAdam", {}), slow(2, "SGD", {}), slow(2, "LazyAdam", {"correction": ON_RANK_0})]


@pytest.mark.parametrize(("world_size", "optimizer", "options"), CASES)
def test_corrections_are_those_by_hand(world_size: int, optimizer: str, options: dict[str, Any]) -> None:
    first, *others = run_ranks(corrected, world_size, optimizer, options)
    assert all(differs(first, other) == 0.0 for other in others)
    assert differs(first, by_hand(world_size, optimizer)) < 1e-12


def resumed(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> tuple[Made, Made]:
    whole, half, again = (Table() for _ in range(3))
    path, strategy = str(Path(folder, "half.ckpt")), partial(LLCGStrategy, EverySteps(STEPS), **options, **PATIENCE)
    train(strategy(), whole, world_size)
    train(strategy(), half, world_size, rounds=2).save_checkpoint(path)
    train(strategy(), again, world_size, path)
    return state_of(whole), state_of(again)


@pytest.mark.parametrize("options", [{}, slow(PLAIN)])
def test_replicas_stay_equal_and_resume_to_the_bit(tmp_path: Path, options: dict[str, Any]) -> None:
    (first, half), (second, _) = run_ranks(resumed, 2, str(tmp_path), options)
    assert differs(first, second) == 0.0
    assert differs(first, half) == 0.0


class Watched(Table):
    """Notes the gradients that its optimizer is about to use."""

    def __init__(self) -> None:
        super().__init__("SGD")
        self.seen: list[tuple[Tensor, Tensor]] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert self.rows.weight.grad is not None and self.head.weight.grad is not None
        self.seen.append((self.rows.weight.grad.to_dense(), self.head.weight.grad.clone()))


def shifted(rank: int, world_size: int) -> tuple[float, float]:
    """How far the first gradients of rows and of the head are from those without a correction of drift."""
    module = Watched()
    train(LLCGStrategy(EverySteps(1), drift=Drift("ranks"), **PATIENCE), module, world_size, rounds=1)
    net = Table()
    net.training_step(next(iter(Loader(rank)))).backward()
    ((rows, head),) = module.seen
    return float((rows - net.rows.weight.grad.to_dense()).abs().max()), float((head - net.head.weight.grad).abs().max())


@pytest.mark.slow
def test_drift_correction_shifts_all_but_rows() -> None:
    for rows, head in run_ranks(shifted, 2):
        assert rows == 0.0
        assert head > 0.0


def sgd_with_momentum(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def adam(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 0.1)


def refused(rank: int, world_size: int, options: dict[str, Any]) -> None:
    module = Table()
    module.head.requires_grad_(options.get("correction") is not None)
    train(LLCGStrategy(EverySteps(STEPS), **options, **PATIENCE), module, world_size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": Correction(optimizer=sgd_with_momentum)}, "SGD with momentum=0.9 would go on moving"),
        ({"correction": Correction(optimizer=adam)}, "torch's Adam takes none: use LazyAdam"),
        (PLAIN | {"correction": Correction(CORRECTIONS)}, r"would average all moments of rows\.weight"),
        ({"correction": None, "drift": Drift("ranks")}, r"rows\.weight is all that trains, .*: use drift=None"),
    ],
)
def test_what_rows_cannot_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_ranks(refused, 2, options)
