"""Explains SIGBUS, by which the system ends a process when a file that it has mapped was cut short.

The signal comes in the middle of whatever read the page. Nothing can be repaired there, and Python's own handlers
never get to run. So a compiled handler writes a sentence and restores the handler before it: the process ends as it
would have, and a traceback of ``faulthandler`` still follows.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import threading
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm

from lightning_gnn_dist.graph.storage.mapped import libc

log = logging.getLogger(__name__)

ROOM = 4096  # bytes for the sentence, as in the code
_CODE = """
declare i64 @write(i32, ptr, i64)
declare ptr @signal(i32, ptr)
@text = global [4096 x i8] zeroinitializer
@length = global i64 0
@before = global ptr null
define void @tell(i32 %number) {
  %length = load i64, ptr @length
  %written = call i64 @write(i32 2, ptr @text, i64 %length)
  %before = load ptr, ptr @before
  %own = call ptr @signal(i32 %number, ptr %before)
  ret void
}
"""
_LOCK = threading.Lock()
_PATHS: dict[str, None] = {}


def explain_bus_errors(path: Path) -> None:
    """Handle SIGBUS from now on, and name ``path`` among the folders whose files are mapped."""
    with _LOCK:
        _PATHS[str(path)] = None
        try:
            engine = _handler()
        except (MemoryError, RuntimeError) as error:  # no memory, or none that may be executed
            log.info("A SIGBUS will not be explained (%s)", error)
            return
        text = _sentence().encode()[: ROOM - 1] + b"\n"
        ctypes.memmove(engine.get_global_value_address("text"), text, len(text))
        ctypes.c_int64.from_address(engine.get_global_value_address("length")).value = len(text)


def _sentence() -> str:
    return (
        "lightning_gnn_dist: this process ends, for a file was cut short while it was mapped, or cannot be read "
        "(SIGBUS). Saved graphs are read-only: save to another path, or with overwrite=True, which leaves open files "
        "alone. If no file was changed, look for a failing disk or a full /dev/shm. Mapped here: " + ", ".join(_PATHS)
    )


@cache
def _handler() -> llvm.ExecutionEngine:
    """Compile and register the handler, once per process; takes about 5 ms."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(_CODE), target)
    engine.finalize_object()
    before = libc().signal(signal.SIGBUS, engine.get_function_address("tell"))
    ctypes.c_void_p.from_address(engine.get_global_value_address("before")).value = before
    return engine
