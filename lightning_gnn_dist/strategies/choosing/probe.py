"""A probe of a fit: steps of copies of the model, with an exchange and without, and each kind of exchange."""

from __future__ import annotations

import logging
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_gnn_dist.joint import JudgesParts
from lightning_gnn_dist.rounds.clock import EverySteps
from lightning_gnn_dist.rounds.correction_gradients import (
    mean_gradient,
    num_targets,
    step_of,
    unrecorded,
    without_noise,
)
from lightning_gnn_dist.rounds.launching.launch import Launch
from lightning_gnn_dist.rounds.lightning_internals.trainer import datamodule_of
from lightning_gnn_dist.rounds.means.means import Means
from lightning_gnn_dist.rounds.part import Fit
from lightning_gnn_dist.rounds.refusals import check_trainer, require_anchors, require_corrections, require_step
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.strategies.choosing.choices import CHOICES, options_of_ddp
from lightning_gnn_dist.strategies.choosing.costs import Measured, Steps
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from lightning_gnn_dist.wire import collectives

STEPS, FIRST = 12, 4  # of each kind; those before the first are not timed
TIMES = 3  # exchanges of each kind that are timed
LONGEST = 0.5  # seconds between them, as in a fit: a wire that was idle begins slowly
QUIET: dict[str, Any] = {
    "limit_val_batches": 0,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Parts(NamedTuple):
    """How a fit cuts the graph, as its data module says; None of what it does not say."""

    partitioner: object
    boundary: object


class Probed(NamedTuple):
    """What a probe has found.

    Attributes:
        measured: What steps and exchanges take.
        of_gradients: The parts of strategies that exchange gradients.
        of_rounds: Those of strategies of rounds.
    """

    measured: Measured
    of_gradients: Parts
    of_rounds: Parts


def probe(trainer: Trainer, model: LightningModule, data: LightningDataModule, launch: Launch) -> Probed:
    """Return what a few steps and exchanges take. The model and random numbers stay as they are. Collective.

    Args:
        trainer: Says how many ranks there are, on what, how they take a step, and what DDP is asked for.
        model: What is trained; copies of it take the steps.
        data: Its data module, which is at rest, and is set up for two fits.
        launch: How ranks are started, unless they are there.
    """
    rank_zero_info(f"A probe cuts the graph for rounds and for gradients, and takes {STEPS} steps each way.")
    of_ddp = options_of_ddp(trainer.strategy)
    exchanging, local = (
        _watched(strategy, model, data, {**length, **_as_in(trainer)})
        for strategy, length in (
            (CHOICES["Grappa"].strategy(launch, of_ddp), {"max_epochs": STEPS}),
            (LocalSGDStrategy(EverySteps(STEPS), launch=launch), {"max_epochs": 1}),
        )
    )
    measured = replace(
        local.measured,
        gradients=exchanging.steps,
        against_rounds=_against_rounds(trainer),
        progress=_progress(local.losses, exchanging.losses),
        schedules=tuple(dict.fromkeys(name for name, how in exchanging.schedules if (name, how) in local.schedules)),
    )
    return Probed(measured, exchanging.parts, local.parts)


def _progress(averaged: list[float | None], exchanged: list[float | None]) -> float | None:
    """Return what share of the way that steps with gradients exchanged come as many do whose end is averaged."""
    (before, behind), (other_before, other_behind) = averaged, exchanged
    if before is None or behind is None or other_before is None or other_behind is None:
        return None
    way = other_before - other_behind
    return max(0.0, before - behind) / way if way > 0 else None


def _against_rounds(trainer: Trainer) -> str | None:
    """Return why a trainer cannot train in rounds, None if it can."""
    has_layer_sync = getattr(trainer.strategy, "_layer_sync", None) is not None
    try:
        check_trainer("LLCG, like averaging,", trainer, has_layer_sync=has_layer_sync)
    except ValueError as error:
        return str(error)
    return None


def _as_in(trainer: Trainer) -> dict[str, Any]:
    """Return the arguments of a trainer of the same ranks, that takes the same steps."""
    on_cpu = trainer.strategy.root_device.type == "cpu"
    environment = getattr(trainer.strategy, "cluster_environment", None)
    return {
        "accelerator": "cpu" if on_cpu else "cuda",
        "devices": trainer.num_devices if on_cpu else trainer.device_ids,
        "num_nodes": trainer.num_nodes,
        "plugins": [] if environment is None else [environment],
        "precision": trainer.precision,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
        "gradient_clip_algorithm": trainer.gradient_clip_algorithm,
    }


def _watched(strategy: Strategy, model: LightningModule, data: LightningDataModule, options: dict[str, Any]) -> Watch:
    """Fit a copy of the model for a few steps."""
    watch, log = Watch(), logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)  # what it tells of a fit is of the one to come
    try:
        with isolate_rng():
            trainer = Trainer(strategy=strategy, callbacks=[watch], **options, **QUIET)
            trainer.fit(deepcopy(model), datamodule=data)
    except (ValueError, TypeError) as error:
        if type(strategy).__name__ in str(error):  # which nobody has named
            error.args = (
                "A probe trains with gradients exchanged and in rounds, and this fit is for one of the two: name its "
                f"strategy. {error}",
            )
        raise
    finally:
        log.setLevel(level)
    return watch


