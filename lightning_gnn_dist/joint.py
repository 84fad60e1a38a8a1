"""What folders ask of each other without importing each other, as Protocols that mypy checks on both sides."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, runtime_checkable


@runtime_checkable
class HoldsShards(Protocol):
    """The data module of a graph that no host holds."""

    @property
    def shards_path(self) -> Path:
        """The folder of this host's shards."""
        ...
