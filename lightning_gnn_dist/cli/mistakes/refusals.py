"""Which errors are refusals of this package, told in one line; all others keep their traceback."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_gnn_dist.checks import check_file
from lightning_gnn_dist.cli.mistakes.misspelt import PACKAGE

REFUSALS = (ValueError, TypeError, OSError)
KNOWN = ("best", "last", "hpc", "registry")  # checkpoints that Lightning finds by a word


def own_refusal(error: BaseException | None, of_user: str | None) -> str | None:
    """What this package said, if it raised the error or what led to it.

    Args:
        error: The error.
        of_user: The module of the user's model, once that is there: what it was refused keeps its traceback, which
            names the user's line.
    """
    while error is not None:
        if isinstance(error, REFUSALS) and _is_ours(error, of_user):
            return str(error)
        error = error.__cause__ or error.__context__
    return None


def _is_ours(error: BaseException, of_user: str | None) -> bool:
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not modules or not modules[-1].startswith(f"{PACKAGE}."):
        return False
    return of_user not in modules or of_user.startswith(f"{PACKAGE}.")  # type: ignore[union-attr]  # it is a module


@contextmanager
def reading_checkpoint(path: str | None) -> Iterator[None]:
    """Refuse a file that is no checkpoint, of which torch raises whatever comes, or one that would run code."""
    _check_is_there(path)
    try:
        yield
    except Exception as error:
        found = re.search(r"Unsupported global: GLOBAL (\S+)", str(error))
        told = f"it holds {found[1]}" if found else f"{type(error).__name__}: {' '.join(str(error).split()):.200}"
        raise ValueError(
            f"ckpt_path must be a checkpoint of tensors and plain values, and {path!r} is none ({told})."
        ) from error


def _check_is_there(path: str | None) -> None:
    """Refuse a checkpoint that is not there. Some are named by words, or by the address of another host."""
    if path is not None and path.partition(":")[0] not in KNOWN and "://" not in path and not Path(path).exists():
        check_file("ckpt_path", path)
