"""Rows of a table of cases that the quick suite leaves out."""

from typing import Any

import pytest


def slow(*case: Any) -> Any:
    return pytest.param(*case, marks=pytest.mark.slow)
