"""Drafts: a file or folder is written under another name beside its own, and renamed when it is complete."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def unused_name(path: Path) -> Path:
    """A random, hidden name beside ``path``, which no other process uses or can guess."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A new folder beside ``path``, for the block to fill and rename. If it was not renamed, it is deleted after."""
    draft = unused_name(path)
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_whole(path: Path, text: str) -> None:
    """Write a small file, or replace it: a reader sees the old text or the new one, also after a power failure."""
    draft = unused_name(path)
    try:
        with draft.open("x") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
