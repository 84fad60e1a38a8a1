"""Every argument of everything public: a value is right, or refused in one sentence that names it and the way out."""

import re
import signal
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.arguments import ODD, Case, World, cases

SECONDS = 10  # for one call: what takes longer hangs
MOST_LETTERS = 600


@contextmanager
def limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TimeoutError(f"It took longer than {SECONDS} seconds.")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def verdict(case: Case, argument: str, odd: str) -> tuple[str, str]:
    """``right``, ``refused``, or what is wrong: ``accepted``, ``alien`` words, ``unclear`` ones, ``hangs``."""
    value = case.value(argument, odd)
    try:
        with limited():
            case.call(**{argument: value})
    except TimeoutError as error:
        return "hangs", str(error)
    except Exception as error:
        return _of_error(error, argument, value)
    return ("right", "") if odd in case.right(argument) else ("accepted", "")


def _of_error(error: Exception, argument: str, value: object) -> tuple[str, str]:
    message = f"{type(error).__name__}: {error}"
    last = list(traceback.walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__", "")
    ours = last.startswith("lightning_gnn_dist.") and isinstance(error, ValueError | TypeError | OSError)
    if not ours or (isinstance(error, OSError) and error.errno is not None):
        return "alien", f"{message[:300]} ({last})"
    text = str(error)
    names_it = re.search(rf"\b{argument}\b", text) or (isinstance(value, str) and value and value[:20] in text)
    if not names_it or "\n" in text or not text.endswith(".") or len(text) > MOST_LETTERS:
        return "unclear", message[:MOST_LETTERS]
    return "refused", message


def all_verdicts(world: World) -> Iterator[tuple[str, str, str, str, str]]:
    for case in cases(world):
        case.call()
        for argument in case.arguments():
            for odd in ODD:
                yield case.name, argument, odd, *verdict(case, argument, odd)


def test_each_value_of_each_argument_is_right_or_refused_in_our_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = list(all_verdicts(World(tmp_path)))
    wrong = [row for row in found if row[3] not in ("right", "refused")]
    assert wrong == [], Counter(row[3] for row in found)
