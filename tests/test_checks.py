"""The table of rules in docs/api.md is that of the annotations. `python -m tests.test_rules` writes it anew."""

import re
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from lightning_gnn_dist import Halo
from lightning_gnn_dist.checks import Rule, rules_of
from tests.extensions import MISSING
from tests.pages import public

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
HEAD = "\n## What arguments may be\n\n| may be | arguments |\n| --- | --- |\n"


def table() -> str:
    found: dict[str, list[str]] = {}
    for name, kind in sorted(public().items()):
        if isinstance(kind, type) and is_dataclass(kind) and name != "GraphTypes":  # which a graph makes, no user
            for argument, hint in rules_of(kind).items():
                if hint is not bool and (said := words(hint)):
                    found.setdefault(said, []).append(f"`{name}.{argument}`")
    return "".join(f"| {said} | {', '.join(arguments)} |\n" for said, arguments in sorted(found.items()))


def words(hint: Any) -> str:
    """What a rule says of a value, or nothing where an annotation has none."""
    if get_origin(hint) is Annotated:
        rule = get_args(hint)[1]
        return (
            rule.words if isinstance(rule, Rule) else f"a name such as `{rule!r}`" if hint.__origin__ is str else rule
        )
    if get_origin(hint) is Literal:
        return ", ".join(f"`{choice!r}`" for choice in get_args(hint))
    if hint in (bool, NoneType):
        return "`True`, `False`" if hint is bool else "`None`"
    said = [words(option) for option in get_args(hint)]
    return " or ".join(said) if said and all(said) else ""


def test_the_table_is_that_of_the_rules() -> None:
    there, found = public(), ""
    for row in PAGE.read_text().partition(HEAD)[2].splitlines():
        _, said, listed, _ = re.split(r" ?\| ?", row)
        arguments = [each for each in listed.split(", ") if not MISSING or each.strip("`").partition(".")[0] in there]
        found += f"| {said} | {', '.join(arguments)} |\n" if arguments else ""
    assert found == table(), "write it anew: python -m tests.test_rules"


def test_what_somebody_derives_may_have_fields_of_any_type() -> None:
    class Unheard: ...

    @dataclass(frozen=True)
    class Own(Halo):
        more: Unheard | None = None

    assert Own(2).more is None
    with pytest.raises(ValueError, match="hops must be an integer of at least 1, got 0"):
        Own(0)


if __name__ == "__main__":
    PAGE.write_text(PAGE.read_text().partition(HEAD)[0] + HEAD + table())
