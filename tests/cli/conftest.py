"""Commands in this process, as the console script runs them."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main
from tests.extensions import MISSING

EXAMPLES = Path(__file__).parents[2] / "examples"
shipped = pytest.mark.skipif(bool(MISSING), reason="what is shipped is about all of the package")
Command, Refused = Callable[..., None], Callable[..., str]


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in the folder of examples."""

    def run(*words: str) -> None:
        monkeypatch.chdir(EXAMPLES)
        monkeypatch.setattr(sys, "path", sys.path.copy())
        monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", *words])
        main()

    return run


@pytest.fixture
def refused(run_here: Command, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Run a command that is refused, and return the error that it leaves with, or all that it has written as errors."""

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as stop:
            run_here(*words)
        written = capsys.readouterr().err
        return stop.value.code if isinstance(stop.value.code, str) else written

    return run
