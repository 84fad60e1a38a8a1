"""Checks configurations in YAML before they are built: no name twice, and names at the top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_gnn_dist.checks import check_file, shown

SUFFIXES = (".yaml", ".yml")


def check_files(arguments: Sequence[str]) -> None:
    """Refuse configuration files on a command line that are damaged, name a setting twice or hold no names."""
    for option, value in _values(arguments):
        if option in ("--config", "-c"):
            if not isinstance(_root(check_file("--config", value)), yaml.MappingNode):
                raise ValueError(f"{value} must hold names with settings, such as 'trainer: {{max_epochs: 10}}'.")
        elif value.endswith(SUFFIXES) and Path(value).is_file():
            _root(Path(value))


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, or the argument that follows it."""
    for option, following in zip(arguments, [*arguments, ""][1:], strict=True):
        name, equals, value = option.partition("=")
        if name.startswith("-") and (equals or following):
            yield name, value if equals else following


def _root(path: Path) -> yaml.Node | None:
    """The tree of a file, without building its values; None if the file is empty."""
    try:
        root: yaml.Node | None = yaml.compose(path.read_bytes().decode("utf-8-sig"), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not in UTF-8 (at byte {error.start}): save it again with that encoding."
        ) from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path}{_line(error)} is no YAML: {_problem(error)}.") from error
    _check_keys(path, root)
    return root


def _check_keys(path: Path, root: yaml.Node | None) -> None:
    """Refuse a name that stands twice among the settings of a node, of which YAML takes the last, or that is none."""
    nodes, known = [root], set()  # an alias may lead back to where it stands
    while nodes:
        node, seen = nodes.pop(), set()
        if id(node) in known:
            continue
        known.add(id(node))
        nodes += node.value if isinstance(node, yaml.SequenceNode) else ()
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith((":null", ":seq", ":map")):
                raise ValueError(f"{_place(path, key)} has a key that is no name: write name: value.")
            if key.value in seen and not key.tag.endswith(":merge"):
                raise ValueError(f"{_place(path, key)} names {shown(key.value)} for the second time: once is enough.")
            seen.add(key.value)
            nodes.append(value)


def _place(path: Path, item: yaml.Node) -> str:
    return f"{path}, line {item.start_mark.line + 1},"


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1},"


def _problem(error: yaml.YAMLError) -> str:
    """The YAML parser's message, on one line and without its excerpt of the file."""
    words = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    return " ".join(" ".join(word for word in words if word).split()).rstrip(".") or type(error).__name__
