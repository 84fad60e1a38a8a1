"""What users set for a process, beside its environment, and ranks that are fresh processes take on."""

from __future__ import annotations

import linecache
import logging
import warnings

import torch
from lightning.pytorch.strategies.launchers.multiprocessing import _GlobalStateSnapshot


class Settings:
    """Those of this process: random states, defaults of torch, filters of warnings, levels of loggers, cells."""

    def __init__(self) -> None:
        self._snapshot = _GlobalStateSnapshot.capture()
        self._dtype, self._precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        self._filters = list(warnings.filters)
        loggers = [each for each in logging.root.manager.loggerDict.values() if isinstance(each, logging.Logger)]
        self._levels = {each.name: each.level for each in loggers if each.level}
        self._cells = {name: entry for name, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None}

    def take_on(self) -> None:
        """Make them those of the process that calls this."""
        self._snapshot.restore()
        torch.set_default_dtype(self._dtype)
        torch.set_float32_matmul_precision(self._precision)
        warnings.resetwarnings()
        warnings.filters.extend(self._filters)  # type: ignore[attr-defined]
        for name, level in self._levels.items():
            logging.getLogger(name).setLevel(level)
        linecache.cache.update(self._cells)  # a traceback then shows the lines of a notebook
