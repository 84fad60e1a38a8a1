"""Opens files that somebody else may have written, without waiting, and writes files that appear when complete."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import stat
import types
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Union, get_args, get_origin

MOST_BYTES_OF_JSON = 1 << 28  # many times the size of any that this package writes
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. Anything else, such as a pipe, is refused: opening one could wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError(f"{path} is a directory, a pipe or a device, and a file is needed.")
    return os.fdopen(descriptor, "rb")


def read_json(path: Path, way_out: str) -> dict[str, Any]:
    """Read a JSON object from a file; ``way_out`` is the last sentence of the error if the file holds none."""
    try:
        with open_file(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size > MOST_BYTES_OF_JSON:
                raise ValueError(f"it has {size:,} bytes")
            content = json.loads(stream.read(size))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({str(error) or type(error).__name__:.200}). {way_out}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged (it holds a {type(content).__name__}, not an object). {way_out}")
    return content


def is_a(kind: Any, value: Any) -> bool:
    """Whether a value from JSON is of a type such as ``list[int | None]``. True and False do not count as numbers."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(is_a(option, value) for option in inner)
    if origin is list:
        return isinstance(value, list) and all(is_a(inner[0], entry) for entry in value)
    if origin is dict:
        return isinstance(value, dict) and all(is_a(inner[1], entry) for entry in value.values())
    if kind in (int, float):
        return isinstance(value, int if kind is int else (int, float)) and not isinstance(value, bool)
    return value is None if kind in (None, type(None)) else isinstance(value, kind)


def check_entries(content: Any, kinds: dict[str, Any], path: Path, way_out: str) -> None:
    """Refuse a JSON object that lacks a name of ``kinds``, or has a value of another type under it."""
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged ({_shown(content)} stands where an object should). {way_out}")
    for name, kind in kinds.items():
        if name not in content:
            raise ValueError(f"{path} is damaged (the entry {name!r} is missing). {way_out}")
        if not is_a(kind, content[name]):
            raise ValueError(f"{path} is damaged (the entry {name!r} is {_shown(content[name])}). {way_out}")


def flush(path: Path) -> None:
    """Wait until a file, or the list of files in a directory, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_read_only(folder: Path) -> None:
    """Make all files in a folder read-only. Folders stay writable, so that files can be added."""
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(stat.S_IMODE(file.stat().st_mode) & ~0o222)


def _shown(value: Any) -> str:
    return f"{json.dumps(value, default=str):.60}"


def unused_name(path: Path) -> Path:
    """A random, hidden name beside ``path``, which no other process uses or can guess."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}")


def exchange(one: Path, other: Path) -> bool:
    """Let two folders change their names at once. Returns False if the system cannot do so."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0


@contextmanager
def folder_beside(path: Path) -> Iterator[Path]:
    """A new folder beside ``path``, for the block to fill and rename. If it was not renamed, it is deleted after."""
    draft = unused_name(path)
    draft.mkdir(parents=True)
    try:
        yield draft
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def remove_whole(folder: Path) -> None:
    """Delete a folder, if it is there, under another name: after a kill none is left that seems whole."""
    gone = folder.with_name(f"{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    if folder.exists():
        os.rename(folder, gone)
        shutil.rmtree(gone)


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
