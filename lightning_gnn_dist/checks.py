"""What a user may give. A refusal names the argument, the value and the way out, and comes before anything is done."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, get_args


def check_at_least(least: int, **numbers: int) -> None:
    """Refuse what is no whole number, or too small."""
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}.")


def check_at_least_if_given(least: int, **numbers: int | None) -> None:
    """The same where None is a choice."""
    check_at_least(least, **{name: value for name, value in numbers.items() if value is not None})


def check_true_or_false(**flags: bool) -> None:
    """Refuse what is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {value!r}.")


def is_number(value: Any) -> bool:
    """Whether it is a real number; True and False are none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_between(least: float, most: float, **numbers: float) -> None:
    """Refuse what is no number, not finite, or out of bounds."""
    for name, value in numbers.items():
        if not (is_number(value) and math.isfinite(value) and least <= value <= most):
            limits = f"of at least {least}" if math.isinf(most) else f"between {least} and {most}"
            raise ValueError(f"{name} must be a finite number {limits}, got {value!r}.")


def check_choice(name: str, value: Any, choices: Any) -> None:
    """``choices`` is a ``Literal``, or one with ``None``."""
    allowed = [choice for option in get_args(choices) for choice in get_args(option) or [option]]
    allowed = [None if choice is type(None) else choice for choice in allowed]
    if value not in allowed:
        raise ValueError(f"{name} must be one of {allowed}, got {value!r}.")
