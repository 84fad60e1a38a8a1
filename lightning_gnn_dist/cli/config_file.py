"""Checks configurations in YAML before they are built: no name twice, and the right sections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml  # type: ignore[import-untyped]  # its stubs are another package

from lightning_gnn_dist.checks import check_file, shown

SUFFIXES = (".yaml", ".yml")
SECTIONS = {
    "model": "name its class, as in 'model: my_module.MyModel'",
    "data": "give settings, or name a class, as in 'data: {batch_size: 256}'",
    "trainer": "give settings, as in 'trainer: {max_epochs: 10}', or leave it out",
}


def check_files(arguments: Sequence[str]) -> None:
    """Refuse configuration files on a command line that are damaged, name a setting twice or have other sections."""
    for option, value in _values(arguments):
        if option in ("--config", "-c"):
            _check_sections(Path(value), _root(check_file("--config", value)))
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


def _place(path: Path, item: yaml.Node) -> str:
    return f"{path}, line {item.start_mark.line + 1},"


def _line(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return "" if mark is None else f", line {mark.line + 1},"


def _problem(error: yaml.YAMLError) -> str:
    """The YAML parser's message, on one line and without its excerpt of the file."""
    words = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    return " ".join(" ".join(word for word in words if word).split()).rstrip(".") or type(error).__name__
