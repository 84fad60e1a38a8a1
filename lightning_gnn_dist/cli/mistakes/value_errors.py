"""What is wrong with a value of a configuration, in one line that names where it stands: ``data.loading.bulk_size``.

jsonargparse lists all that it has tried for a value. What it tried first is what was meant.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib import import_module
from itertools import takewhile
from pkgutil import resolve_name
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jsonargparse import Namespace

from lightning_gnn_dist.checks import shown
from lightning_gnn_dist.cli.mistakes.misspelt import PACKAGE, STRUCTURE
from lightning_gnn_dist.gone import of_value

KEY = re.compile(r'Parser key "([^"]+)":')
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


def in_one_line(message: str, way_out: str | None) -> str | None:
    """jsonargparse's complaint, or the way out of it, with the path; None where it speaks of no path.

    Args:
        message: The complaint.
        way_out: What is known about it already.
    """
    meant = "\n".join(_first_tried(message.splitlines()))
    path = ".".join([*KEY.findall(meant), *GROUP.findall(meant)[:1]])
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
    """Of a list of alternatives the first, with what leads there."""
    first: int | None = None
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if first is not None and line.strip() and indent <= first:
            return
        if first is None and line.lstrip().startswith("- Problem with given class_path"):
            first = indent
        yield line


def _of_last_key(message: str) -> str:
    """What is said below the last key of a parser, further in than it."""
    lines = message.splitlines()
    start = max(number for number, line in enumerate(lines) if KEY.search(line))
    margin = len(lines[start]) - len(lines[start].lstrip())
    below = takewhile(lambda line: not line or len(line) - len(line.lstrip()) > margin, lines[start + 1 :])
    return "\n".join([KEY.split(lines[start])[-1], *below])


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
