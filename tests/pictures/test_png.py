"""The same charts by matplotlib, which the development environment has."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.pictures.png import write_pngs
from tests.pictures.records import record

RUNS = {"a": record(), "b": record(8, 40, counted=False, num_classes=17)}


@pytest.mark.slow
def test_a_file_is_written_for_each_chart(tmp_path: Path) -> None:
    paths = write_pngs(RUNS, "accuracy", tmp_path / "there")
    assert len(paths) == 3 + 4 + 4 and len({path.name for path in paths}) == len(paths)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_without_matplotlib_the_way_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install \"lightning-gnn-dist\[plots\]\""):
        write_pngs(RUNS, "accuracy", tmp_path / "there")
    assert not list(tmp_path.iterdir())
