"""Prepare a graph again and again, each time killed a little later, until it is there."""

from collections.abc import Callable
from pathlib import Path


def until_it_is_there(out: Path, step: int, prepare: Callable[[Callable[[str, float], None]], object]) -> None:
    """Call ``prepare`` with what it tells of its progress, which interrupts it ``step`` calls later each time."""
    stages: list[str] = []
    kills = 0

    def killed(stage: str, share: float) -> None:
        stages.append(stage)
        if len(stages) > kills:
            raise KeyboardInterrupt

    while not out.exists():
        kills += step
        stages.clear()
        try:
            prepare(killed)
        except KeyboardInterrupt:
            assert kills < 400
    assert kills > 10 and stages[-1] == "taking the fingerprint"
