"""A record survives its file, adds up, and reads well."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist.callbacks.record import FILE_NAME, Measured, PartsRecord, RankRound, RunRecord


def row(round_idx: int, bytes_sent: float | None = 1e6, meeting_seconds: float | None = 1.0) -> RankRound:
    return RankRound(round_idx, 16, 10.0, 2.0, 0.5, meeting_seconds, bytes_sent)


def record(num_rounds: int = 2) -> RunRecord:
    rounds = range(1, num_rounds + 1)
    return RunRecord(
        strategy="LocalSGDStrategy with EverySteps(16)",
        partitioner="MetisPartitioner()",
        num_ranks=2,
        finished=True,
        monitor="accuracy",
        ranks=[[row(index) for index in rounds], [row(index, 2e6) for index in rounds]],
        rounds=[Measured(index, 10.0 * index, {"accuracy": 0.1 * index, "loss": math.nan}) for index in rounds],
        parts=PartsRecord([3, 4], [[6, 1], [1, 8]], [0, 2], [[1, 0], [1, 2]]),
        coverage=[0.5, 1.0],
    )


def test_a_record_survives_its_file(tmp_path: Path) -> None:
    record().save(tmp_path)
    json.loads((tmp_path / FILE_NAME).read_text(), parse_constant=pytest.fail)  # no NaN: browsers cannot read it
    found = RunRecord.load(tmp_path)
    rounds = [replace(measured, metrics=measured.metrics | {"loss": None}) for measured in record().rounds]
    assert found == replace(record(), rounds=rounds)
    assert [file.name for file in tmp_path.iterdir()] == [FILE_NAME]


def test_bytes_of_all_ranks_add_up_round_by_round() -> None:
    assert record(3).bytes_sent == [3e6, 6e6, 9e6]
    assert replace(record(), ranks=[[row(1, None)], [row(1)]]).bytes_sent is None


def test_what_is_left_of_a_round_is_training() -> None:
    assert row(1).training_seconds == 6.5
    assert row(1, meeting_seconds=None).training_seconds == 7.5


def test_the_cut_is_what_lies_off_the_diagonal() -> None:
    assert record().parts is not None and record().parts.cut_ratio == pytest.approx(2 / 16)


def test_the_table_says_where_the_time_went() -> None:
    heading, titles, first, second, *_ = str(record()).splitlines()
    assert heading.endswith("2 ranks, 2 rounds, 12.5% of the edges cut, mean coverage 0.75. Where the time went:")
    assert titles.split() == ["rank", "batches", "training", "data", "meetings", "validation", "MB", "sent"]
    assert first.split() == ["0", "32", "13.00", "s", "1.00", "s", "2.00", "s", "4.00", "s", "2.00"]
    assert second.split()[-1] == "4.00"


def test_the_table_shows_ten_rounds_at_most_and_the_last_one() -> None:
    lines = str(record(95)).splitlines()[4:]
    assert len(lines) == 1 + 10
    assert lines[-1].split() == ["95", "950.0", "s", "285.00", "9.5000"]


def test_what_was_not_counted_is_a_dash() -> None:
    uncounted = replace(record(), ranks=[[row(1, None, None)]], parts=None, coverage=[None], monitor=None)
    heading, _, line = str(uncounted).splitlines()
    assert "cut" not in heading and "coverage" not in heading
    assert line.split()[-4:] == ["-", "2.00", "s", "-"]


def test_what_was_sent_at_the_boundary_has_a_column_where_there_is_some() -> None:
    ranks = [[replace(row(1), boundary_bytes=5e5)], [replace(row(1, None), boundary_bytes=25e4)]]
    _, titles, first, second, *_ = str(replace(record(), ranks=ranks)).splitlines()
    assert titles.endswith("  MB sent  MB at boundary") and "boundary" not in str(record())
    assert (first.split()[-2:], second.split()[-2:]) == (["1.00", "0.50"], ["-", "0.25"])


def test_what_was_fetched_has_columns_where_there_is_some() -> None:
    ranks = [[replace(row(1), fetched_bytes=5e5, cache_asked=8, cache_hits=2)], [row(1)]]
    _, titles, first, second, *_ = str(replace(record(), ranks=ranks)).splitlines()
    assert titles.endswith("  MB sent  MB fetched  held") and "fetched" not in str(record())
    assert (first.split()[-2:], second.split()[-2:]) == (["0.50", "25%"], ["0.00", "-"])


def test_what_was_held_on_the_device_has_a_column_without_anything_fetched() -> None:
    ranks = [[replace(row(1), cache_asked=8, cache_hits=6)], [row(1)]]
    _, titles, first, second, *_ = str(replace(record(), ranks=ranks)).splitlines()
    assert titles.endswith("  MB sent  held") and "held" not in str(record())
    assert (first.split()[-1], second.split()[-1]) == ("75%", "-")


def test_a_folder_without_a_record_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"has no report\.json\. RunReport writes one"):
        RunRecord.load(tmp_path)
    (tmp_path / "version_0").mkdir()
    record().save(tmp_path / "version_0")
    with pytest.raises(FileNotFoundError, match=r"Did you mean .*version_0\?"):
        RunRecord.load(tmp_path)


def test_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text('{"version": 99}')
    with pytest.raises(ValueError, match="is not a report of version 1"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize("value", [None, -1, -1.5, "x", [], {}, True, [None], 2**70])
@pytest.mark.parametrize("name", ["strategy", "num_ranks", "finished", "ranks", "rounds", "parts", "coverage", "new"])
def test_entries_of_another_type_are_refused(name: str, value: Any, tmp_path: Path) -> None:
    record().save(tmp_path)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    may_be = {"strategy": ["x"], "num_ranks": [2**70], "finished": [True], "parts": [None], "coverage": [[], [None]]}
    may_be |= {"ranks": [[]], "rounds": [[]]}
    (tmp_path / FILE_NAME).write_text(json.dumps(content | {name: value}))
    if any(value is good or (value == good and value is not True) for good in may_be.get(name, [])):
        str(RunRecord.load(tmp_path))
        return
    with pytest.raises(ValueError, match=rf"{FILE_NAME} is damaged \("):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, '{"version": 1}', '{"version"'])
def test_a_damaged_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    with pytest.raises(ValueError, match=rf"{FILE_NAME} is damaged"):
        RunRecord.load(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    with pytest.raises(ValueError, match="a file is needed"):
        RunRecord.load(tmp_path)


def test_what_was_sent_in_validation_has_a_column_and_one_rank_is_one() -> None:
    alone = replace(record(1), num_ranks=1, ranks=[[replace(row(1), validation_bytes=25e4)]])
    heading, titles, first, progress, *_ = str(alone).splitlines()
    assert ": 1 rank, 1 round, " in heading and titles.endswith("  MB sent  in validation")
    assert first.split()[-2:] == ["1.00", "0.25"] and "MB of all ranks" in progress
