"""How the loops of sampling are compiled."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from numba import njit
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.misc.appdirs import AppDirs

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
Function = TypeVar("Function", bound=Callable[..., Any])


def digest_of(folder: Path) -> str:
    """A hash of all sources in a folder, 16 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


_SOURCES = digest_of(Path(__file__).parent)


class Notice(event.Listener):
    """Say that kernels are compiled, once in a process, and on one rank of a host: nothing else is seen meanwhile."""

    def __init__(self) -> None:
        self.is_given = False

    def on_start(self, event: event.Event) -> None:
        is_kernel = event.data["dispatcher"].py_func.__qualname__.endswith(_SOURCES)  # others take a moment
        if is_kernel and not self.is_given and os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning(
                "Compiling the loops that make batches, once for this version on this machine: the first batch takes "
                "4 to 30 s."
            )
            self.is_given = True

    def on_end(self, event: event.Event) -> None:
        """How long it took is not said: the first batch is there."""


event.register("numba:compile", Notice())  # type: ignore[no-untyped-call]


_PLACES: list[Any] = CompileResultCacheImpl._locator_classes  # the first: where NUMBA_CACHE_DIR says
(_OfUser,) = (place for place in _PLACES if place.__name__.strip("_") == "UserWideCacheLocator")


class InUsersFolder(_OfUser):  # type: ignore[misc, valid-type]
    """Where a kernel is kept: by what its file holds, so that all environments of the user with this file share it.

    numba adds its own version, Python's, and the kind of processor, and compiles anew where one of them differs.
    """

    def __init__(self, py_func: Any, py_file: str) -> None:
        super().__init__(py_func, py_file)
        of_user: Any = AppDirs
        folder = Path(of_user(appname="lightning_gnn_dist", appauthor=False).user_cache_dir) / "kernels"
        self._cache_path = str(folder / f"{py_func.__module__}-{_digest_of_file(py_file)}")

    def get_source_stamp(self) -> str:
        return _digest_of_file(self._py_file)  # numba 0.61 takes the time of the file, which differs


class _KeptByContent(CompileResultCacheImpl):
    """Keeps a kernel where ``NUMBA_CACHE_DIR`` says, else in the user's folder, else where numba does by itself."""

    _locator_classes = [_PLACES[0], InUsersFolder, *_PLACES[1:]]  # noqa: RUF012


class KernelCache(FunctionCache):
    """What numba keeps of a kernel on disk.

    Of the ranks of a host one compiles a kernel, and the others wait for it: compiling takes whole cores.
    """

    _impl_class = _KeptByContent
    _lock: IO[bytes] | None = None  # while this process compiles the kernel

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is None and self._lock is None:
            self._lock = locked(self._path_of_lock())
            found = super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
        if found is not None:
            self._unlock()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(FileNotFoundError):  # another process has removed the folder: the kernel runs all the same
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        self._unlock()

    def _path_of_lock(self) -> Path:
        return Path(f"{self._cache_file._index_path}.lock")

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def locked(path: Path, seconds: float = 60.0) -> IO[bytes] | None:
    """Return a file that this process alone has locked, until it is closed or the process ends.

    None after so many seconds, or where files cannot be locked: every process goes its own way then.
    """
    if fcntl is None:
        return None
    end = time.monotonic() + seconds
    with suppress(OSError):  # a folder that nobody may write to, a file system without locks
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return file
            except BlockingIOError:
                if time.monotonic() > end:
                    file.close()
                    return None
                time.sleep(0.05)
    return None


@cache
def _digest_of_file(path: str) -> str:
    return hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()


def compiled(function: Function) -> Function:
    """Compile a kernel: it runs without the interpreter's lock, and is kept on disk until a source here changes.

    numba itself watches the kernel's own file alone, but a kernel contains its parts, also those of other files.
    Where no folder can be written to, every process compiles it.
    """
    function.__qualname__ += f"_{_SOURCES}"  # numba keeps it on disk under this name
    kernel: Any = njit(nogil=True)(function)
    try:
        kernel._cache = KernelCache(function)  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # "no locator available"
        log.warning("Kernels are compiled by every process, as they cannot be kept on disk: %s", error)
    return cast(Function, kernel)


def part(function: Function) -> Function:
    """Compile a part of a kernel. Python never calls it: what would let it do so takes a third of the time."""
    without: Any = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return cast(Function, njit(nogil=True, **without)(function))


def inlined(function: Function) -> Function:
    """Compile a small function into each kernel that calls it."""
    return cast(Function, njit(inline="always")(function))
