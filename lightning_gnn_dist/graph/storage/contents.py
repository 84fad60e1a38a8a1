"""Checks what the files of a saved graph hold, reading each forwards once in pieces that stay in a cache.

Compiled loops follow every edge, so edges are checked before the first loop runs, together with the checksums of all
arrays of one number per node or edge. Arrays with more, such as features, are left to ``verify``.

A mark, a small file beside the others, says that they were checked, so that they are not checked again. It names each
file's size, times and inode. Nobody can set the time of a file's last change (ctime), and a copy has another inode: so
a mark that was copied along with files has no effect.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from xxhash import xxh64

from lightning_gnn_dist.graph.storage.files import open_file, read_json, write_whole
from lightning_gnn_dist.graph.storage.npy import BYTES_AT_ONCE, Column, NpyFile, checksum_of

log = logging.getLogger(__name__)

MARK = ".checked"
MARK_VERSION = 1  # raise it when more is checked
YOUNG_SECONDS = 2.0  # a file system gives two changes within a tick of its clock the same time
_UNSIGNED: dict[Any, np.dtype[Any]] = {np.dtype(np.int32): np.dtype(np.uint32), np.dtype(np.int64): np.dtype(np.uint64)}


def check_edges(
    folder: Path, names: Sequence[str], checksums: Mapping[str, str | None], num_senders: int | None
) -> None:
    """Refuse edges that lead out of the graph, and short arrays that are not what was saved.

    Args:
        folder: The saved graph.
        names: The arrays with one number per row.
        checksums: The checksum of every array by name; None for one that was saved without.
        num_senders: The senders of edges must lie below this. None stands for the number of rows.
    """
    indptr, indices = (NpyFile.of(folder / f"{name}.npy") for name in ("indptr", "indices"))
    _check_types(indptr, indices)
    _check_indptr(indptr, indices.shape[0], checksums.get("indptr"))
    _check_indices(indices, indptr.shape[0] - 1 if num_senders is None else num_senders, checksums.get("indices"))
    for name in names:
        if name not in ("indptr", "indices") and checksums[name] is not None:
            for _ in _pieces(NpyFile.of(folder / f"{name}.npy"), checksums[name]):
                pass


def verify(folder: Path, checksums: Mapping[str, str | None]) -> None:
    """Read every array, and refuse one that is not what was saved."""
    for name, checksum in checksums.items():
        file = folder / f"{name}.npy"
        if checksum is not None:
            _compare(file, checksum_of(file), checksum)


def _check_types(indptr: NpyFile, indices: NpyFile) -> None:
    for file, types in ((indptr, [np.dtype(np.int64)]), (indices, list(_UNSIGNED))):
        if len(file.shape) != 1 or file.dtype not in types:
            names = " or ".join(map(str, types))
            raise ValueError(
                f"{file.path} holds {file.dtype} {file.shape}, and a vector of {names} is needed. Save the graph again."
            )
    if indptr.shape[0] == 0:
        raise ValueError(f"{indptr.path} is empty, and needs one entry more than nodes. Save the graph again.")


def _check_indptr(file: NpyFile, num_edges: int, checksum: str | None) -> None:
    at, last = 0, 0
    for piece in _pieces(file, checksum):
        falls = piece[1:] < piece[:-1]
        if piece[0] < last or falls.any() or (at == 0 and piece[0] != 0):
            row = at - 1 if piece[0] < last else at + int(falls.argmax())
            raise ValueError(
                f"{file.path} is damaged (it must begin at 0 and not fall, and does not near row {max(row, 0)}). Save "
                "the graph again."
            )
        at, last = at + piece.size, int(piece[-1])
    if last != num_edges:
        raise ValueError(
            f"{file.path} is damaged (it ends at {last}, and indices.npy has {num_edges} edges). Save the graph again."
        )


def _check_indices(file: NpyFile, num_senders: int, checksum: str | None) -> None:
    at = 0
    for piece in _pieces(file, checksum):
        if int(piece.view(_UNSIGNED[file.dtype]).max()) >= num_senders:  # read as unsigned, a negative id is large
            edge = int(((piece < 0) | (piece >= num_senders)).argmax())
            raise ValueError(
                f"{file.path} is damaged (edge {at + edge} comes from node {int(piece[edge])}, and ids lie in [0, "
                f"{num_senders})). Save the graph again."
            )
        at += piece.size


def _pieces(file: NpyFile, checksum: str | None) -> Iterator[Column]:
    """Yield the numbers in a file in pieces, then compare its checksum, if one is given."""
    found, missing, buffer = xxh64(), file.num_bytes, np.empty(BYTES_AT_ONCE, np.uint8)
    with open_file(file.path) as stream:
        found.update(stream.read(file.offset))
        while count := stream.readinto(buffer):  # type: ignore[attr-defined]
            missing -= count
            if missing < 0 or count % file.dtype.itemsize:
                break
            if checksum is not None:
                found.update(buffer[:count].data)
            yield buffer[:count].view(file.dtype)
    if missing:
        raise ValueError(f"{file.path} was changed while it was read. Save the graph again, to another path.")
    if checksum is not None:
        _compare(file.path, found.hexdigest(), checksum)


def _compare(file: Path, found: str, wanted: str) -> None:
    if found != wanted:
        raise ValueError(
            f"{file} is not the file that was saved: its checksum is {found}, and meta.json says {wanted}. It was "
            "damaged, or is another graph's: copy the graph again, or save it again."
        )


def signature(folder: Path, names: Iterable[str], **about: Any) -> dict[str, Any]:
    """The content of a mark: which files were checked, and ``about``, what they were checked against."""
    files = {}
    for name in sorted(names):
        found = (folder / name).stat()
        files[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    return {"version": MARK_VERSION, "files": files, **about}


def is_marked(folder: Path, sign: dict[str, Any]) -> bool:
    """Whether a mark with this content is there: these very files were checked before."""
    for file in _files(folder):
        with suppress(OSError, ValueError):  # missing or damaged
            if read_json(file, "") == sign:
                return True
    return False


def mark(folder: Path, sign: dict[str, Any]) -> None:
    """Write a mark, unless a file was changed in the last two seconds. Several processes may do so at once."""
    newest = max(times[2] for times in sign["files"].values())
    if time.time_ns() - newest < YOUNG_SECONDS * 1e9:
        return
    for file in _files(folder):
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(file, json.dumps(sign))
            return
    log.info("%s cannot be marked as checked, so all its edges are read whenever it is opened", folder)


def _files(folder: Path) -> list[Path]:
    """Where a mark may be: beside the files, or in the user's cache if their folder is not writable."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    name = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=16).hexdigest()
    return [folder / MARK, Path(home) / "lightning_gnn_dist" / "checked" / name]
