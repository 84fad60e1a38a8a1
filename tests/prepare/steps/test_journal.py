"""What is recorded is there again; what cannot be trusted is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_gnn_dist.prepare.steps import journal
from lightning_gnn_dist.prepare.steps.journal import Journal, journal_of


def test_what_is_recorded_is_there_again(tmp_path: Path) -> None:
    with journal_of(tmp_path / "work", {"seed": 1}) as first:
        assert first.get("done", 7) == 7
        (first.folder / "rows").write_text("rows")
        first.record([first.folder / "rows"], done=3, sizes=[1, 2])
        first.record(done=4)
    with journal_of(tmp_path / "work", {"seed": 1}) as second:
        assert (second.get("done"), second.get("sizes")) == (4, [1, 2])
        second.forget("done")
    again = Journal(tmp_path / "work", {"seed": 1})
    assert again.get("done") is None and again.get("sizes") == [1, 2]
    again.clear()
    assert Journal(tmp_path / "work", {"seed": 1}).get("sizes") is None


def test_work_on_other_inputs_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, {"seed": 1, "split": (0.5, 0.5)}).record(done=1)
    assert Journal(tmp_path, {"seed": 1, "split": (0.5, 0.5)}).get("done") == 1
    with pytest.raises(ValueError, match="unfinished work with seed = 1, not 2: repeat that to finish it"):
        Journal(tmp_path, {"seed": 2, "split": (0.5, 0.5)})
    with pytest.raises(ValueError, match="unfinished work with split"):
        Journal(tmp_path, {"seed": 1})


@pytest.mark.parametrize("text", ["", '{"inputs": {}', '{"inputs": {}}'])
def test_a_damaged_journal_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(ValueError, match=r"state.json is damaged .*Delete .* to begin anew"):
        Journal(tmp_path, {})


def test_records_are_due_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diary = Journal(tmp_path, {})
    assert not diary.is_due()
    monkeypatch.setattr(journal, "RECORD_SECONDS", 0.0)
    assert diary.is_due()


def test_one_works_at_a_time(tmp_path: Path) -> None:
    with (
        journal_of(tmp_path, {}),
        pytest.raises(BlockingIOError, match="Another process works in"),
        journal_of(tmp_path, {}),
    ):
        pass
    with journal_of(tmp_path, {}):
        pass
