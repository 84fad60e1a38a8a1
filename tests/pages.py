"""The pages that a user reads, README.md and those in docs, and what stands in them."""

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

from tests.extensions import MISSING
from tests.python_server import fast_python

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# The first link of an extension's row, where that is a whole page: it is deleted with the folder.
OWN_PAGES: dict[str, str] = dict(
    re.findall(r"(?m)^\| `(\w+)` \| \[[^]]*\]\(([\w-]+\.md)\)", (ROOT / "docs" / "architecture.md").read_text())
)
GONE_PAGES = {ROOT / "docs" / page for name, page in OWN_PAGES.items() if name in MISSING}
TUTORIALS = sorted((ROOT / "docs").glob("*.ipynb"))
_FENCE = re.compile(r"^ *```(\w*)$")


def public() -> dict[str, Any]:
    """Everything on the page of the API by its name: all that the package exports, and more from modules."""
    return {name: thing for name, thing in _of_api() if thing is not None}


@cache
def gone() -> set[str]:
    """The names on that page that went with the folder of an extension."""
    return {name for name, thing in _of_api() if thing is None}


def _of_api() -> Iterator[tuple[str, Any]]:
    for place in re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE):
        try:
            yield place.rpartition(".")[2], resolve_name(place)
        except (ImportError, AttributeError):
            if not MISSING:
                raise
            yield place.rpartition(".")[2], None


class Block(NamedTuple):
    """Some code of a page, and the heading above it."""

    page: str
    heading: str
    code: str


def blocks(language: str, page: str | None = None, heading: str | None = None) -> list[Block]:
    """All blocks of a language, or those of one page, or under one heading of it."""
    found = [block for path in PAGES for block in _blocks(path, language)]
    return [block for block in found if page in (None, block.page) and heading in (None, block.heading)]


def _blocks(path: Path, language: str) -> Iterator[Block]:
    heading, inside, lines = "", None, []
    for line in path.read_text().splitlines():
        fence = _FENCE.match(line)
        if inside is None and line.startswith("#"):
            heading = line.lstrip("# ")
        if fence is None:
            lines.append(line)
        elif inside is None:
            inside, lines = fence[1], []
        else:
            if inside == language:
                yield Block(path.stem, heading, textwrap.dedent("\n".join([*lines, ""])))
            inside = None


def links(path: Path) -> list[tuple[str, str]]:
    """Where a page leads to within the repository: a file ("" is the page itself) and an anchor, perhaps empty."""
    return sorted(set(re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", path.read_text())))


def anchors(path: Path) -> set[str]:
    """The headings of a page, as a link names them."""
    titles = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def words_of(svg: str) -> list[str]:
    """What a picture says."""
    return re.findall(r"<text [^>]*>([^<]*)</text>", svg)


def write_files(folder: Path) -> None:
    """Write the module and the configuration of the page, for five passes in the place of thirty."""
    (module,) = [block.code for block in blocks("python", "quick-start") if "class SAGE" in block.code]
    (folder / "my_modules.py").write_text(module)
    config = blocks("yaml", "quick-start")[0].code
    assert "max_epochs: 30" in config
    (folder / "my.yaml").write_text(config.replace("max_epochs: 30", "max_epochs: 5"))


def run_commands(lines: Sequence[str], folder: Path) -> str:
    """Run lines of a console one after the other; return what they say."""
    (folder / "lightning-gnn-dist").write_text(f'#!/bin/bash\nexec {fast_python()} -m lightning_gnn_dist "$@"\n')
    (folder / "lightning-gnn-dist").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(["set -e", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
