"""Golden runs have names of their own, and what differs between two of them is said."""

from pathlib import Path

import pytest
import torch
from torch_geometric.data import HeteroData

from tests.golden.__main__ import compare
from tests.golden.runs import MODULES, jobs, runs_of
from tests.golden.tally import Tally, content_of


def test_every_run_is_in_one_job() -> None:
    names = [run.name for module in MODULES for run in runs_of(module)]
    assert len(names) == len(set(names)) > 700
    dealt = [name for job in jobs(lambda name: True) for name in job.names]
    assert sorted(dealt) == sorted(names)
    found = {path.stem for path in (Path(__file__).parent / "golden").glob("*.py") if "def runs()" in path.read_text()}
    assert found == set(MODULES)


def shown(folder: Path, *, turned: bool = False, moved: float = 0.0) -> dict[str, str]:
    batch, tally = HeteroData(), Tally(folder)
    for kind in ("user", "film")[:: -1 if turned else 1]:
        batch[kind].x = torch.ones(3, 2)
    batch["film"].x[1, 1] += moved
    batch["user", "rates", "film"].edge_index = torch.zeros(2, 4, dtype=torch.int64)
    tally.add("train", content_of(batch))
    tally.say("said", f"{folder}/x has an <object at 0x7f74fd2700e0>")
    return tally.result()


def test_a_hash_is_of_values_and_in_no_order(tmp_path: Path) -> None:
    found = shown(tmp_path)
    assert found == shown(tmp_path, turned=True)
    assert found["said"] == "<folder>/x has an <object at <address>>"
    other = shown(tmp_path, moved=1e-7)
    assert [name for name in found if found[name] != other[name]] == ["train.film.x"]


def test_what_differs_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    before = {"a": {"x": "1", "y": "2"}, "b": {"x": "1"}, "gone": {}}
    assert compare(before, {"a": {"x": "1", "y": "3"}, "b": {"x": "1", "z": "4"}, "new": {}}, 9)
    said = capsys.readouterr().out
    assert "differs  a\n           y: 2 -> 3\nalone    b: +z\n" in said
    assert "before alone  gone\nafter alone   new\n2 runs compared, 1 differ" in said
    assert not compare(before, before, 9)
