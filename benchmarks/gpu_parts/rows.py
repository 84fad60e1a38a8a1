"""The figures of a run: written one by one while they are measured, and read again as a table."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Goal = tuple[str, float]  # ("at least", 1.0) or ("at most", 1.3)
LONGEST = 2000  # characters of a traceback in a table's page; the JSON has all of it


class Rows:
    """Appends each figure of a part to a file as soon as it is there, a line of JSON each."""

    def __init__(self, file: Path, part: str) -> None:
        self._file, self._part = file, part

    def add(self, what: str, value: float | str, unit: str = "", *, goal: Goal | None = None, note: str = "") -> None:
        row: Row = {"part": self._part, "what": what, "value": value, "unit": unit, "note": note}
        if goal is not None:
            row |= {"goal": " ".join(map(str, goal)), "met": is_met(float(value), goal)}
        self._write(row)

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """An error in the block becomes a row with its traceback, and what comes after the block goes on."""
        try:
            yield
        except Exception as error:
            first = str(error).strip().partition("\n")[0]
            self.failed(what, f"{type(error).__name__}: {first}", traceback.format_exc())

    def failed(self, what: str, reason: str, details: str) -> None:
        self._write({"part": self._part, "what": what, "failed": reason, "details": details})

    def _write(self, row: Row) -> None:
        with self._file.open("a") as lines:
            lines.write(json.dumps(row) + "\n")


def is_met(value: float, goal: Goal) -> bool:
    return value >= goal[1] if goal[0] == "at least" else value <= goal[1]


def read(file: Path) -> list[Row]:
    """All rows; a last line that was cut short is left out."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def table(rows: list[Row]) -> Iterator[str]:
    """A Markdown table, and below it what failed."""
    yield "| part | what | figure | goal | note |"
    yield "|---|---|---|---|---|"
    for row in rows:
        yield "| " + " | ".join(_in_cell(cell) for cell in cells(row)) + " |"
    failed = [row for row in rows if "failed" in row]
    if failed:
        yield "\n## What failed"
    for row in failed:
        yield f"\n{row['part']}, {row['what']}:\n\n```text\n{row['details'][-LONGEST:].strip()}\n```"


def cells(row: Row) -> list[str]:
    if "failed" in row:
        return [row["part"], row["what"], "**failed**", "", row["failed"][:200]]
    goal = f"{row['goal']}: {'met' if row['met'] else 'not met'}" if "goal" in row else ""
    return [row["part"], row["what"], f"{shown(row['value'])} {row['unit']}".strip(), goal, row["note"]]


def shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _in_cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")
