"""The tables of docs/combinations.md say what fits say."""

import pytest

from tests.combinations import CELLS, PAGE, WORKS, parts_of_page, read, try_out, written

SAID = read(PAGE.read_text())
WAY_OUT = "write the tables anew: python -m tests.combinations"
EVERY_FIT, EVERY_REFUSAL = 229, 51  # of which one is tried in the quick suite; a refusal takes hardly any time


def test_the_tables_have_every_combination() -> None:
    assert SAID.keys() == set(CELLS), WAY_OUT
    assert written({cell: SAID[cell] for cell in CELLS}) == parts_of_page()[1], WAY_OUT


def test_some_combinations_are_as_the_tables_say() -> None:
    fits = [cell for cell in CELLS if SAID.get(cell) == WORKS]
    refused = [cell for cell in CELLS if SAID.get(cell, WORKS) != WORKS]
    for cell, said in try_out([*fits[::EVERY_FIT], *refused[::EVERY_REFUSAL]], timeout=120).items():
        assert said == SAID[cell], f"{cell}: {WAY_OUT}"


@pytest.mark.slow
def test_a_twentieth_of_all_combinations_is_as_the_tables_say() -> None:
    for cell, said in try_out(CELLS[::20], timeout=1800).items():  # the command above tries all
        assert said == SAID[cell], f"{cell}: {WAY_OUT}"
