"""What was checked once is not checked again: a mark beside the files says which ones were found right.

Files are told by size, times and number (inode). The time of the last change of any kind cannot be set by whoever
changes a file, and a copy has other numbers: so a mark that came with somebody's files counts for nothing here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning_gnn_dist.graph.storage.drafts import write_whole
from lightning_gnn_dist.graph.storage.files import read_json

log = logging.getLogger(__name__)

NAME = ".checked"
VERSION = 1  # to be raised when more is checked
YOUNG_SECONDS = 2.0  # within a tick of its clock, a file system does not tell two changes apart


def signature(folder: Path, names: Iterable[str], **about: Any) -> dict[str, Any]:
    """What a mark says: which files were checked, and for what."""
    files = {}
    for name in sorted(names):
        found = (folder / name).stat()
        files[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return {"version": VERSION, "files": files, **about}


def is_marked(folder: Path, sign: dict[str, Any]) -> bool:
    """Whether these very files were checked before."""
    return any(_read(file) == sign for file in _files(folder))


def mark(folder: Path, sign: dict[str, Any]) -> None:
    """Say that they were, unless one of them was changed just now. Several processes may do so at once."""
    newest = max(times[2] for times in sign["files"].values())
    if time.time_ns() - newest < YOUNG_SECONDS * 1e9:
        return
    for file in _files(folder):
        if _write(file, sign):
            return
    log.info("%s cannot be marked as checked, so all its edges are read whenever it is opened", folder)


def _files(folder: Path) -> list[Path]:
    """Beside the files, or in the user's cache where these lie in a folder that nobody writes to."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    return [folder / NAME, Path(home) / "lightning_gnn_dist" / "checked" / name]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_json(file, "")
    except (OSError, ValueError):  # none, or a damaged one, which is as good as none
        return None


def _write(file: Path, sign: dict[str, Any]) -> bool:
    """Whether it could be written."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(sign))
    except OSError:
        return False
    return True
