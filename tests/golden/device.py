"""Where and how runs compute: on CPUs in float32, or as the environment says, which all ranks of a run share."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAME = "GOLDEN_{}"
_DEFAULTS = {"accelerator": "cpu", "precision": "32-true", "sample_on": "cpu", "half": "", "dropout": "0.2"}


def chosen(name: str) -> Any:
    return os.environ.get(_NAME.format(name.upper()), _DEFAULTS[name])


@contextmanager
def computing(**options: str) -> Iterator[None]:
    """Runs of the block, and the ranks that they start, compute so: on an accelerator, with a precision."""
    names = {_NAME.format(name.upper()): value for name, value in options.items()}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})
