"""What an argument may be, as data in its annotation: one function checks it, and the documentation lists it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np

from lightning_gnn_dist.checks import (
    MAX_HOPS,
    MAX_INTEGER,
    MAX_NUMBER,
    MAX_SEED,
    check_at_least,
    check_between,
    check_choice,
    check_instance,
    check_positive,
    check_true_or_false,
    check_word,
)


@dataclass(frozen=True)
class Rule:
    """What a value must be, in words, and the function that refuses others, given by the name of the argument."""

    words: str
    check: Callable[..., None]


def whole(least: int, most: int = MAX_INTEGER, hint: str = "") -> Rule:
    """An integer from ``least`` to ``most``; ``hint`` says what it counts."""
    words = f"an integer of at least {least}" if most == MAX_INTEGER else f"an integer between {least} and {most:,}"
    return Rule(words, partial(check_at_least, least, hint, most=most))


def within(least: float, most: float, hint: str = "") -> Rule:
    """A finite number from ``least`` to ``most``; ``hint`` says what one of them does."""
    return Rule(f"a number between {least:g} and {most:g}", partial(check_between, least, most, hint))


Count = Annotated[int, whole(1)]
Natural = Annotated[int, whole(0)]
Hops = Annotated[int, whole(1, MAX_HOPS)]
Layers = Annotated[int, whole(1, MAX_HOPS, "it is the model's number of layers")]
Seed = Annotated[int, whole(0, MAX_SEED)]
Fraction = Annotated[float, within(0, 1)]
Amount = Annotated[float, within(0, MAX_NUMBER)]
Positive = Annotated[float, Rule("a number above 0", check_positive)]


def check_fields(settings: object) -> None:
    """Refuse a frozen dataclass with a field that breaks the rules of its annotation; make NumPy's numbers Python's."""
    for name, hint in rules_of(type(settings)).items():
        check_value(name, value := getattr(settings, name), hint)
        if isinstance(value, np.number):  # small types of NumPy overflow when multiplied
            object.__setattr__(settings, name, value.item())


def rules_of(settings: type[object]) -> dict[str, Any]:
    """The annotation of each field of a class of this package, or of what somebody derives from it."""
    ours = next(level for level in settings.__mro__ if level.__module__.startswith(f"{__package__}."))
    hints = get_type_hints(ours, include_extras=True)
    return {field.name: hints[field.name] for field in fields(ours) if field.init}


def check_value(name: str, value: Any, hint: Any) -> None:
    """Refuse a value that breaks the rules of an annotation. Where it has none, anything passes.

    ``Literal`` and ``bool`` are rules by themselves. A text beside a type is an example of what it takes.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if hint is bool:
        check_true_or_false(**{name: value})
    elif all(option in (bool, NoneType) or get_origin(option) is Literal for option in options):
        check_choice(name, value, hint)
    elif value is not None or NoneType not in options:
        for kind, rule in (get_args(option) for option in options if get_origin(option) is Annotated):
            if isinstance(rule, Rule):
                rule.check(**{name: value})
            elif kind is str:
                check_word(name, value, rule)
            else:
                check_instance(name, value, kind, rule)
