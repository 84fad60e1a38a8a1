"""The tutorials of docs, cell by cell: what they show, and what a kernel shows when it runs them.

``python -m tests.tutorials docs/own-data.ipynb`` runs one and stores what it shows.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.test_notebook import Session, good

_CODE = re.compile(r"\x1b\[[\d;]*m")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?(?!\w)")


def cells(path: Path) -> list[dict[str, Any]]:
    """The cells with code."""
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def shown(outputs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a page shows of a cell: all but standard error, where libraries warn, and codes of terminals."""
    kept = [output for output in outputs if output.get("name") != "stderr"]
    return [one | {"text": _CODE.sub("", one["text"])} if "text" in one else one for one in kept]


def kinds(outputs: list[dict[str, Any]]) -> list[tuple[str, list[str]]]:
    return [(output["output_type"], sorted(output.get("data", {}))) for output in outputs]


def numbers(outputs: list[dict[str, Any]]) -> list[float]:
    """The numbers in the texts of a cell."""
    texts = ["".join(output.get("data", {}).get("text/plain", output.get("text", ""))) for output in outputs]
    return [float(number) for text in texts for number in _NUMBER.findall(text)]


def run(session: Session, cell: dict[str, Any]) -> list[dict[str, Any]]:
    said = session.run("".join(cell["source"]))
    good(said)
    return shown(said.outputs)


def store(path: Path) -> None:
    """Run a tutorial and write what it shows into its file."""
    content = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        session = Session(Path(folder))
        try:
            for number, cell in enumerate(cell for cell in content["cells"] if cell["cell_type"] == "code"):
                cell |= {"outputs": [_in_lines(output) for output in run(session, cell)], "execution_count": number + 1}
        finally:
            session.close()
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def _in_lines(output: dict[str, Any]) -> dict[str, Any]:
    """An output as files of notebooks have it."""
    if "text" in output:
        return output | {"text": output["text"].splitlines(keepends=True)}
    return output | {"data": {kind: text.splitlines(keepends=True) for kind, text in output["data"].items()}}


if __name__ == "__main__":
    for name in sys.argv[1:]:
        store(Path(name))
