"""``lightning-gnn-dist choose``: probe a fit, say which strategy takes least time, and write the fit with it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]  # its stubs are another package
from lightning.pytorch import LightningDataModule, LightningModule, Trainer

from lightning_gnn_dist.callbacks.discrepancy import DiscrepancyProbe
from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.rounds.clock import EverySteps, KnownSteps
from lightning_gnn_dist.rounds.launching.launch import Launch
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.strategies.choosing.choices import Choice, options_of_ddp, up_to_validation
from lightning_gnn_dist.strategies.choosing.costs import Decision, choose
from lightning_gnn_dist.strategies.choosing.probe import Parts, Probed, probe


class ChoosingTrainer(Trainer):
    """A trainer that says with which strategy its fit takes least time."""

    def choose(
        self,
        model: LightningModule,
        datamodule: LightningDataModule | None = None,
        out: str = "chosen.yaml",
        overwrite: bool = False,
    ) -> tuple[Decision, Probed]:
        """Take a few steps and exchanges, choose between eight strategies, and write the configuration of that fit.

        Args:
            model: The model.
            datamodule: Its graph, and how that is cut: what is named there stays.
            out: The configuration to write, for fit.
            overwrite: Replace a file that is there.
        """
        if self.world_size == 1:
            raise ValueError(
                "devices=1 leaves nothing to choose, as a rank that is alone exchanges nothing: give more."
            )
        if datamodule is None:
            raise ValueError("choose needs a data module, which cuts the graph for each strategy: give data.")
        if any(isinstance(callback, DiscrepancyProbe) for callback in self.callbacks):  # type: ignore[attr-defined]
            raise ValueError(
                "DiscrepancyProbe measures at meetings, and not all that may be chosen has some: leave it out."
            )
        if Path(out).exists() and not overwrite:
            raise FileExistsError(f"{shown(Path(out))} exists: give --overwrite=true, or another --out.")
        launch = getattr(self.strategy, "launch", Launch())
        found = probe(self, model, datamodule, launch)
        return choose(found.measured), found


def write(text: str, decision: Decision, found: Probed, trainer: Trainer, out: Path) -> list[str]:
    """Write the configuration of a fit with what was chosen, and return what to say of it.

    Args:
        text: That of the fit as it was.
        decision: What was chosen.
        found: What the probe has found.
        trainer: The trainer of the fit as it was.
        out: The file.
    """
    config, choice = yaml.safe_load(text), decision.choice
    changed = {**config, "trainer": {**config["trainer"], **_of_trainer(config["trainer"], choice, found, trainer)}}
    parts = found.of_gradients if choice.steps is None else found.of_rounds
    changed["data"] = _with_parts(config["data"], parts)
    lines = [*decision.lines, *_of_clock(trainer)]
    about = "".join(f"# {line}\n" for line in lines)
    out.write_text(about + yaml.safe_dump(changed, sort_keys=False, allow_unicode=True))
    return lines


def _of_clock(trainer: Trainer) -> list[str]:
    """Return what to say of epochs that cannot be counted in others."""
    clock = getattr(trainer.strategy, "clock", None)
    if clock is None or isinstance(clock, KnownSteps):
        return []
    return [f"max_epochs={trainer.max_epochs} stays, as rounds of {clock} have no known number of steps: give another."]


def _of_trainer(given: Mapping[str, Any], choice: Choice, found: Probed, trainer: Trainer) -> dict[str, Any]:
    """Return the strategy, and as many of its epochs as take the steps of the fit as it was."""
    before = given.get("strategy")
    kept = before.get("init_args", {}) if isinstance(before, Mapping) else {}
    strategy = {name: kept[name] for name in ("launch",) if name in kept}
    strategy |= {} if choice.steps is None else {"clock": described(EverySteps(choice.steps))}
    strategy |= options_of_ddp(trainer.strategy) if choice.steps is None else {}
    strategy |= {name: described(value) for name, value in choice.settings.items()}
    settings: dict[str, Any] = {"strategy": {"class_path": _path_of(choice.method), "init_args": strategy}}
    of_epoch = found.measured.gradients.in_pass if choice.steps is None else choice.steps
    for name in ("max_epochs", "min_epochs", "check_val_every_n_epoch"):
        epochs = getattr(trainer, name)
        if epochs is not None and epochs > 0 and (steps := _steps(trainer, epochs, found)) is not None:
            settings[name] = math.ceil(steps / of_epoch)
    if "max_epochs" in settings:
        before = trainer.max_epochs, trainer.check_val_every_n_epoch
        every = settings.get("check_val_every_n_epoch")
        settings["max_epochs"] = up_to_validation(settings["max_epochs"], every, before)
    return settings


def _steps(trainer: Trainer, epochs: int, found: Probed) -> int | None:
    """Return the steps of so many epochs of a fit; None where its clock does not say."""
    strategy = trainer.strategy
    if not isinstance(strategy, RoundStrategy):
        return epochs * found.measured.gradients.in_pass
    if not isinstance(strategy.clock, KnownSteps):
        return None
    return sum(strategy.clock.steps_of_round(round_idx, found.measured.local.in_pass) for round_idx in range(epochs))


def _with_parts(data: Mapping[str, Any], parts: Parts) -> dict[str, Any]:
    """Return the data module with the partitioner and the boundary that the probe had."""
    known = {name: described(value) for name, value in parts._asdict().items() if is_dataclass(value)}
    if "class_path" in data:
        return {**data, "init_args": {**data.get("init_args", {}), **known}}
    return {**data, **known}


def described(value: Any) -> Any:
    """Return how a configuration writes a value: a dataclass by its class, and the fields that are not at defaults."""
    if not is_dataclass(value) or isinstance(value, type):
        return value
    given = {each.name: getattr(value, each.name) for each in fields(value)}
    others = {each.name: described(given[each.name]) for each in fields(value) if given[each.name] != each.default}
    return {"class_path": _path_of(type(value)), **({"init_args": others} if others else {})}


def _path_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
