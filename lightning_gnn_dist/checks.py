"""Checks of what a user gives. A refusal names the argument, the value and the way out, before anything is done.

A wrong kind of object is a ``TypeError``; a number, word, path or flag that means nothing is a ``ValueError``. What an
argument may be is data in its annotation: one function checks it, and the documentation lists it.
"""

from __future__ import annotations

import inspect
import os
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.gone import of_value

MAX_INTEGER = 2**63 - 1  # the largest that a tensor, a file or a C library holds
MAX_SEED = 2**48 - 1  # the seeds of each rank and purpose, which are made of it, stay integers of 64 bits
MAX_HOPS = 10_000  # loops over the hops of a model then end
MAX_NUMBER = 1e9  # a share, a time in seconds or a weight beyond this is a mistake
PLAIN = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
PLAIN |= {torch.float32, torch.float64, torch.complex64, torch.complex128}  # the types that can be added up and saved
_MAX_SHOWN = 200  # letters of a value in an error
_MAX_NAME = 255  # bytes of a file's name
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict, _short.maxset = 3, 4, 4, 4, 4


def shown(value: object) -> str:
    """Return the text that a refusal shows for a value: one short line, however large the value is; a path, whole."""
    if isinstance(value, Path):
        return repr(str(value))
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "numpy array"
        return f"a {kind} of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, int) and abs(value) > 10**60:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(_short.repr(value).split())
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    except Exception:  # raised by somebody else's __repr__
        return f"a {type(value).__name__}"


def brief(value: Any) -> str:
    """Return how a dataclass is written, without the fields that are at their defaults: ``Exchange(every=5)``."""
    settings = [(each.name, getattr(value, each.name), each.default) for each in fields(value)]
    given = [f"{name}={chosen!r}" for name, chosen, default in settings if chosen != default]
    return f"{type(value).__name__}({', '.join(given)})"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """The lines of a table; its columns begin at one place each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def in_megabytes(num_bytes: float) -> str:
    """Return how a number of bytes is told: ``1,234.50 MB``."""
    return f"{num_bytes / 1e6:,.2f} MB"


def in_bytes(count: float) -> str:
    """A number of bytes in a fitting unit, such as ``1.5 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


# Numbers.


def is_limit(batches: object) -> bool:
    """Whether a trainer's ``limit_..._batches`` leaves any out: 1 is one batch, and 1.0 is all of them."""
    return isinstance(batches, int) or batches != 1.0


def is_integer(value: object) -> bool:
    """Return whether it is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return whether it is an integer or a float of Python or NumPy; True and False are none."""
    return is_integer(value) or isinstance(value, float | np.floating)


def check_at_least(least: int, hint: str = "", /, *, most: int = MAX_INTEGER, **numbers: int) -> None:
    """Refuse a value that is no integer, or lies below ``least`` or above ``most``. ``hint`` says what it counts."""
    for name, value in numbers.items():
        if not is_integer(value) or value < least:
            raise ValueError(_refusal(name, f"an integer of at least {least}", value, hint))
        if value > most:
            limit = "2**63 - 1" if most == MAX_INTEGER else f"{most}"
            raise ValueError(_refusal(name, f"an integer between {least} and {limit}", value, hint))


def check_at_least_if_given(least: int, **numbers: int | None) -> None:
    """Do as :func:`check_at_least`, but let None pass."""
    check_at_least(least, **{name: value for name, value in numbers.items() if value is not None})


def check_below(end: int, what: str, **numbers: int) -> None:
    """Refuse a value that is no integer from 0 to ``end - 1``; ``what`` names the things that it counts."""
    for name, value in numbers.items():
        check_at_least(0, **{name: value})
        if value >= end:
            raise ValueError(f"{name} must be below {end}, the number of {what}, got {value}: they count from 0.")


def check_between(least: float, most: float, hint: str = "", /, **numbers: float) -> None:
    """Refuse a value that is no finite number from ``least`` to ``most``. ``hint`` says what such a number does."""
    for name, value in numbers.items():
        if not is_number(value) or not least <= value <= most:
            raise ValueError(_refusal(name, f"a finite number between {least:g} and {most:g}", value, hint))


