"""Tests of what a user may add, a folder each, which is deleted with what it tests."""

from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
ALL = (
    *("asking", "databases", "elastic", "exchange", "history", "inductive", "larger_than_memory"),
    *("links", "notebooks", "passes", "ready_made", "rounded", "serving", "shards", "subgraphs", "tables"),
    "temporal",
)
FOLDERS = HERE.parents[1] / "lightning_gnn_dist" / "extensions"
MISSING = [name for name in ALL if not (FOLDERS / name / "__init__.py").exists()]


def brought(name: str) -> list[ModuleType]:
    """The modules of this name in the folders here: what extensions add to a table of the core's tests."""
    found = []
    for path in sorted(HERE.glob(f"*/{name}.py")):
        try:
            found.append(import_module(f"{__name__}.{path.parent.name}.{name}"))
        except ImportError:
            if not MISSING:  # else it needs another extension
                raise
    return found
