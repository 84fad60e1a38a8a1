"""What folders ask of each other without importing each other, as Protocols that mypy checks on both sides.

Data modules offer what strategies and callbacks read. Each Protocol is what one reader needs, so that a data module of
somebody else's may have some and lack others. A batch has, beside PyG's names: ``coverage``, a weight for each node;
``is_filler``, where it only keeps ranks in step; and ``weighed_by_coverage``, once its loss has used the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

Scope: TypeAlias = Literal["part", "graph"]


@runtime_checkable
class HoldsShards(Protocol):
    """The data module of a graph that no host holds."""

    @property
    def shards_path(self) -> Path:
        """The folder of this host's shards."""


class GivesCorrections(Protocol):
    """A data module with batches of the whole graph."""

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        """Batches ``start`` to ``stop`` of a round: this rank's slices of them, or all of each."""


class GivesAnchors(Protocol):
    """A data module with a pass over the rank's part, or over the graph, whose gradient anchors a round."""

    def anchor_batches(self, round_idx: int, *, of: Scope = "part", start: int | None = None) -> Iterator[Any]:
        """The pass of a round that begins after ``start`` training batches."""


@runtime_checkable
class HasFigures(Protocol):
    """A data module that measures itself."""

    @property
    def figures(self) -> dict[str, float]:
        """What to log, by name."""


class HasFingerprint(Protocol):
    """A data module whose graph all ranks must have alike."""

    @property
    def fingerprint(self) -> str:
        """Hexadecimal digits of the graph."""


class HasDigests(HasFingerprint, Protocol):
    """One whose arrays and parts they must have alike, too."""

    @property
    def digests(self) -> dict[str, Any]:
        """``arrays`` and ``parts``, hexadecimal digits; ``values``, two numbers that may differ in their last bits."""


class HasParts(Protocol):
    """A data module that cuts a graph."""

    @property
    def partitioner(self) -> object:
        """How it does."""

    @property
    def uncovered(self) -> tuple[int, int]:
        """Seeds of the running part that have weight 0, and all of them, where each node has a weight."""


class CountsSeeds(Protocol):
    """A training loader of this package."""

    @property
    def num_seeds(self) -> int:
        """What the rank learns from."""

    @property
    def num_ranks(self) -> int:
        """For how many ranks it was made."""


class ForStrategies(GivesCorrections, GivesAnchors, HasFigures, HasFingerprint, Protocol):
    """What every data module of this package offers."""