def _refusal(name: str, wants: str, value: object, hint: str) -> str:
    return f"{name} must be {wants}, got {shown(value)}{hint and f': {hint}'}.{of_value(name, shown(value))}"


def check_fits(num_bytes: int, what: str) -> None:
    """Refuse ``what`` if its bytes exceed the memory of this machine, before they are allocated."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there:
        raise ValueError(f"{what} would take {num_bytes / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f} GB.")


def check_positive(**numbers: float) -> None:
    """Refuse a value that is no number above 0 and up to ``MAX_NUMBER``."""
    for name, value in numbers.items():
        if not is_number(value) or not 0 < value <= MAX_NUMBER:
            limit = f" (it may be up to {MAX_NUMBER:g})" if is_number(value) and value > MAX_NUMBER else ""
            raise ValueError(f"{name} must be a positive number, got {shown(value)}{limit}.")


def check_seed(seed: int) -> None:
    """Refuse a seed that is no integer from 0 to ``MAX_SEED``."""
    check_at_least(0, most=MAX_SEED, seed=seed)


# Words and flags.


def check_true_or_false(**flags: bool) -> None:
    """Refuse a value that is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {shown(value)}.")


def check_choice(name: str, value: object, choices: Any) -> None:
    """Refuse a value that is none of ``choices``: a ``Literal``, or one beside None or ``bool``."""
    known: dict[Any, list[Any]] = {type(None): [None], bool: [True, False]}
    allowed = [choice for option in get_args(choices) for choice in known.get(option) or get_args(option) or [option]]
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name} must be one of {allowed}, got {shown(value)}.{of_value(name, shown(value))}")


def check_word(name: str, value: object, example: str) -> None:
    """Refuse a value that is no text, or an empty one."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a name such as {example!r}, got {shown(value)}.")


def check_path(name: str, value: object) -> Path:
    """Return the value as a ``Path``; refuse it if no file can have that name. The file need not exist."""
    if not isinstance(value, str | os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(f'{name} must be a path such as "folder/file" or Path("folder"), got {shown(value)}.')
    text = os.fspath(value)
    if not text or "\0" in text:
        raise ValueError(f"{name} must be a path of at least one letter and without zero bytes, got {shown(text)}.")
    longest = max(len(part.encode(errors="surrogatepass")) for part in Path(text).parts or (".",))
    if longest > _MAX_NAME:
        raise ValueError(f"{name} must be a path whose parts have at most {_MAX_NAME} bytes, got {shown(text)}.")
    return Path(text)


def check_folder(name: str, value: object) -> Path:
    """Return the value as a ``Path``; refuse it if it, or a parent, is a file. The folder need not exist."""
    path = check_path(name, value)
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{name} must be a folder, got {shown(path)}, and {shown(place)} is a file.")
    return path


def check_file(name: str, value: object) -> Path:
    """Return the value as a ``Path``; refuse it if no such file exists."""
    path = check_path(name, value)
    if not path.is_file():
        raise FileNotFoundError(f"{name} must be a file, and {shown(path)} is none.")
    return path


# Objects.


def check_instance(name: str, value: object, kinds: Any, example: str) -> None:
    """Refuse a value that is no instance of ``kinds``; a class given in place of an object is refused, too."""
    if isinstance(value, type) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {example}, got {shown(value)}.")


def takes(function: object, *arguments: object) -> bool:
    """Return whether it can be called with these arguments, as far as its signature tells."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say
        return True
    return True


def check_callable(name: str, value: object, example: str, *arguments: object) -> None:
    """Refuse a value that cannot be called with these arguments, and any class."""
    if isinstance(value, type) or not takes(value, *arguments):
        raise TypeError(f"{name} must be {example}, got {shown(value)}.")