class Watch(Callback):
    """Times the steps of a fit, and exchanges behind them.

    Attributes:
        steps: What a step takes, when the fit is over.
        parts: How the graph is cut.
        measured: What was found of a fit without exchanges, as if its steps had none with them.
        losses: The mean loss over some training nodes of the whole graph, before the steps and behind them, where ranks
            that train apart have met. None where there is none.
        schedules: Those of learning rates that step once an epoch: the name and all settings of each.
    """

    steps: Steps
    parts: Parts
    measured: Measured

    def __init__(self) -> None:
        self._ends: list[float] = []
        self.schedules: list[tuple[str, str]] = []
        self.losses: list[float | None] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.losses.append(_loss_on_graph(trainer))
        for schedule in trainer.strategy.lr_scheduler_configs:
            if schedule.interval == "epoch" and not schedule.reduce_on_plateau:
                self.schedules.append((type(schedule.scheduler).__name__, repr(schedule.scheduler.state_dict())))
            schedule.frequency = sys.maxsize  # never: what it monitors may come of a validation

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self._ends.append(time.perf_counter())
        if not isinstance(trainer.strategy, RoundStrategy):  # by hand a batch may take several steps
            trainer.should_stop = len(self._ends) >= STEPS * trainer.accumulate_grad_batches

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy, of_step, data = trainer.strategy, trainer.accumulate_grad_batches, datamodule_of(trainer)
        self.parts = Parts(getattr(data, "partitioner", None), getattr(data, "boundary", None))
        timed = self._ends[FIRST - 1 : -1]  # the last may have ended with a meeting
        seconds = of_step * statistics.median(end - start for start, end in pairwise(timed))
        self.losses.append(_loss_on_graph(trainer))
        of_ranks = _of_ranks(seconds)
        if not isinstance(strategy, RoundStrategy):
            self.steps = Steps(max(of_ranks), math.ceil(trainer.num_training_batches / of_step))
            return
        self.steps = Steps(max(of_ranks), strategy.pace.steps_per_pass())
        exchanges = _exchanges(strategy.meeting.fit, pause=min(LONGEST, self.steps.seconds))
        own = data.against_averaging() if isinstance(data, JudgesParts) else None
        against = next(filter(None, collectives.gather_objects(own, everywhere=True) or []), None)
        correction, by_time = _seconds_of_correction(trainer, strategy), statistics.harmonic_mean(of_ranks)
        self.measured = Measured(self.steps, self.steps, *exchanges, correction, by_time, against)


def _exchanges(fit: Fit, pause: float) -> tuple[float, float, float]:
    """Return the seconds of an exchange of a few numbers, of the model, and of the model in 8 bits. Collective."""
    numbers, model = torch.zeros(4), [each.detach().clone() for each in fit.dense_parameters()]
    rounded = Means(8)
    rounded.begin()
    try:
        return (
            _seconds_of(lambda: collectives.sum_(numbers), pause),
            _seconds_of(lambda: collectives.average_(model), pause),
            _seconds_of(lambda: rounded.average_gradient_(model, 1.0), pause),
        )
    finally:
        rounded.close()


def _seconds_of_correction(trainer: Trainer, strategy: RoundStrategy) -> float | None:
    """Return the seconds of a gradient of a batch of the whole graph; None where there is none. Collective."""
    module, fit = strategy.meeting.fit.lightning_module, strategy.meeting.fit
    if (batches := _batches_of_graph(trainer, 1 + TIMES)) is None:
        return None
    with unrecorded(module), without_noise(module):
        return _seconds_of(lambda: mean_gradient(fit, islice(batches, 1)), pause=0.0)


def _loss_on_graph(trainer: Trainer) -> float | None:
    """Return the mean loss over the seeds of some batches of the whole graph; None where it has none. Collective."""
    strategy, module = trainer.strategy, trainer.lightning_module
    if not module.automatic_optimization:  # it takes as many steps for a batch as it likes
        return None
    if (batches := _batches_of_graph(trainer, TIMES)) is None:
        return None
    total, step = torch.zeros(2, dtype=torch.float64), step_of(module)
    with unrecorded(module), without_noise(module), torch.no_grad(), strategy.precision_plugin.train_step_context():
        for batch in batches:
            count = num_targets(batch)
            loss = step(strategy.batch_to_device(batch)) if count else None
            if loss is not None:
                total += torch.tensor([count * float(loss), count], dtype=torch.float64)
    collectives.sum_(total)
    return float(total[0] / total[1]) if total[1] else None


def _batches_of_graph(trainer: Trainer, count: int) -> Iterator[Any] | None:
    """Return this rank's slices of so many batches of the whole graph; None where ``LLCGStrategy`` finds none."""
    try:
        require_step(trainer.lightning_module)
        require_anchors(trainer, "LLCGStrategy")
        return require_corrections(trainer, "LLCGStrategy").correction_batches(0, stop=count)
    except (ValueError, TypeError):  # which LLCGStrategy would raise
        return None


def _seconds_of(work: Callable[[], object], pause: float) -> float:
    """Return the seconds that something takes on the slowest rank, but for the first time. Collective."""
    found = []
    for _ in range(1 + TIMES):
        time.sleep(pause)
        collectives.sum_(torch.zeros(1))  # so that no rank waits for another's pause
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return max(_of_ranks(statistics.median(found[1:])))


def _of_ranks(seconds: float) -> list[float]:
    """Return the seconds of all ranks. Collective."""
    found: list[float] = collectives.all_gather_rows(torch.tensor(seconds, dtype=torch.float64)).flatten().tolist()
    return found
