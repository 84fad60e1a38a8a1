"""The strategy that a short probe of the fit chooses: see :mod:`lightning_gnn_dist.strategies.choosing.costs`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info

from lightning_gnn_dist.rounds.launching.launch import Launch
from lightning_gnn_dist.rounds.lightning_internals.trainer import datamodule_of, exchange_strategy
from lightning_gnn_dist.rounds.partitioned_strategy import PartitionedStrategy
from lightning_gnn_dist.strategies.choosing.choices import CHOICES, Choice, options_of_ddp, up_to_validation
from lightning_gnn_dist.strategies.choosing.costs import choose
from lightning_gnn_dist.strategies.choosing.probe import probe
from lightning_gnn_dist.strategies.grappa import GrappaStrategy


class AutoStrategy(GrappaStrategy):
    """Take a few steps and exchanges, choose between eight strategies, and train with that.

        trainer = Trainer(devices=4, strategy=AutoStrategy(), max_epochs=20)

    A fit begins with a probe, when its ranks are there: twelve steps with gradients exchanged, twelve without and an
    exchange of each kind, on copies of the model. Weights, optimizers, random numbers and batches are then as they were
    before, and the fit is, to the bit, that of the strategy that was chosen: ``trainer.strategy`` from then on. The log
    says in three lines what was chosen, what a pass will take, and what the runner-up would have taken.

    It chooses strategy, clock and bits. The data module has partitioner and boundary: leave them out, and parts follow
    the strategy, and halos the memory. ``lightning-gnn-dist choose`` makes the same choice, and writes all of it down.

    ``max_epochs``, ``min_epochs`` and ``check_val_every_n_epoch`` count passes over the training nodes. Where rounds
    are chosen, the trainer gets as many rounds as take that many passes, and epochs are rounds, also for a schedule:
    take its length from ``trainer.max_epochs`` or ``trainer.estimated_stepping_batches``. ``ReduceLROnPlateau`` steps
    after validations. The log names schedules whose length does not follow ``trainer.max_epochs``.

    A checkpoint names the choice. A fit that is resumed with ``AutoStrategy()`` keeps it, without a probe. With one
    rank, and in all but a fit, it is :class:`GrappaStrategy`. The data module is set up twice for the probe, and once
    more for the strategy that was chosen; callbacks hear nothing of that. Where ranks end with a fit (``start_method``
    is not ``"popen"``), the choice ends with them, and each fit needs a Trainer of its own.

    Args:
        find_unused_parameters: That of :class:`GrappaStrategy`, in the probe and where gradients are chosen. Rounds
            train all that a step uses in any case.
        launch: How ranks are started, and how long they wait for each other.
    """

    strategy_name = "choose"

    def __init__(self, *, find_unused_parameters: bool = False, launch: Launch = Launch()) -> None:
        super().__init__(find_unused_parameters=find_unused_parameters, launch=launch)
        self._kept = KeptChoice()
        self._companion: Any = self._kept  # Grappa's own is for its steps

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        if (trainer := self._module().trainer).state.fn != TrainerFn.FITTING:
            return checkpoint
        if (data := datamodule_of(trainer)) is not None:
            data.teardown("fit")
        return self._become(_of_checkpoint(checkpoint, checkpoint_path)).load_checkpoint(checkpoint_path, weights_only)

    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._become(self._chosen(trainer)).setup(trainer)
        else:
            super().setup(trainer)

    def _become(self, kept: Kept) -> PartitionedStrategy:
        """Let the fit go on with what was chosen. Collective."""
        trainer, strategy = self._module().trainer, kept.choice.strategy(self.launch, options_of_ddp(self))
        self._kept.kept = kept
        _count_rounds(trainer, kept)
        exchange_strategy(trainer, strategy)
        return strategy

    def _chosen(self, trainer: Trainer) -> Kept:
        """Return what a probe chooses. Collective."""
        data = datamodule_of(trainer)
        if data is None:
            raise ValueError(
                "AutoStrategy needs a data module, which cuts the graph in more ways than one: use "
                "trainer.fit(model, PartitionedDataModule(...)), or name a strategy."
            )
        if trainer.current_epoch:
            raise ValueError(
                f"The {trainer.current_epoch} epochs of the last fit are those of a choice that ended with its ranks: "
                "make another Trainer for the next fit, which then chooses anew."
            )
        data.teardown("fit")
        if trainer.world_size == 1:
            return Kept("Grappa", 1)
        try:
            there = replace(self.launch, start_method=None)  # else the trainers of a probe would start ranks again
            measured = probe(trainer, self._module(), data, there).measured
        except RuntimeError as error:
            if (way_out := "Strategy(find_unused_parameters=True)") in str(error):  # that of the probe's strategy
                error.args = (str(error).replace(f"Grappa{way_out}", f"Auto{way_out}"),)
            raise
        decision = choose(measured)
        for line in decision.lines:
            rank_zero_info(line)
        return Kept(decision.name, measured.local.in_pass)


class Kept(NamedTuple):
    """What a checkpoint knows of the choice.

    Attributes:
        name: Of the choice.
        in_pass: Local steps of a pass over the training nodes.
    """

    name: str
    in_pass: int

    @property
    def choice(self) -> Choice:
        return CHOICES[self.name]

    def epochs(self, passes: int) -> int:
        """Return how many epochs of the choice take so many passes."""
        steps = self.choice.steps
        return passes if steps is None or passes < 1 else math.ceil(passes * self.in_pass / steps)


class KeptChoice(Callback):
    """Writes the choice into checkpoints."""

    kept: Kept | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let schedules by what a validation finds step when there is one: there may be fewer than rounds."""
        every = trainer.check_val_every_n_epoch
        if self.kept is None or self.kept.choice.steps is None or every is None:
            return
        for schedule in trainer.strategy.lr_scheduler_configs:
            if schedule.reduce_on_plateau and schedule.interval == "epoch":
                schedule.frequency = every

    def state_dict(self) -> dict[str, Any]:
        return {} if self.kept is None else self.kept._asdict()


def _of_checkpoint(checkpoint: dict[str, Any], path: object) -> Kept:
    state = checkpoint.get("callbacks", {}).get(KeptChoice().state_key)
    if not state or state["name"] not in CHOICES:
        raise ValueError(
            f"{path} does not say what AutoStrategy has chosen: name the strategy that it was written by, or begin a "
            "new fit with the weights alone, Model.load_from_checkpoint(path)."
        )
    return Kept(**state)


def _count_rounds(trainer: Trainer, kept: Kept) -> None:
    """Let a trainer count in epochs of the choice what it counts in passes."""
    loop, given = trainer.fit_loop, (trainer.fit_loop.max_epochs, trainer.check_val_every_n_epoch)
    loop.max_epochs, loop.min_epochs, trainer.check_val_every_n_epoch = (
        None if passes is None else kept.epochs(passes)
        for passes in (loop.max_epochs, loop.min_epochs, trainer.check_val_every_n_epoch)
    )
    loop.max_epochs = up_to_validation(loop.max_epochs, trainer.check_val_every_n_epoch, given)
    if kept.choice.steps is not None and given[0] is not None and given[0] > 0:
        rank_zero_info(
            f"The {given[0]} passes that max_epochs asks for become {loop.max_epochs} rounds, one epoch each."
        )
