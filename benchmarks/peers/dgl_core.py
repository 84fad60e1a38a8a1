"""DGL without GraphBolt, where its wheel has no GraphBolt for the torch that is installed.

DGL 2.1 brings compiled GraphBolt for torch 2.0.0 to 2.2.1 alone, and refuses to be imported beside another torch. Its
own graphs, samplers, layers, METIS and servers need none of that, so an empty module takes GraphBolt's place.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


class _Nothing(ModuleType):
    """Has an empty class for every name, which DGL only compares the classes of objects with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def dgl_and_graphbolt() -> tuple[Any, Any]:
    """DGL, and its GraphBolt; None for each that is not there."""
    found = importlib.util.find_spec("dgl")
    if found is None or found.origin is None:
        return None, None
    libraries = Path(found.origin).parent / "graphbolt"
    version = torch.__version__.split("+")[0]
    has_graphbolt = any(libraries.glob(f"*graphbolt_pytorch_{version}.*"))
    if not has_graphbolt:
        sys.modules.setdefault("dgl.graphbolt", _Nothing("dgl.graphbolt"))
    import dgl

    return dgl, importlib.import_module("dgl.graphbolt") if has_graphbolt else None
