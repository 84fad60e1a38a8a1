"""The drawing of the architecture says what the imports say: every box is there, and every arrow is an import."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.extensions import MISSING
from tests.pages import ROOT
from tests.test_architecture import PACKAGE, imported_modules, modules

DRAWN = list(ElementTree.parse(ROOT / "docs" / "assets" / "architecture.svg").iter())
ARROWS = [(each.attrib["data-from"], each.attrib["data-to"]) for each in DRAWN if "data-from" in each.attrib]
EXTENSIONS = {
    each.attrib["data-extension"]: each.attrib["data-by"].split() for each in DRAWN if "data-by" in each.attrib
}
EXTENSIONS = {name: places for name, places in EXTENSIONS.items() if name not in MISSING}


def files_of(place: str) -> set[Path]:
    return {PACKAGE / place} if place.endswith(".py") else set(modules(PACKAGE / place))


def imports(one: str, other: str) -> bool:
    """Whether a module of one place needs a module of the other, itself or through a third."""
    direct = {module for path in files_of(one) for module in imported_modules(path, PACKAGE)}
    return not files_of(other).isdisjoint(direct.union(*(imported_modules(path, PACKAGE) for path in direct)))


def test_every_box_is_there_and_every_extension_has_one() -> None:
    drawn = [each.attrib["data-module"] for each in DRAWN if "data-module" in each.attrib]
    assert len(drawn) > 20 and [place for place in drawn if not (PACKAGE / place).exists()] == []
    assert set(EXTENSIONS) == {path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")}


def test_the_columns_meet_in_one_module() -> None:
    assert ("data/datamodule.py", "joint.py") in ARROWS and imports("strategies", "joint.py")


def test_every_extension_has_a_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \[", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert rows == sorted([*EXTENSIONS, *MISSING])


@pytest.mark.parametrize(("one", "other"), ARROWS)
def test_an_arrow_is_an_import(one: str, other: str) -> None:
    assert imports(one, other) or imports(other, one)


@pytest.mark.skipif(bool(MISSING), reason="what needs another may have lost modules with it")
@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_imports_what_it_comes_in_by(name: str) -> None:
    assert [place for place in EXTENSIONS[name] if not imports(f"extensions/{name}", place)] == []
