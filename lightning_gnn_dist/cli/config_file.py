"""Checks configurations in YAML before they are built: a file must be small and plain, with the right sections.

An alias counts each time it is used: a few lines may stand for more values than fit into memory, and the parser of
options copies all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_gnn_dist.checks import check_file, shown

SUFFIXES = (".yaml", ".yml")
MAX_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 50
MAX_DIGITS = 1000
SECTIONS = {
    "model": "name its class, as in 'model: my_module.MyModel'",
    "data": "give settings, or name a class, as in 'data: {batch_size: 256}'",
    "trainer": "give settings, as in 'trainer: {max_epochs: 10}', or leave it out",
}
_KINDS = ("str", "int", "float", "bool", "null", "timestamp", "seq", "map", "merge", "value")
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in _KINDS}


def check_files(arguments: Sequence[str]) -> None:
    """Refuse configuration files on a command line that are too large, damaged or not plain."""
    for option, value in _values(arguments):
        if option in ("--config", "-c"):
            _check_sections(Path(value), _root(check_file("--config", value)))
        elif value.endswith(SUFFIXES) and Path(value).is_file():
            _root(Path(value))


def _values(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value, or the argument that follows it."""
    for option, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, equals, value = option.partition("=")
        if name.startswith("-") and (equals or following):
            yield name, value if equals else following


def _root(path: Path) -> yaml.Node | None:
    """The tree of a file, without building its values; None if the file is empty."""
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, and a configuration at most {MAX_BYTES:,}.")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not in UTF-8 (at byte {error.start}): save it again with that encoding."
        ) from error
    try:
        _check_depth(path, text)
        root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}{_line(error)} is no YAML: {_problem(error)}.") from error
    if root is not None:
        _count(path, root, {})
    return root


def _check_depth(path: Path, text: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            line = event.start_mark.line + 1
            raise ValueError(
                f"{path}, line {line}, is nested more than {MAX_DEPTH} levels deep: that is no configuration."
            )


def _count(path: Path, node: yaml.Node, known: dict[int, int]) -> int:
    """How many values a node stands for, aliases included. ``known`` holds -1 for a node that is being counted."""
    if id(node) in known:
        if known[id(node)] < 0:
            raise ValueError(f"{_place(path, node)} holds itself by an alias: write out what is meant.")
        return known[id(node)]
    known[id(node)] = -1
    if node.tag not in _TAGS:
        raise ValueError(f"{_place(path, node)} has the tag {shown(node.tag)}: use plain values.")
    if isinstance(node, yaml.ScalarNode):
        if node.tag.endswith((":int", ":float")) and len(node.value) > MAX_DIGITS:
            raise ValueError(f"{_place(path, node)} is a number of {len(node.value)} digits: no setting takes it.")
        known[id(node)] = 1
        return 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(path, node)
    children = [*sum(node.value, ())] if isinstance(node, yaml.MappingNode) else node.value
    total = 1 + sum(_count(path, child, known) for child in children)
    if total > MAX_VALUES:
        raise ValueError(f"{_place(path, node)} stands for more than {MAX_VALUES:,} values, aliases included.")
    known[id(node)] = total
    return total


def _check_keys(path: Path, node: yaml.MappingNode) -> None:
    seen = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.tag.endswith((":null", ":seq", ":map")):
            raise ValueError(f"{_place(path, key)} has a key that is no name: write name: value.")
        if key.value in seen and not key.tag.endswith(":merge"):
            raise ValueError(f"{_place(path, key)} names {shown(key.value)} for the second time: once is enough.")
        seen.add(key.value)


def _check_sections(path: Path, root: yaml.Node | None) -> None:
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag.endswith(":null")):
        raise ValueError(f"{path} is empty: a configuration names model, data and trainer.")
    if not isinstance(root, yaml.MappingNode):
        raise ValueError(f"{path} must hold names with settings, such as 'trainer: {{max_epochs: 10}}', at its top.")
    for key, value in root.value:
        if not key.tag.endswith((":str", ":merge")):
            raise ValueError(f"{_place(path, key)} has the key {key.value:.40}, and it is no name: write name: value.")
        is_text = isinstance(value, yaml.ScalarNode) and value.tag.endswith(":str")
        if key.value in SECTIONS and not (is_text or isinstance(value, yaml.MappingNode)):
            got = value.value or "nothing" if isinstance(value, yaml.ScalarNode) else "a list"
            raise ValueError(f"{_place(path, value)} has {got:.40} for {key.value}: {SECTIONS[key.value]}.")


def _place(path: Path, item: yaml.Node | yaml.Event) -> str:
    return f"{path}, line {item.start_mark.line + 1},"


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1},"


def _problem(error: yaml.YAMLError) -> str:
    """The YAML parser's message, on one line and without its excerpt of the file."""
    words = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    return " ".join(" ".join(word for word in words if word).split()).rstrip(".") or type(error).__name__
