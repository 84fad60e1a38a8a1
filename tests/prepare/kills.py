"""Kills at a stage of the work, of the process itself or again and again, each time a little later."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist.prepare.journal import Journal

OnProgress = Callable[[str, float], None]


def killing(at: str, calls: int = 1) -> OnProgress:
    """Kills this process when it tells of a stage, or has done so several times."""
    left = calls

    def on_progress(stage: str, share: float) -> None:
        nonlocal left
        left -= stage == at
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return on_progress


def until_it_is_there(out: Path, step: int, prepare: Callable[[OnProgress], object]) -> None:
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


def before_the_last_record(prepare: Callable[[], object]) -> None:
    """Call ``prepare``, which is interrupted when all is written and the journal does not say so yet; then again."""
    record = Journal.record

    def killed(journal: Journal, *files: Any, **values: Any) -> None:
        if values.get("is_written"):
            raise KeyboardInterrupt
        record(journal, *files, **values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "record", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare()
    prepare()


def while_work_is_removed(prepare: Callable[[], object]) -> None:
    """Call ``prepare``, which is interrupted when the graph is there and half of the folder of its work is deleted."""
    remove = shutil.rmtree

    def killed(folder: Path, **options: Any) -> None:
        if ".preparing" in folder.name and folder.exists():
            for file in [path for path in folder.rglob("*.npy") if path.is_file()]:
                file.unlink()
            raise KeyboardInterrupt
        remove(folder, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prepare()
