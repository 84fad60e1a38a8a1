"""The sign by which a launcher sees its ranks."""

import os
import sys
import time
from pathlib import Path

import pytest

from lightning_gnn_dist.extensions.elastic.launcher import Launcher
from lightning_gnn_dist.extensions.elastic.settings import SIGN, Sign, is_silent, waits


def wait_until(path: Path, *, is_there: bool) -> None:
    end = time.monotonic() + 60
    while path.exists() != is_there:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_sign_is_there_says_who_waits_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sign"
    monkeypatch.setenv(SIGN, str(path))
    sign = Sign()
    assert not waits(path) and not is_silent(path, 0.0)  # a rank that does not train yet
    sign.show()
    wait_until(path, is_there=True)
    with sign.waiting():
        assert waits(path)
    assert not waits(path) and not is_silent(path, 60.0)
    sign.leave()
    wait_until(path, is_there=False)
    path.touch()
    os.utime(path, (0.0, 0.0))
    assert is_silent(path, 60.0)


def test_without_a_launcher_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SIGN, raising=False)
    sign = Sign()
    sign.show()
    with sign.waiting():
        sign.leave()


def test_a_rank_that_is_started_again_is_not_taken_for_the_dead_one(tmp_path: Path) -> None:
    launcher = Launcher([sys.executable, "-S", "-c", ""], 1, 0, 1.0, 5.0, print)
    launcher._signs = str(tmp_path)
    of_the_dead = launcher._sign(0)
    of_the_dead.write_text("waits")
    os.utime(of_the_dead, (0.0, 0.0))
    launcher._start(0, "http://127.0.0.1:1")
    try:
        assert not is_silent(launcher._sign(0), 6.0) and not waits(launcher._sign(0))
    finally:
        launcher._end_all()
