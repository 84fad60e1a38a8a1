"""Runs the command with options that it refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def refused(given: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Run ``fit`` in the folder of examples, with options that it refuses, and return what it writes as errors."""
    monkeypatch.chdir(EXAMPLES)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "fit", *given])
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().err
