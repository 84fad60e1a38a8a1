"""Docstrings as the site shows them: names become links, and formulas MathML, which browsers draw by themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from latex2mathml.converter import convert

ROOT = Path(__file__).parents[1]


def _places() -> Iterator[tuple[str, str]]:
    """The names that have a place to link to, with it; those of extensions that were taken out have none."""
    facade = (ROOT / "lightning_gnn_dist" / "__init__.py").read_text()
    modules = {name: module for module, name in re.findall(r"^    from (\S+) import (\w+) as", facade, re.MULTILINE)}
    for path in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        module, _, name = path.rpartition(".")
        if ROOT.joinpath(*modules.get(name, module).split(".")).with_suffix(".py").exists():
            yield name, path


PLACES = dict(_places())
_ROLE = re.compile(r":(?:class|meth|func|mod|attr):`~?([\w.]+)`")
_FORMULA = re.compile(r":math:`([^`]+)`")
_FORMULAS = re.compile(r"^\.\. math::\n((?:\n| +.*\n?)+)", re.MULTILINE)


class Readable(griffe.Extension):
    """Runs for every object that griffe has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = shown(obj.docstring.value)


def shown(text: str) -> str:
    """The text with the marks of Sphinx replaced by what Markdown understands."""
    text = _FORMULAS.sub(lambda match: f"<div class='wide'>{_mathml(match[1], 'block')}</div>\n\n", f"{text}\n")
    text = _FORMULA.sub(lambda match: _mathml(match[1], "inline"), text)
    return _ROLE.sub(lambda match: _link(match[1]), text).rstrip("\n")


def _mathml(formula: str, display: str) -> str:
    return convert(" ".join(formula.split()), display=display)


def _link(name: str) -> str:
    """A link to a public name, also when it is told by where it is defined; other names as they are."""
    short = name.rsplit(".", 1)[-1] if name.startswith("lightning_gnn_dist.") else name
    first, _, rest = short.partition(".")
    if first in PLACES:
        return f"[`{short}`][{'.'.join(filter(None, (PLACES[first], rest)))}]"
    return f"`{name}`"
