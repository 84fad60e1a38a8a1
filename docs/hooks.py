"""What the site adds to the pages: README.md as its first page, notebooks, and files of the repository that pages name.

A link that is a paragraph of its own and leads to measurements is replaced by that file: figures have one home, and the
pages can be read in the repository as well.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
MEASUREMENTS = "choosing.md"  # the page that shows them
_LINK = re.compile(r"(?<=\])\((?!https?://|#)([^)#\s]+)(#[^)\s]*)?\)")
_CONSOLE = re.compile(r'<div class="language-console highlight">(<pre>.*?</pre>)</div>', re.DOTALL)
_INCLUDED = re.compile(r"^\[[^\]]+\]\((\.\./benchmarks/\w+\.md)\)$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the first page, a page for each notebook, and every file outside of docs that a page links to."""
    files.append(File.generated(config, "index.md", content=(ROOT / "README.md").read_text()))
    for notebook in sorted(DOCS.glob("*.ipynb")):
        files.append(File.generated(config, f"{notebook.stem}.md", content=_as_page(notebook)))
    for path in sorted({path for page in _pages() for path in _outside(page)}):
        files.append(File.generated(config, str(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put measurements in the place of the links to them, and let all others lead to where the site has it."""
    folder = ROOT if page.file.src_uri == "index.md" else DOCS
    pieces = enumerate(_INCLUDED.split(markdown))
    return "".join(_measurements(DOCS / piece) if at % 2 else _led(piece, folder) for at, piece in pieces)


def on_page_content(content: str, **_: Any) -> str:
    """Let the copy button of a console take its commands alone, without prompts."""
    return _CONSOLE.sub(_with_commands, content)


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
    if "image/svg+xml" in data:
        return f"<div>{''.join(data['image/svg+xml'])}</div>"
    return f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```"


def _measurements(path: Path) -> str:
    """A file, one level further down."""
    text = re.sub(r"^(#+ )", r"#\1", path.read_text(), flags=re.MULTILINE)
    return _led(text, path.parent)


def _led(text: str, folder: Path) -> str:
    """The text of a file that lies in ``folder``, with links to where the site has what they lead to."""
    return _LINK.sub(lambda match: f"({_place(folder / match[1], match[2] or '')})", text)


def _place(path: Path, anchor: str) -> str:
    """Where the site has a file of the repository, from the folder of its pages."""
    path = path.resolve()
    if path.is_relative_to(DOCS):
        page = path.with_suffix(".md") if path.suffix == ".ipynb" else path
        return f"{page.relative_to(DOCS)}{anchor}"
    if path == ROOT / "README.md":
        return f"index.md{anchor}"
    if path.parent == ROOT / "benchmarks" and path.suffix == ".md":
        return f"{MEASUREMENTS}{anchor or '#' + _slug(path)}"
    return f"{path.relative_to(ROOT)}{anchor}"


def _slug(path: Path) -> str:
    title = path.read_text().splitlines()[0].lstrip("# ")
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def _pages() -> list[Path]:
    return [ROOT / "README.md", *DOCS.glob("*.md")]


def _outside(page: Path) -> set[Path]:
    """The files that a page links to and that are no pages themselves."""
    linked = {(page.parent / match[1]).resolve() for match in _LINK.finditer(page.read_text())}
    linked = {path for path in linked if path.suffix != ".md" and not path.is_relative_to(DOCS)}
    return {path.relative_to(ROOT) for path in linked if path.is_file()}
