"""What a user may give. A refusal names the argument, the value and the way out, and comes before anything is done.

A wrong kind of object is a ``TypeError``; a number, word, path or flag that means nothing is a ``ValueError``.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor

MAX_INTEGER = 2**63 - 1  # of a tensor, a file and a C library
MAX_SEED = 2**48 - 1  # so that a seed for each rank and purpose, which is made of it, stays an integer of 64 bits
MAX_HOPS = 10_000  # of a model: all that is done for each hop then ends
MAX_NUMBER = 1e9  # of a share, a time in seconds, a weight: what lies beyond is a mistake
PLAIN = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
PLAIN |= {torch.float32, torch.float64, torch.complex64, torch.complex128}  # types that can be added up, and saved
_MAX_SHOWN = 200  # letters
_MAX_NAME = 255  # bytes of a file's name
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict, _short.maxset = 3, 4, 4, 4, 4


def shown(value: object) -> str:
    """A value as a refusal shows it: on one line, and short however large it is."""
    if isinstance(value, Tensor | np.ndarray):
        kind = "tensor" if isinstance(value, Tensor) else "numpy array"
        return f"a {kind} of {value.dtype} and shape {tuple(value.shape)}"
    if isinstance(value, int) and abs(value) > 10**60:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = " ".join(_short.repr(value).split())
        return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
    except Exception:  # of somebody else's __repr__
        return f"a {type(value).__name__}"


# Numbers.


def is_integer(value: object) -> bool:
    """Whether it is a whole number; True and False are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a real number; True and False are none."""
    return is_integer(value) or isinstance(value, float | np.floating)


def make_plain(settings: Any) -> None:
    """Make Python's numbers of NumPy's in a frozen dataclass: those of few bits overflow where they are multiplied."""
    for field in dataclasses.fields(settings):
        if isinstance(value := getattr(settings, field.name), np.number):
            object.__setattr__(settings, field.name, value.item())


def check_at_least(least: int, *, most: int = MAX_INTEGER, **numbers: int) -> None:
    """Refuse what is no whole number, too small or too large."""
    for name, value in numbers.items():
        if not is_integer(value) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {shown(value)}.")
        if value > most:
            limit = "2**63 - 1" if most == MAX_INTEGER else f"{most}"
            raise ValueError(f"{name} must be an integer between {least} and {limit}, got {shown(value)}.")


def check_at_least_if_given(least: int, **numbers: int | None) -> None:
    """The same where None is a choice."""
    check_at_least(least, **{name: value for name, value in numbers.items() if value is not None})


def check_below(end: int, what: str, **numbers: int) -> None:
    """Refuse what is no number of one of so many things, counted from 0."""
    for name, value in numbers.items():
        check_at_least(0, **{name: value})
        if value >= end:
            raise ValueError(f"{name} must be below {end}, the number of {what}, got {value}: they count from 0.")


def check_between(least: float, most: float, **numbers: float) -> None:
    """Refuse what is no number, not finite, or out of bounds."""
    for name, value in numbers.items():
        if not is_number(value) or not least <= value <= most:
            raise ValueError(f"{name} must be a finite number between {least} and {most:g}, got {shown(value)}.")


def check_fits(num_bytes: int, what: str) -> None:
    """Refuse what needs more memory than there is, before it is asked for."""
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if num_bytes > there:
        raise ValueError(f"{what} would take {num_bytes / 1e9:,.0f} GB, and this machine has {there / 1e9:,.0f} GB.")


def check_positive(**numbers: float) -> None:
    """Refuse what is no number, not finite, or not above 0."""
    for name, value in numbers.items():
        if not is_number(value) or not 0 < value <= MAX_NUMBER:
            limit = f" (it may be up to {MAX_NUMBER:g})" if is_number(value) and value > MAX_NUMBER else ""
            raise ValueError(f"{name} must be a positive number, got {shown(value)}{limit}.")


def check_seed(seed: int) -> None:
    """Refuse what is no seed."""
    check_at_least(0, most=MAX_SEED, seed=seed)


# Words and flags.


def check_true_or_false(**flags: bool) -> None:
    """Refuse what is neither True nor False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {shown(value)}.")


def check_choice(name: str, value: object, choices: Any) -> None:
    """``choices`` is a ``Literal``, or one with ``None``."""
    allowed = [choice for option in get_args(choices) for choice in get_args(option) or [option]]
    allowed = [None if choice is type(None) else choice for choice in allowed]
    if not any(type(value) is type(choice) and value == choice for choice in allowed):
        raise ValueError(f"{name} must be one of {allowed}, got {shown(value)}.")


