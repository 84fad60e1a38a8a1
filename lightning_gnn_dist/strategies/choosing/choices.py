"""Eight named ways to train, between which ``AutoStrategy`` and ``lightning-gnn-dist choose`` choose."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

from lightning.pytorch.strategies import Strategy

from lightning_gnn_dist.checks import brief
from lightning_gnn_dist.rounds.clock import EverySteps
from lightning_gnn_dist.rounds.launching.launch import Launch
from lightning_gnn_dist.rounds.partitioned_strategy import PartitionedStrategy
from lightning_gnn_dist.strategies.correction import Correction
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.strategies.llcg import LLCGStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy

SHORT, LONG = 16, 64  # local steps of a round
USUAL, SLOWEST = 0.65, 0.1  # progress of averaged steps where it is not known, and the least that is believed


@dataclass(frozen=True)
class Choice:
    """A strategy with its settings.

    Args:
        method: The strategy.
        steps: Local steps of a round; None where ranks exchange gradients at every step.
        settings: Its other arguments.
        passes: How many passes it needs to be as accurate as Grappa after one, the median over real graphs
            (benchmarks/choosing.py): of averaging alone where averaged steps come as far as those of Grappa.
    """

    method: type[PartitionedStrategy]
    steps: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    passes: float = 1.0

    def strategy(self, launch: Launch = Launch(), of_ddp: Mapping[str, bool] = {}) -> PartitionedStrategy:
        """Return the strategy, where it exchanges gradients with these :func:`options_of_ddp`."""
        clock = () if self.steps is None else (EverySteps(self.steps),)
        options: dict[str, Any] = dict(of_ddp) if self.steps is None else {}
        return self.method(*clock, **self.settings, **options, launch=launch)

    def passes_at(self, progress: float | None) -> float:
        """Return how many passes it needs where averaged steps make so much progress; None where that is not known."""
        if self.steps is None or self.corrects:
            return self.passes
        return self.passes / min(1.0, max(SLOWEST, USUAL if progress is None else progress))

    @property
    def corrects(self) -> bool:
        """Whether gradients of the whole graph correct what averaging loses."""
        return self.method is LLCGStrategy

    @property
    def overlaps(self) -> bool:
        """Whether meetings go on while ranks train."""
        return bool(self.settings.get("overlap"))

    def __str__(self) -> str:
        clock = [] if self.steps is None else [f"EverySteps({self.steps})"]
        settings = [f"{name}={brief(value) if is_dataclass(value) else value}" for name, value in self.settings.items()]
        return f"{self.method.__name__}({', '.join([*clock, *settings])})"


_LATE = {"overlap": True}
_ONE_GRADIENT = {"correction": Correction(1, "anchor"), "overlap": True}  # all but the anchor travels in a round
CHOICES = {  # Grappa, which is safest, and then those that lose least first
    "Grappa": Choice(GrappaStrategy),
    "LLCG": Choice(LLCGStrategy, SHORT, passes=1.1),
    "averaging": Choice(LocalSGDStrategy, SHORT, passes=0.8),
    "averaging, overlap": Choice(LocalSGDStrategy, SHORT, _LATE, passes=1.0),
    "LLCG, overlap": Choice(LLCGStrategy, SHORT, _ONE_GRADIENT, passes=1.6),
    "Grappa, 8 bits": Choice(GrappaStrategy, settings={"bits": 8}),
    "LLCG, overlap, long rounds": Choice(LLCGStrategy, LONG, _ONE_GRADIENT, passes=6.0),
    "averaging, overlap, long rounds": Choice(LocalSGDStrategy, LONG, _LATE, passes=3.0),
}


def options_of_ddp(strategy: Strategy) -> dict[str, bool]:
    """Return what a user asks of an exchange of gradients, as ``{"find_unused_parameters": True}``."""
    given = getattr(strategy, "_ddp_kwargs", {})
    names = ("find_unused_parameters", "static_graph", "gradient_as_bucket_view")
    return {name: True for name in names if given.get(name)}


def up_to_validation(epochs: int | None, every: int | None, before: tuple[int | None, int | None]) -> int | None:
    """Return how many epochs end with a validation ``every`` so many, where both numbers of ``before`` did."""
    known = epochs is not None and epochs > 0 and every is not None
    if not known or before[0] is None or before[1] is None or before[0] % before[1]:
        return epochs
    assert epochs is not None and every is not None
    return math.ceil(epochs / every) * every
