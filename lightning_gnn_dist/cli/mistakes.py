"""What is answered to options that are misspelt or have wrong values, in one line that names where they stand.

jsonargparse says which name it does not know. The nearest one is found here, among the names that are valid there.
Of a value it lists all that it has tried: what it tried first is what was meant.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import Namespace
from lightning.pytorch.strategies import StrategyRegistry

from lightning_gnn_dist.answers import did_you_mean, gone_argument, instead_of
from lightning_gnn_dist.checks import check_file, shown
from lightning_gnn_dist.gone import GONE, of_value, way_out

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
REFUSALS = (ValueError, TypeError, OSError)
KNOWN = ("best", "last", "hpc", "registry")  # checkpoints that Lightning finds by a word
PARSER_KEY = re.compile(r'Parser key "([^"]+)":')
GROUP = re.compile(r"(?:Group '|unrecognized arguments: --)([\w.]+)(?:' does not accept|\.\w+)")
CLASS = re.compile(r"Problem with given class_path '(?:[^']+\.)?(\w+)':\s+Option '(\w+)' is not accepted")
EXPECTED = re.compile(r"(?:Expected an?|does not implement protocol) (?!path but|dot import)((?:(?!\. Got value).)+)")
ADVICE = re.compile(r"^ *((?:There is no|A class is named|[\w.]+ went:) .*)", re.MULTILINE)
NAMED = re.compile(r"Subtypes: \[(<class '[^']+'>)(?=.*\]\n(?:.*\n)*?.*Expected a dot import)")
NO_SETTINGS = re.compile(r"Unable to load config '(.*)'")
NO_CLASS = re.compile(r"Expected a dot import path string: (.*)")
OF_TYPE = re.compile(r"Not of type .*")
GOT = re.compile(r"(?:Got|Given) value: (.*)")
TYPES = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text", "NoneType": "null"}
NO_OBJECT = "- Not a valid subclass of "
PLAIN = (str, int, float, bool, type(None))


def hint(message: str, names: Collection[str]) -> str | None:
    """A sentence that says how to repair what jsonargparse complains about, or None.

    Args:
        message: The message of jsonargparse.
        names: All names that the parser knows, with a dot between a group and a name in it.
    """
    for path, name in OF_CLASS.findall("\n".join(_first_tried(message.splitlines()))):
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
    if said := next((way_out(row) for row in GONE if row.partition(".")[2] == name), None):  # of any owner
        return said
    if near := did_you_mean(name, known):
        return f"There is no {name!r}.{near}"
    listed = ", ".join(sorted(known)[:MAX_LISTED])
    return f"There is no {name!r}: {owner} {listed}{', ...' if len(known) > MAX_LISTED else ''}."


def own_refusal(error: BaseException | None, of_user: str | None) -> str | None:
    """What this package said, if it raised the error or what led to it.

    Args:
        error: The error.
        of_user: The module of the user's model, once that is there: what it was refused keeps its traceback, which
            names the user's line.
    """
    while error is not None:
        if isinstance(error, REFUSALS) and _is_ours(error, of_user):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _is_ours(error: BaseException, of_user: str | None) -> bool:
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not modules or not modules[-1].startswith(f"{PACKAGE}."):
        return False
    return of_user not in modules or of_user.startswith(f"{PACKAGE}.")  # type: ignore[union-attr]  # it is a module


@contextmanager
def reading_checkpoint(path: str | None) -> Iterator[None]:
    """Refuse a file that is no checkpoint, of which torch raises whatever comes, or one that would run code."""
    _check_is_there(path)
    try:
        yield
    except Exception as error:
        found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        told = f"it holds {found[1]}" if found else f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise ValueError(
            f"ckpt_path must be a checkpoint of tensors and plain values, and {path!r} is none ({told})."
        ) from error


def _check_is_there(path: str | None) -> None:
    """Refuse a checkpoint that is not there. Some are named by words, or by the address of another host."""
    if path is not None and path.partition(":")[0] not in KNOWN and "://" not in path and not Path(path).exists():
        check_file("ckpt_path", path)


def in_one_line(message: str, way_out: str | None) -> str | None:
    """jsonargparse's complaint, or the way out of it, with the path; None where it speaks of no path.

    Args:
        message: The complaint.
        way_out: What is known about it already.
    """
    meant = "\n".join(_first_tried(message.splitlines()))
    path = ".".join([*PARSER_KEY.findall(meant), *GROUP.findall(meant)[:1]])
    if not path:
        return None
    advice = ADVICE.findall(meant)
    if advice and (way_out is None or "unrecognized" in meant):  # which is told without its path
        way_out = advice[0]
    if way_out is not None:
        return f"{path}: {way_out}"
    if found := CLASS.search(meant):
        return f"{path}: {found[1]} takes no {found[2]!r}: name the class that does, by class_path and init_args."
    if found := NO_SETTINGS.search(meant):  # the key is told twice
        return f"{path.rpartition('.')[0]} must be settings such as {{name: value}}, got {found[1]}."
    last = _of_last_key(meant)  # around it stands what else would do in the place of the whole
    if found := OF_TYPE.search(last):
        return f"{path}: {found[0]}."
    kinds, got = dict.fromkeys(map(_named, [*NAMED.findall(last), *EXPECTED.findall(last)])), GOT.findall(last)
    if not kinds and (found := NO_CLASS.search(meant)):
        return f"{path} must be the name of a class, got {found[1]}."
    if list(kinds) == ["null"] or NO_OBJECT in last:
        kinds = {"an object, by its class": None} | kinds
    if not kinds or not got:
        return None
    return f"{path} must be {' or '.join(kinds)}, got {got[0]}.{of_value(path.rpartition('.')[2], repr(got[0]))}"


def _first_tried(lines: list[str]) -> Iterator[str]:
    """Of alternatives the first, and of those within it the first again, with what leads there."""
    first: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if first is not None and line.strip() and indent <= first:
            return
        if line.lstrip().startswith("- Problem with given class_path"):
            first = indent
        yield line


def _of_last_key(message: str) -> str:
    """What is said below the last key of a parser, further in than it."""
    lines = message.splitlines()
    start = max(number for number, line in enumerate(lines) if PARSER_KEY.search(line))
    margin = len(lines[start]) - len(lines[start].lstrip())
    below = takewhile(lambda line: not line or len(line) - len(line.lstrip()) > margin, lines[start + 1 :])
    return "\n".join([PARSER_KEY.split(lines[start])[-1], *below])


def _named(kind: str) -> str:
    found = re.search(r"<class '(?:[^']+\.)?(\w+)'>", kind)
    name = found[1] if found else kind
    if is_dataclass(settings := getattr(import_module(PACKAGE), name, None)):
        return f"settings of {', '.join(field.name for field in fields(settings))}"
    return TYPES.get(name, f"a {name}" if name.isidentifier() else name.replace("typing.Literal", "one of "))


def with_path(reason: str, config: Namespace, given: Mapping[str, Any]) -> str:
    """What a value refuses, with the path of what is refused.

    Args:
        reason: What it says; mostly the name of an argument comes first.
        config: The configuration that it stands in.
        given: Its arguments.
    """
    path = next((path for path, node in _nodes(config) if _is_same(vars(node), given)), None)
    if path is None:
        return reason
    return f"{path}.{reason}" if re.match(r"\w*", reason)[0] in given else f"{path}: {reason}"  # type: ignore[index]


def check_values(config: Namespace) -> None:
    """Refuse what is written in the place of a value's settings: of this jsonargparse takes anything."""
    for path, node in _nodes(config):
        class_path = str(vars(node).get("class_path", ""))
        if class_path.startswith(f"{PACKAGE}.") and isinstance(vars(node).get("init_args"), Namespace):
            kind = resolve_name(class_path)  # a class, or a constructor of one that has a name
            settings = inspect.signature(kind).parameters
            for argument, given in vars(node.init_args).items():
                is_value = argument in settings and is_dataclass(settings[argument].default)
                is_word = is_value and given in _words(kind, argument)
                if is_value and not is_word and isinstance(given, PLAIN) and given is not None:
                    raise ValueError(f"{path}.{argument} must be settings such as {{name: value}}, got {shown(given)}.")


def _words(kind: Any, argument: str) -> tuple[object, ...]:
    """The words that may stand in the place of a value."""
    hints = get_args(get_type_hints(kind.__init__ if inspect.isclass(kind) else kind)[argument])
    return tuple(word for hint in hints if get_origin(hint) is Literal for word in get_args(hint))


def _nodes(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Namespace]]:
    """All that has settings, with where it stands."""
    if isinstance(node, Namespace):
        yield ".".join(path), node
        for name, inner in vars(node).items():
            yield from _nodes(inner, path if name in STRUCTURE else (*path, name))


def _is_same(written: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    plain = {name: value for name, value in given.items() if isinstance(value, PLAIN)}
    return bool(given) and written.keys() == given.keys() and all(written[name] == plain[name] for name in plain)
