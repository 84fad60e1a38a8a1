"""Every notebook of docs runs, and shows what is stored in it: the same kinds of output, and the same figures."""

import json
import re
import socket
from pathlib import Path

import pytest

from tests.pages import TUTORIALS
from tests.python_server import fast_python
from tests.test_notebook import Session
from tests.test_nothing_stays import wait_until_none
from tests.tutorials import cells, kinds, numbers, run

PRIVATE = re.compile(r"/(?:home|root|tmp|usr|var|work|opt|Users)/|Warning|IProgress|\\x1b")
MOST_BYTES = 300_000


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_and_shows_what_its_page_shows(path: Path, tmp_path: Path) -> None:
    session = Session(tmp_path, fast_python())
    try:
        session.run("%matplotlib inline")  # as it is where a kernel imports it first
        for cell in cells(path):
            outputs, source = run(session, cell), "".join(cell["source"])
            assert kinds(outputs) == kinds(cell["outputs"]), source
            if (tolerance := cell["metadata"].get("tolerance")) is not None:
                assert numbers(outputs) == pytest.approx(numbers(cell["outputs"]), abs=tolerance, rel=0), source
    finally:
        session.close()
    assert wait_until_none(tmp_path, 20.0) == []


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_is_stored_as_it_ran(path: Path) -> None:
    """From the first cell to the last, with nothing of the machine, and small."""
    code = cells(path)
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    stored = re.sub(r'("image/png": )\[.*?\]', r"\1[]", json.dumps([cell["outputs"] for cell in code]))
    assert not PRIVATE.search(stored) and socket.gethostname() not in stored
    assert '"error"' not in stored and '"stderr"' not in stored
    assert path.stat().st_size < MOST_BYTES


def test_figures_that_matter_have_a_tolerance() -> None:
    assert all(any("tolerance" in cell["metadata"] for cell in cells(path)) for path in TUTORIALS)
    assert numbers([{"text": "[0.5, -3] in 12 s, x1"}, {"data": {"text/plain": "{'a': 1.25}"}}]) == [0.5, -3, 12, 1.25]
