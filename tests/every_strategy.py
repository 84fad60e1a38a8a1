"""Every strategy, for the tests that hold for all of them. A new one needs a line here, and no other."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist import EverySteps, GrappaStrategy, Launch, LLCGStrategy, LocalSGDStrategy, TMAStrategy

PATIENCE: dict[str, Any] = {"launch": Launch(timeout=timedelta(seconds=90), start_timeout=timedelta(seconds=180))}


def every_strategy(steps: int = 3) -> dict[str, Callable[[], Any]]:
    """By its short name what makes it, with rounds of so many steps."""
    return {
        "local_sgd": lambda: LocalSGDStrategy(EverySteps(steps), **PATIENCE),
        "llcg": lambda: LLCGStrategy(EverySteps(steps), **PATIENCE),
        "tma": lambda: TMAStrategy(EverySteps(steps), **PATIENCE),
        "grappa": lambda: GrappaStrategy(**PATIENCE),
    }


def plain_ddp(**options: Any) -> DDPStrategy:
    """Torch's own, which waits as long."""
    return DDPStrategy(timeout=PATIENCE["launch"].timeout, **options)
