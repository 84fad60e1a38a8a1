"""What an index shows of README.md, as it has none of the files that README.md links to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"!\[([^\]]*)\]\((?!https?:)([^)]*)\)")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!https?:|#)([^)]*)\)")


def long_description(text: str, repository: str | None, version: str) -> str:
    """The text with links to the files of a version in ``repository``, or with the words of links and pictures."""
    if repository is None:
        return _LINK.sub(r"\1", _PICTURE.sub(r"*\1*", text))
    text = _PICTURE.sub(rf"![\1]({repository}/raw/v{version}/\2)", text)
    return _LINK.sub(rf"[\1]({repository}/blob/v{version}/\2)", text)


class ReadmeHook(MetadataHookInterface):
    """Called for every build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the readme. ``Repository`` under ``[project.urls]`` says where links lead."""
        readme = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = long_description(readme, metadata.get("urls", {}).get("Repository"), metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