def check_durations(**durations: timedelta) -> None:
    """Refuse a value that is no ``timedelta`` above 0 and up to ``MAX_NUMBER`` seconds."""
    for name, value in durations.items():
        check_instance(name, value, timedelta, "a timedelta, such as timedelta(minutes=30)")
        if not 0 < value.total_seconds() <= MAX_NUMBER:
            raise ValueError(f"{name} must be longer than nothing, got {value}, and up to {MAX_NUMBER:g} seconds.")


def check_list(name: str, value: object, example: str) -> None:
    """Refuse a value that is no sequence, and a text or bytes."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list such as {example}, got {shown(value)}.")


def check_words(name: str, value: object, example: str) -> None:
    """Refuse a value that is no collection of texts, such as a single text or a dict."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a list of names such as {example}, got {shown(value)}.")
    for word in value:
        if not isinstance(word, str):
            raise TypeError(f"{name} must hold names such as those of {example}, got {shown(word)}.")


def check_tensor(name: str, value: object, what: str) -> None:
    """Refuse a value that is no tensor. Arrays and lists are refused too, so that nothing is copied unseen."""
    if not isinstance(value, Tensor):
        wide = isinstance(value, np.ndarray | list | tuple)
        array = name if name.isidentifier() else "..."
        if isinstance(value, np.ndarray) and value.dtype.kind in "mM":  # of dates, which torch does not know
            array = f"({array}).astype('int64')"
        way_out = f" Make it one: torch.as_tensor({array})." if wide else ""
        if isinstance(value, list | tuple) and any(isinstance(entry, str) for entry in value[:1]):
            way_out = " Turn its words into numbers, or remove it."
        raise TypeError(f"{name} must be a tensor of {what}, got {shown(value)}.{way_out}")


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not dense, not on the CPU, of a type outside ``PLAIN``, or requires a gradient."""
    way_out = ""
    if tensor.layout != torch.strided or tensor.is_nested:
        way_out = f"is sparse or nested: store it dense, {name}.to_dense()"
    elif tensor.device.type != "cpu":
        way_out = f"lies on the device {str(tensor.device)!r}: give what it holds in RAM, {name}.cpu()"
    elif tensor.dtype not in PLAIN:
        way_out = f"is of {tensor.dtype}, which cannot be computed with: give {name}.long(), of fractions .float()"
    elif tensor.requires_grad:
        way_out = f"requires a gradient, which data has none of: give {name}.detach()"
    if way_out:
        raise ValueError(f"{name} {way_out}.")


def check_ids(name: str, value: Any) -> None:
    """Refuse a value that is no vector of integers; a mask is none."""
    check_tensor(name, value, "node ids")
    check_plain(name, value)
    if value.dim() != 1 or not holds_integers(value):
        way_out = "Turn a mask into ids with mask.nonzero().view(-1)."
        raise ValueError(f"{name} must be a vector of node ids, got {shown(value)}. {way_out}")


def holds_integers(tensor: Tensor) -> bool:
    """Return whether the tensor has an integer type; bool and quantised types are none."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or "bool" in str(tensor.dtype))


def check_arrays_if_given(**arrays: Mapping[str, Tensor] | None) -> None:
    """Do as :func:`check_arrays`, but let None pass."""
    check_arrays(**{name: value for name, value in arrays.items() if value is not None})


def check_arrays(**arrays: Mapping[str, Tensor]) -> None:
    """Refuse a value that is no mapping of names to tensors that :func:`check_plain` accepts."""
    for name, value in arrays.items():
        check_instance(name, value, Mapping, 'a dict of names and tensors such as {"x": x}')
        for key, array in value.items():
            check_word(f"a name in {name}", key, "x")
            check_tensor(f"{name}[{shown(key)}]", array, "one row for each")
            check_plain(f"{name}[{shown(key)}]", array)


def without_way_out(error: Exception) -> str:
    """What an error says, without what to do after its last colon: of a damaged file that is to copy it again."""
    what, colon, _ = str(error).rpartition(": ")
    return what if colon else str(error).rstrip(".")


# Annotations.


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
