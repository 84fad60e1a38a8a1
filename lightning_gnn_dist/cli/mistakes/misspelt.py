"""Suggests the right name for one that a configuration misspells.

jsonargparse says which name it does not know. The nearest one is found here, among the names that are valid there.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module

from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnn_dist.answers import gone_argument, instead_of
from lightning_gnn_dist.gone import of_argument, way_out

PACKAGE = __name__.partition(".")[0]
OF_CLASS = re.compile(r"given class_path '([^']+)':\s+Option '([^']+)' is not accepted")
OF_PARSER = re.compile(
    r"^(?:Group '([^']+)' does not accept option|Subcommand '\S+' does not accept option|Option) '([^']+)'"
)
OF_MODULE = re.compile(r"module '([^']+)' has no attribute '([^']+)'")
NO_PATH = re.compile(r"Expected a dot import path string: (\w+)$", re.MULTILINE)
NO_MODULE = re.compile(r"No module named '([^']+)'")
FLAG = re.compile(r"unrecognized arguments: --([\w.]+)")
KEY = re.compile(r"'(\w+)': ")
STRUCTURE = ("class_path", "init_args")
VARIADIC = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
MAX_LISTED = 30


def hint(message: str, names: Collection[str]) -> str | None:
    """A sentence that says how to repair what jsonargparse complains about, or None.

    Args:
        message: The message of jsonargparse.
        names: All names that the parser knows, with a dot between a group and a name in it.
    """
    for path, name in OF_CLASS.findall(message):
        if name in STRUCTURE or get_close_matches(name.partition(".")[0], STRUCTURE, cutoff=0.8):
            return next(_misspelt_structure(message), "Beside class_path stands init_args, and arguments stand in it.")
        with suppress(ImportError, AttributeError, ValueError):  # a class that cannot be imported or inspected
            if advice := _of_class(path, name):
                return advice
    if found := OF_MODULE.search(message):
        module, name = found.groups()
        public = [other for other in dir(import_module(module)) if not other.startswith("_")]
        return _suggest(name, public, f"{module} has")
    if found := NO_MODULE.search(message):
        return f"There is no module {found[1]!r}: it must be installed, or lie in the directory this is started from."
    if found := OF_PARSER.search(message):
        return _of_parser(".".join(part for part in found.groups() if part), names)
    if found := FLAG.search(message):
        return _of_parser(found[1], names)
    if (found := NO_PATH.search(message)) and (advice := _without_module(found[1])):
        return advice
    return next(_misspelt_structure(message), None)


def _of_class(path: str, name: str) -> str | None:
    """The advice on a wrong argument of a class; None if it takes none, like a base tried in its place."""
    module, _, attribute = path.rpartition(".")
    kind = getattr(import_module(module), attribute)
    known = _parameters(kind)
    if said := gone_argument(kind, name):
        return said
    if here := _of_values(kind).get(name):
        return f"There is no {name!r}: write {here!r}."
    return f"There is no {name!r}. {instead_of(kind, name, known)}" if known else None


def _of_parser(name: str, names: Collection[str]) -> str | None:
    """The advice on a wrong name of the parser: the first wrong segment is compared with what is known there."""
    prefix = ""
    for segment in name.split("."):
        here = {known.removeprefix(prefix).split(".")[0] for known in names if known.startswith(prefix)}
        if not here:  # an inner parser, which was tried for something else
            return None
        if segment not in here:
            return _suggest(segment, here, f"{prefix.rstrip('.') or 'a configuration'} takes")
        prefix += f"{segment}."
    return f"{name!r} is known, but not for this command."


def _parameters(function: object) -> list[str]:
    """The names of the arguments of a class or function; a class with ``**kwargs`` takes its bases', too."""
    levels = function.__mro__ if isinstance(function, type) else (function,)
    found: dict[str, None] = {}
    for level in levels:
        parameters = inspect.signature(level).parameters if callable(level) else {}
        found |= {name: None for name, parameter in parameters.items() if parameter.kind not in VARIADIC}
        if not any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    return list(found)


def _of_values(kind: type) -> dict[str, str]:
    """Where what is no argument of a class stands: in one of its settings."""
    settings = {name: parameter.default for name, parameter in inspect.signature(kind).parameters.items()}
    values = {name: default for name, default in settings.items() if is_dataclass(default)}
    places = [(name, field.name) for name, value in values.items() for field in fields(value)]
    # An argument of an earlier version may have had both names.
    return {said: f"{name}.{field}" for name, field in places for said in (field, f"{name}_{field}")}


def check_strategy(given: object) -> None:
    """Refuse a text that names no strategy: Lightning says neither which is near nor how a class is named."""
    known = {"auto", *StrategyRegistry.available_strategies()}
    if not isinstance(given, str) or given.lower() in known:
        return
    module, _, name = given.rpartition(".")
    if said := way_out(name):
        raise ValueError(f"trainer.strategy: {said}")
    if module not in ("", PACKAGE):
        raise ValueError(
            f"trainer.strategy: a class is named by class_path, --trainer.strategy.class_path={given}, or in a file "
            f"strategy: {{class_path: {given}}}, got the text {given!r}."
        )
    names = [each for each in known if PACKAGE not in each]
    near = _without_module(name) if name.lower().endswith("strategy") else None
    raise ValueError(f"trainer.strategy: {near or _suggest(given, names, 'Lightning knows')}")


def _without_module(name: str) -> str | None:
    """The advice on a class of this package that was named without its module, or None."""
    public = [other for other in dir(import_module(PACKAGE)) if other[0].isupper()]
    by_lower = {other.lower(): other for other in public}
    near = [by_lower[found] for found in get_close_matches(name.lower(), by_lower, n=1, cutoff=0.85)]
    return f"A class is named with its module. Did you mean '{PACKAGE}.{near[0]}'?" if near else None


def _misspelt_structure(message: str) -> Iterator[str]:
    for name in KEY.findall(message):
        if name not in STRUCTURE and get_close_matches(name, STRUCTURE, n=1, cutoff=0.8):
            yield _suggest(name, STRUCTURE, "a class takes")


def _suggest(name: str, known: Collection[str], owner: str) -> str:
    if said := of_argument(name):
        return said
    if near := get_close_matches(name, known, n=1):
        return f"There is no {name!r}. Did you mean {near[0]!r}?"
    listed = ", ".join(sorted(known)[:MAX_LISTED])
    return f"There is no {name!r}: {owner} {listed}{', ...' if len(known) > MAX_LISTED else ''}."
