"""What the site adds to the pages: README.md first, notebooks, measurements, old names, and files that pages name.

All of them can be read in the repository as well. Their links name files of the repository; here they lead to where the
site has these.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
from functools import cache
from pathlib import Path
from runpy import run_path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MEASUREMENTS = ROOT / "benchmarks"
GONE = ROOT / "lightning_gnn_dist" / "gone.py"
_LINK = re.compile(r"(?<=\])\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
_LINKED = re.compile(r"\[([^]]*)\]\(([^)#\s]+)[^)]*\)")  # words, and where they lead
_PLACE = re.compile(r"^::: (\S+)\n", re.MULTILINE)  # of the page of the API
_CONSOLE = re.compile(r'<div class="language-console highlight">(<pre>.*?</pre>)</div>', re.DOTALL)


def on_config(config: MkDocsConfig) -> None:
    """Take pages of extensions that were taken out from the navigation."""
    config.nav = _without_gone(config.nav)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, a page for each notebook, all measurements, and every other file that a page links to."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for notebook in sorted(DOCS.glob("*.ipynb")):
        files.append(File.generated(config, f"{notebook.stem}.md", content=_as_page(notebook)))
    linked = {path for page in _pages() for path in _outside(page)}
    for path in sorted(linked | {path.relative_to(ROOT) for path in MEASUREMENTS.glob("*.md")}):
        files.append(File.generated(config, path.as_posix(), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Let links lead to where the site has what they name; add the rows of names that went to their page."""
    if page.file.src_uri == "old-names.md":
        rows = [f"| `{name}` | {way} |" for name, way in run_path(str(GONE))["GONE"].items()]
        markdown = "\n".join([markdown, "| it was | in its place |", "|---|---|", *rows])
    if page.file.src_uri == "api.md":
        markdown = _PLACE.sub(lambda match: match[0] if match[1] in _places() else "", markdown)
    here = posixpath.dirname(page.file.src_uri)
    source = ROOT if page.file.src_uri == "index.md" else MEASUREMENTS if here == MEASUREMENTS.name else DOCS / here
    gone = {DOCS / name for name in _gone_pages()}
    markdown = _LINKED.sub(lambda match: match[1] if (source / match[2]).resolve() in gone else match[0], markdown)
    return _LINK.sub(lambda match: f"({posixpath.relpath(_place(source / match[1]), here)}{match[2] or ''})", markdown)


def on_page_content(content: str, **_: Any) -> str:
    """Let the copy button of a console take its commands alone, without prompts."""
    return _CONSOLE.sub(_with_commands, content)


@cache
def _gone_pages() -> set[str]:
    """The pages that extensions had for themselves, which went with their folders."""
    rows = re.findall(r"^\| `(\w+)` \| \[[^]]*\]\(([\w-]+\.md)\)", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    return {page for name, page in rows if not (GONE.parent / "extensions" / name / "__init__.py").exists()}


def _without_gone(nav: Any) -> Any:
    if isinstance(nav, list):
        return [kept for each in nav if (kept := _without_gone(each))]
    if isinstance(nav, dict):
        return {title: kept for title, below in nav.items() if (kept := _without_gone(below))}
    return None if nav in _gone_pages() else nav


@cache
def _places() -> set[str]:
    """What is there of the page of the API."""
    return set(run_path(str(DOCS / "docstrings.py"))["PLACES"].values())


def _with_commands(console: re.Match[str]) -> str:
    commands, goes_on = [], False
    for line in html.unescape(re.sub(r"<[^>]*>", "", console[1])).splitlines():
        if goes_on or re.match(r"\w*\$ ", line):
            commands.append(line if goes_on else line.partition("$ ")[2])
            goes_on = line.endswith("\\")
    text = html.escape("\n".join(commands)).replace("\n", "&#10;")
    return f'<div class="language-console highlight" data-copy="{text}">{console[1]}</div>'


def _as_page(notebook: Path) -> str:
    """A notebook with what it has shown, as a page; the notebook itself lies beside the page."""
    title, *cells = json.loads(notebook.read_text())["cells"]
    download = f'<p><a href="{notebook.name}" download>The notebook of this page</a></p>'
    return "\n\n".join(["".join(title["source"]), download, *map(_cell, cells)])


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        return f'<p><img alt="The picture of this cell" src="data:image/png;base64,{picture}"></p>'
    return f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"


def _place(path: Path) -> str:
    """Where the site has a file of the repository."""
    path = path.resolve()
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return (path.with_suffix(".md") if path.suffix == ".ipynb" else path).relative_to(DOCS).as_posix()
    return path.relative_to(ROOT).as_posix()


def _pages() -> list[Path]:
    return [ROOT / "README.md", *DOCS.rglob("*.md"), *MEASUREMENTS.glob("*.md")]


def _outside(page: Path) -> set[Path]:
    """The files that a page links to and that are no pages themselves."""
    linked = {(page.parent / match[1]).resolve() for match in _LINK.finditer(page.read_text())}
    linked = {path for path in linked if path.suffix != ".md" and not path.is_relative_to(DOCS)}
    return {path.relative_to(ROOT) for path in linked if path.is_file()}
