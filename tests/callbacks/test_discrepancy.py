"""The probe tells parts that look alike from parts that do not."""

import weakref
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist import EverySteps
from lightning_gnn_dist.callbacks.averaged_rounds import AveragedRounds
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, State, batches, differs, local_sgd, state_of
from tests.strategies.fitting import fit as fit_net
from tests.strategies.graph_fitting import data_module, fit, model, small_graph


def measure(rank: int, world_size: int, partitioner: Any, probe: bool) -> tuple[float, float, State]:
    module = model(dropout=0.4)
    callbacks: list[pl.Callback] = [lgd.DiscrepancyProbe(every_n_rounds=2)] if probe else []
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(3), **PATIENCE)
    trainer = fit(strategy, module, data_module(partitioner=partitioner), world_size, callbacks=callbacks, max_epochs=2)
    found = [float(trainer.callback_metrics.get(f"round/discrepancy{end}", -1)) for end in ("", "_worst")]
    return found[0], found[1], state_of(module)


@pytest.mark.slow
def test_parts_that_look_alike_disagree_less_and_measuring_changes_nothing() -> None:
    (metis, worst, state), *_ = run_ranks(measure, 3, lgd.MetisPartitioner(), True)
    (dealt, _, _), *_ = run_ranks(measure, 3, lgd.RandomPartitioner(), True)
    (nothing, _, plain), *_ = run_ranks(measure, 3, lgd.MetisPartitioner(), False)
    assert nothing == -1
    assert 0 < dealt < metis <= worst
    assert differs(state, plain) == 0.0


def alone(rank: int, world_size: int) -> float:
    return measure(rank, world_size, lgd.MetisPartitioner(), True)[0]


def test_one_rank_is_the_whole_graph_up_to_sampling() -> None:
    assert run_ranks(alone, 1)[0] < 0.5


class Counted(lgd.PartitionedDataModule):
    """Knows how many batches of its part are in memory, and which of the graph were asked for."""

    alive: ClassVar[list[Any]] = []
    most: ClassVar[list[int]] = []
    stops: ClassVar[list[int]] = []

    def anchor_batches(self, *args: Any, **options: Any) -> Iterator[Any]:
        for batch in super().anchor_batches(*args, **options):
            self.alive.append(weakref.ref(batch))
            self.most.append(sum(reference() is not None for reference in self.alive))
            yield batch

    def correction_batches(self, round_idx: int, *, stop: int | None = None, **options: Any) -> Iterator[Any]:
        self.stops.append(stop or 0)
        return super().correction_batches(round_idx, stop=stop, **options)


@pytest.mark.parametrize("steps", [None, 4])
def test_it_holds_one_batch_after_another(steps: int | None) -> None:
    for found in (Counted.alive, Counted.most, Counted.stops):
        found.clear()
    data = Counted(
        small_graph(), sampler=lgd.NeighborSampler([4, 4]), batch_size=8, evaluation=lgd.Evaluation(batch_size=100)
    )
    fit(lgd.LocalSGDStrategy(**PATIENCE), model(), data, 1, callbacks=[lgd.DiscrepancyProbe(steps=steps)], max_epochs=1)
    count = steps or -(-int(small_graph().split("train").numel()) // 8)
    assert len(Counted.alive) == count and Counted.stops == [count]
    assert max(Counted.most) <= 3


def test_it_needs_a_strategy_with_meetings() -> None:
    with pytest.raises(ValueError, match="measures at meetings, and SingleDeviceStrategy has none"):
        fit("auto", model(), data_module(), 1, callbacks=[lgd.DiscrepancyProbe()])


# The time that training waits for data is logged, whatever the strategy.


# The average of rounds is that of a loop by hand: in validations, in what is kept, and where a fit goes on.


DECAY = 0.75


class Watched(Net):
    """Remembers the model of every round, and what is validated after it; keeps a checkpoint after two rounds."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.rounds: list[State] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return super().training_step([each.double() for each in batch])

    def on_train_epoch_end(self) -> None:
        self.rounds.append(state_of(self))
        if len(self.rounds) == 2:
            self.trainer.save_checkpoint(self.path)

    def on_validation_start(self) -> None:
        """Averages come after it."""

    def on_validation_epoch_start(self) -> None:
        self.validated.append(state_of(self))


def train(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """Train on parts of unequal size, and once more from the checkpoint in the middle."""
    found: dict[str, Any] = {}
    for name, start in {"end": None, "resumed": path}.items():
        torch.manual_seed(0)
        module = Watched(path if start is None else f"{path}.more").double()
        options: dict[str, Any] = {"max_epochs": 4, "validate": True, "train": batches(rank, size=5 + rank, count=3)}
        average = AveragedRounds(decay=DECAY)
        strategy = local_sgd(EverySteps(3))
        fit_net(rank, strategy, module, devices=world_size, callbacks=[average], ckpt_path=start, **options)
        found = {"rounds": module.rounds, "validated": module.validated} | found | {name: state_of(module)}
    return found | {"kept": torch.load(path, weights_only=True)["state_dict"]}


def test_it_is_the_average_by_hand(tmp_path: Path) -> None:
    first, second = run_ranks(train, 2, str(tmp_path / "half.ckpt"))

    def mean(average: State, model: State) -> State:
        return {name: DECAY * average[name] + (1 - DECAY) * model[name] for name in model}

    expected = list(accumulate(first["rounds"], mean))
    assert differs(expected[-1], first["rounds"][-1]) > 1e-3
    for found, by_hand in zip(first["validated"], expected, strict=True):
        assert differs(found, by_hand) < 1e-15
    for name, rounds in {"end": 4, "resumed": 4, "kept": 2}.items():
        assert differs(first[name], expected[rounds - 1]) < 1e-15
        assert differs(first[name], second[name]) == 0.0


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan"), "half"])
def test_a_decay_that_averages_nothing_is_refused(decay: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"decay must be .*between 0 and 0\.99"):
        AveragedRounds(decay)
