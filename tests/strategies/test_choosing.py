"""The cost model of choices, by hand, and what it chooses."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from lightning_gnn_dist import GrappaStrategy, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.cli.choose import ChoosingTrainer
from lightning_gnn_dist.strategies.choosing.choices import CHOICES
from lightning_gnn_dist.strategies.choosing.costs import Measured, Steps, choose
from lightning_gnn_dist.strategies.choosing.probe import probe
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.sage import SAGE

# Steps of .1 s, and of .25 s with an exchange; .01 s for a few numbers, .2 s for the model and .06 s for it in 8 bits;
# .3 s for a gradient of the whole graph. Ten steps a pass on Grappa's parts, twelve on the others.
SLOW_WIRE = Measured(Steps(0.25, 10), Steps(0.1, 12), 0.01, 0.2, 0.06, 0.3)
FAST_WIRE = Measured(Steps(0.11, 10), Steps(0.1, 10), 0.0001, 0.005, 0.004, 0.1)
BY_HAND = {
    "Grappa": 10 * 0.25,
    "Grappa, 8 bits": 10 * (0.25 - 0.2 + 0.06),
    # Three votes, and one each of two corrections and the anchor; these and the mean in 8 bits, two moments as a model;
    # gradients: two of corrections, four of the anchor on the graph and four on the part.
    "LLCG": 12 * (0.1 + (3 * 0.01 + 3 * 0.01 + 4 * 0.06 + 0.2 + 6 * 0.3 + 4 * 0.1) / 16),
    "LLCG, overlap": 12 * (0.1 + (3 * 0.01 + 0.01 + 0.06 + 4 * (0.3 + 0.1)) / 16),
    "averaging": 12 * (0.1 + (3 * 0.01 + 0.2) / 16),
    "averaging, overlap": 12 * (0.1 + 3 * 0.01 / 16),
    "LLCG, overlap, long rounds": 12 * (0.1 + (3 * 0.01 + 0.01 + 0.06 + 4 * (0.3 + 0.1)) / 64),
    "averaging, overlap, long rounds": 12 * (0.1 + 3 * 0.01 / 64),
}


@pytest.mark.parametrize("name", CHOICES)
def test_seconds_of_a_pass_are_those_by_hand(name: str) -> None:
    assert SLOW_WIRE.seconds_of_pass(CHOICES[name]) == pytest.approx(BY_HAND[name])


def test_what_does_not_fit_behind_a_round_is_waited_for() -> None:
    found = Measured(Steps(5.0, 10), Steps(0.1, 3), 0.01, exchange=4.0, rounded=1.5, correction=0.3)
    # A round is of 1.6 s: 4 - 1.6 s of a model are left; of LLCG's mean and moments 5.5 - 1.6 s. A pass has 3 batches.
    assert found.seconds_of_step(CHOICES["averaging, overlap"]) == pytest.approx(0.1 + (0.03 + 2.4) / 16)
    expected = 0.1 + (0.03 + 0.01 + 1.5 + 3.9 + 3 * (0.3 + 0.1)) / 16
    assert found.seconds_of_step(CHOICES["LLCG, overlap"]) == pytest.approx(expected)
    # Gradients in 8 bits are no faster than steps without any exchange.
    shorter = Measured(Steps(0.11, 10), Steps(0.1, 3), 0.01, exchange=0.2, rounded=0.05, correction=None)
    assert shorter.seconds_of_step(CHOICES["Grappa, 8 bits"]) == pytest.approx(0.1)


def test_a_wire_that_carries_gradients_is_for_them() -> None:
    found = choose(FAST_WIRE)
    assert found.name == "Grappa" and len(found.prices) == len(CHOICES)
    chosen, cost, runner_up = found.lines
    assert chosen == "Chosen: GrappaStrategy(). An exchange of the model takes 5 ms, 5% of a local step."
    assert cost == "A pass over the training nodes will take 1.1 s."
    assert runner_up == "The runner-up, GrappaStrategy(bits=8), would take 1.09 s."


def test_a_slow_wire_is_for_rounds() -> None:
    # In 8 bits a pass takes 1.1 s; averaging takes 1.37 s, and needs 1.23 passes for one.
    assert choose(SLOW_WIRE).name == "Grappa, 8 bits"
    # Here 4 s, and 1.23 times 1.61 s.
    slower = choose(Measured(Steps(0.6, 10), Steps(0.1, 12), 0.05, 0.4, 0.2, 0.3))
    assert slower.name == "averaging"
    assert slower.lines[2] == (
        "The runner-up, LocalSGDStrategy(EverySteps(16), overlap=True), would take 1.31 s, and needs 1.5 times as many "
        "passes as Grappa."
    )


def test_of_near_equals_8_bits_come_last() -> None:
    # In 8 bits a pass takes 1.1 s; averaging takes 1.37 s, and where it comes nearly as far as Grappa, .84 passes.
    near = choose(replace(SLOW_WIRE, progress=0.95))
    assert near.name == "averaging"
    assert min(near.prices, key=lambda price: price.to_accuracy).name == "Grappa, 8 bits"


@pytest.mark.parametrize(("progress", "passes"), [(0.8, 1.25), (0.25, 4.0), (1.5, 1.0), (0.0, 10.0), (None, 1 / 0.65)])
def test_averaging_needs_the_more_passes_the_less_its_steps_learn(progress: float | None, passes: float) -> None:
    found = replace(SLOW_WIRE, progress=progress)
    prices = {price.name: price for price in choose(found).prices}
    for name, own in (("averaging", 0.8), ("averaging, overlap", 1.0), ("averaging, overlap, long rounds", 3.0)):
        assert prices[name].to_accuracy == pytest.approx(own * passes * BY_HAND[name])
    assert prices["Grappa"].to_accuracy == BY_HAND["Grappa"]
    assert prices["LLCG"].to_accuracy == pytest.approx(1.1 * BY_HAND["LLCG"])


def test_averaging_alone_is_for_parts_that_are_alike() -> None:
    differ = "The parts hold different labels: 0.40 of label skew beyond chance, in the mean."
    found = choose(
        Measured(Steps(0.6, 10), Steps(0.1, 12), 0.05, 0.4, 0.2, 0.03, against_averaging=f"{differ} Do this.")
    )
    assert found.name == "LLCG" and found.lines[0].endswith(f"Averaging alone is not among the choices. {differ}")
    assert not any("averaging" in price.name for price in found.prices)


def test_without_gradients_of_the_whole_graph_or_rounds_less_is_possible() -> None:
    differ = "The parts differ."
    left = choose(Measured(Steps(9.0, 10), Steps(0.1, 12), 0.05, 8.0, 7.0, None, against_averaging=differ))
    assert [price.name for price in left.prices] == ["Grappa", "Grappa, 8 bits"]
    refused = "max_steps=3 ends the fit inside a round: use max_epochs, which counts rounds."
    left = choose(Measured(Steps(9.0, 10), Steps(0.1, 12), 0.05, 8.0, 1.0, 0.3, against_rounds=refused))
    assert left.name == "Grappa, 8 bits" and left.lines[0].endswith(f"Rounds are not among the choices. {refused}")


def test_rounds_by_time_are_named_where_ranks_wait_for_the_slowest() -> None:
    # Steps of .1 s on one rank and of .4 s on the other: 2 / (10 + 2.5) s in the harmonic mean. Of five steps that the
    # ranks could take in .4 s, they take two.
    waits = Measured(Steps(0.41, 10), Steps(0.4, 10), 0.01, 0.02, 0.02, None, by_time=0.16, progress=0.8 / 1.5)
    found = choose(waits)
    seconds = 10 * (0.16 + (3 * 0.01 + 0.02) / 16)  # 1.63; 1.5 times that, and 1.2 times again, is less than 4.1
    assert found.name == "Grappa" and found.lines[1] == (
        "A pass over the training nodes will take 4.1 s. Waiting for the slowest rank costs 60% of the steps: "
        f"TMAStrategy(EverySeconds(2.6)), where no rank waits, would take {seconds:.3g} s, and needs 1.5 times as many "
        "passes as Grappa."
    )
    # Not where they are alike, nor where less is spared than a choice that loses more must, nor where parts differ.
    for by_time, against in ((0.4, None), (4.1 / 1.8 / 10, None), (0.16, "The parts differ.")):
        assert "TMA" not in "".join(choose(replace(waits, by_time=by_time, against_averaging=against)).lines)


class SlowOnRankOne(SAGE):
    def training_step(self, batch: Any) -> Any:
        time.sleep(0.1 * self.global_rank)
        return super().training_step(batch)


def of_unequal_ranks(rank: int, world_size: int, folder: str) -> tuple[float, float, str]:
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    choosing = ChoosingTrainer(accelerator="cpu", devices=2, strategy=GrappaStrategy(**PATIENCE), **options)
    data = PartitionedDataModule(small_graph(), sampler=NeighborSampler([4, 4]))
    decision, found = choosing.choose(SlowOnRankOne(12, 4), data, f"{folder}/chosen.yaml")
    return found.measured.local.seconds, found.measured.by_time, decision.lines[1]


@pytest.mark.slow
def test_a_probe_finds_how_unequal_ranks_are(tmp_path: Path) -> None:
    (slowest, by_time, line), other = run_ranks(of_unequal_ranks, 2, str(tmp_path), timeout=60)
    assert slowest > 0.1 and 0 < by_time < slowest / 1.8 and "TMAStrategy(" in line
    assert other == (slowest, by_time, line)


class Scheduled(SAGE):
    """Schedules of a length of their own, and one as long as the fit."""

    def configure_optimizers(self) -> Any:
        optimizers = [torch.optim.Adam([each], lr=0.01) for each in self.convs[0].parameters()]
        lengths = (20, self.trainer.max_epochs, 20)
        schedules: list[Any] = [
            torch.optim.lr_scheduler.CosineAnnealingLR(each, length)
            for each, length in zip(optimizers, lengths, strict=True)
        ]
        schedules[2] = {"scheduler": schedules[2], "interval": "step"}
        return optimizers, schedules

    automatic_optimization = False

    def training_step(self, batch: Any) -> None:  # type: ignore[override]
        loss = functional.cross_entropy(self(batch), batch.y[: batch.batch_size])
        optimizers: Any = self.optimizers()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()


class AlsoByEpochs(Scheduled):
    def configure_optimizers(self) -> Any:
        optimizers, (own, of_fit, _) = super().configure_optimizers()
        return optimizers, [torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.9), of_fit, own]


def schedules_of(rank: int, world_size: int) -> list[tuple[str, ...]]:
    launch, found = PATIENCE["launch"], []
    for module in (Scheduled(12, 4), AlsoByEpochs(12, 4)):
        asked = trainer(world_size, GrappaStrategy(launch=launch, find_unused_parameters=True), max_epochs=20)
        data = PartitionedDataModule(small_graph(), sampler=NeighborSampler([4, 4]))
        found.append(probe(asked, module, data, launch).measured.schedules)
    return found


def test_schedules_that_count_other_epochs_are_told_of() -> None:
    both = ("ExponentialLR", "CosineAnnealingLR")
    assert run_ranks(schedules_of, 2, timeout=60) == [[("CosineAnnealingLR",), both]] * 2
    slower = Measured(Steps(0.6, 10), Steps(0.1, 12), 0.05, 0.4, 0.2, 0.3, schedules=both[1:])
    assert choose(slower).lines[3:] == [
        "CosineAnnealingLR counts epochs, which now are rounds of 16 steps and no passes: take its length from "
        "trainer.max_epochs, which it does not follow."
    ]
    assert len(choose(replace(FAST_WIRE, schedules=both)).lines) == 3  # an epoch is a pass


class Noisy(SAGE):
    """Has dropout, and keeps what it was before each fit and behind it."""

    def __init__(self) -> None:
        super().__init__(12, 4, dropout=0.5)
        self.states: list[dict[str, torch.Tensor]] = []

    def __deepcopy__(self, memo: Any) -> Any:  # what a probe trains
        copied = Noisy()
        copied.load_state_dict(self.state_dict())
        copied.states = self.states
        return copied

    def _keep(self) -> None:
        self.states.append({name: each.clone() for name, each in self.state_dict().items()})

    on_train_start = on_train_end = _keep


def progress_and_by_hand(rank: int, world_size: int) -> tuple[float | None, float]:
    module, launch = Noisy(), PATIENCE["launch"]
    module.load_state_dict(equal_on_all_ranks())
    data = PartitionedDataModule(small_graph(), sampler=NeighborSampler([-1, -1]), batch_size=30, seed=1)
    asked = trainer(world_size, GrappaStrategy(launch=launch), max_epochs=20)
    found = probe(asked, module, data, launch).measured.progress
    graph = small_graph().to_pyg()
    losses = []
    batches = list(data.correction_batches(0, sliced=False, stop=3))
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    for state in module.states:
        model = SAGE(12, 4, blocks=False).double().eval()
        model.load_state_dict(state)
        graph.x, graph.batch_size = graph.x.double(), graph.num_nodes
        losses.append(functional.cross_entropy(model(graph)[seeds], graph.y[seeds]).item())
    (before, behind), (other_before, other_behind) = losses[2:], losses[:2]
    return found, (before - behind) / (other_before - other_behind)


def equal_on_all_ranks() -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    return SAGE(12, 4).state_dict()


def test_progress_is_that_of_losses_on_the_whole_graph() -> None:
    for found, expected in run_ranks(progress_and_by_hand, 2, timeout=60):
        assert 0 < expected < 1.5 and found == pytest.approx(expected, rel=1e-4)
