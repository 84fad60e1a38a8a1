"""Marks: a small file beside others says that these were checked, so that they are not checked again.

A mark names each file's size, times and inode. Nobody can set the time of a file's last change (ctime), and a copy has
another inode: so a mark that was copied along with files has no effect.
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
VERSION = 1  # raise it when more is checked
YOUNG_SECONDS = 2.0  # a file system gives two changes within a tick of its clock the same time


def signature(folder: Path, names: Iterable[str], **about: Any) -> dict[str, Any]:
    """The content of a mark: which files were checked, and ``about``, what they were checked against."""
    files = {}
    for name in sorted(names):
        found = (folder / name).stat()
        files[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return {"version": VERSION, "files": files, **about}


def is_marked(folder: Path, sign: dict[str, Any]) -> bool:
    """Whether a mark with this content is there: these very files were checked before."""
    return any(_read(file) == sign for file in _files(folder))


def mark(folder: Path, sign: dict[str, Any]) -> None:
    """Write a mark, unless a file was changed in the last two seconds. Several processes may do so at once."""
    newest = max(times[2] for times in sign["files"].values())
    if time.time_ns() - newest < YOUNG_SECONDS * 1e9:
        return
    for file in _files(folder):
        if _write(file, sign):
            return
    log.info("%s cannot be marked as checked, so all its edges are read whenever it is opened", folder)


def _files(folder: Path) -> list[Path]:
    """Where a mark may be: beside the files, or in the user's cache if their folder is not writable."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    return [folder / NAME, Path(home) / "lightning_gnn_dist" / "checked" / name]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        return read_json(file, "")
    except (OSError, ValueError):  # missing or damaged
        return None


def _write(file: Path, sign: dict[str, Any]) -> bool:
    """Write a mark. Returns whether that was possible."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(sign))
    except OSError:
        return False
    return True