def check_word(name: str, value: object, example: str) -> None:
    """Refuse what is no text, or empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a name such as {example!r}, got {shown(value)}.")


def check_path(name: str, value: object) -> Path:
    """Refuse what names no file; return it as a ``Path``."""
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
    """Refuse what names no folder, present or to come; return it as a ``Path``."""
    path = check_path(name, value)
    for place in (path, *path.parents):
        if place.exists() and not place.is_dir():
            raise ValueError(f"{name} must be a folder, got {shown(str(path))}, and {shown(str(place))} is a file.")
    return path


def check_file(name: str, value: object) -> Path:
    """Refuse what is no file; return it as a ``Path``."""
    path = check_path(name, value)
    if not path.is_file():
        raise FileNotFoundError(f"{name} must be a file, and {shown(str(path))} is none.")
    return path


def check_npy(name: str, value: object) -> Path:
    """Refuse what is no path of predictions to write; return it as a ``Path``."""
    path = check_path(name, value)
    if path.suffix != ".npy" or path.is_dir():
        raise ValueError(f"{name}: predictions are written as .npy, and {shown(str(path))} ends otherwise.")
    return path


# Objects.


def check_instance(name: str, value: object, kinds: Any, example: str) -> None:
    """Refuse what is no object of these kinds. A class in the place of an object is none."""
    if isinstance(value, type) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {example}, got {shown(value)}.")


def takes(function: object, *arguments: object) -> bool:
    """Whether it can be called with such arguments, as far as one can tell without calling it."""
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
    """Refuse what cannot be called with such arguments."""
    if isinstance(value, type) or not takes(value, *arguments):
        raise TypeError(f"{name} must be {example}, got {shown(value)}.")


def check_durations(**durations: timedelta) -> None:
    """Refuse what is no time longer than nothing."""
    for name, value in durations.items():
        check_instance(name, value, timedelta, "a timedelta, such as timedelta(minutes=30)")
        if not 0 < value.total_seconds() <= MAX_NUMBER:
            raise ValueError(f"{name} must be longer than nothing, got {value}, and up to {MAX_NUMBER:g} seconds.")


def check_list(name: str, value: object, example: str) -> None:
    """Refuse what is no list or tuple, such as a word alone."""
    if isinstance(value, str | bytes | bytearray) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a list such as {example}, got {shown(value)}.")


def check_words(name: str, value: object, example: str) -> None:
    """Refuse what is no collection of names."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Collection):
        raise TypeError(f"{name} must be a list of names such as {example}, got {shown(value)}.")
    for word in value:
        if not isinstance(word, str):
            raise TypeError(f"{name} must hold names such as those of {example}, got {shown(word)}.")


def check_tensor(name: str, value: object, what: str) -> None:
    """Refuse what is no tensor: arrays and lists have to be made into one, so that nothing is copied unseen."""
    if not isinstance(value, Tensor):
        wide = isinstance(value, np.ndarray | list | tuple)
        way_out = f" Make it one: torch.as_tensor({name if name.isidentifier() else '...'})." if wide else ""
        raise TypeError(f"{name} must be a tensor of {what}, got {shown(value)}.{way_out}")


def check_plain(name: str, tensor: Tensor) -> None:
    """Refuse a tensor whose numbers do not lie in RAM one behind the other, or are of a type that loops do not know."""
    way_out = ""
    if tensor.layout != torch.strided or tensor.is_nested:
        way_out = f"is sparse or nested: store it dense, {name}.to_dense()"
    elif tensor.device.type != "cpu":
        way_out = f"lies on the device {str(tensor.device)!r}: give what it holds in RAM, {name}.cpu()"
    elif tensor.dtype not in PLAIN:
        way_out = f"is of {tensor.dtype}, which cannot be computed with: convert it, as in {name}.to(torch.float32)"
    elif tensor.requires_grad:
        way_out = f"requires a gradient, which data has none of: give {name}.detach()"
    if way_out:
        raise ValueError(f"{name} {way_out}.")


def check_ids(name: str, value: Any, what: str = "node ids") -> None:
    """Refuse what is no vector of integers. A mask is none."""
    check_tensor(name, value, what)
    check_plain(name, value)
    if value.dim() != 1 or not holds_integers(value):
        raise ValueError(
            f"{name} must be a vector of {what}, got {shown(value)}. Turn a mask into ids with mask.nonzero().view(-1)."
        )


def holds_integers(tensor: Tensor) -> bool:
    """Whether its numbers are whole, and neither flags nor quantised."""
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized or "bool" in str(tensor.dtype))


def check_arrays_if_given(**arrays: Mapping[str, Tensor] | None) -> None:
    """The same where None is a choice."""
    check_arrays(**{name: value for name, value in arrays.items() if value is not None})


def check_arrays(**arrays: Mapping[str, Tensor]) -> None:
    """Refuse what is no mapping of names to tensors."""
    for name, value in arrays.items():
        check_instance(name, value, Mapping, 'a dict of names and tensors such as {"x": x}')
        for key, array in value.items():
            check_word(f"a name in {name}", key, "x")
            check_tensor(f"{name}[{shown(key)}]", array, "one row for each")
            check_plain(f"{name}[{shown(key)}]", array)


def check_each(least: int, name: str, values: Iterable[int]) -> None:
    """Refuse a list in which something is no whole number, or too small."""
    for value in values:
        check_at_least(least, **{f"{name}: an entry": value})
