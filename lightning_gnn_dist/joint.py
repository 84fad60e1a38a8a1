"""Protocols between folders that do not import each other: what strategies and callbacks read of a data module.

Each Protocol is what one reader needs, so that your own data module may have some and lack others; mypy checks both
sides. A value is read where there is one: of a data module ``figures`` to log; ``fingerprint`` and ``digests``,
hashes of the graph, its arrays and its parts that all ranks have alike; ``uncovered``, the counts of seeds of weight 0
and of all. Of a training loader ``num_seeds``, which the rank learns from, and ``num_ranks``, which it was made for. A
batch has three attributes beside PyG's: ``coverage``, a weight for each node; ``is_filler``, true where the batch only
keeps ranks in step; and ``weighed_by_coverage``, true once its loss has used the weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

Scope: TypeAlias = Literal["part", "graph"]


@runtime_checkable
class ChecksEarly(Protocol):
    """A data module that refuses before ranks start what they would refuse."""

    def check_before_ranks(self, trainer: Any, module: Any) -> None:
        """Refuse what lacks, or is wrong, for a call of the trainer with a module. Not collective."""


class GivesBatches(Protocol):
    """A data module with batches that a strategy chooses."""

    def correction_batches(
        self, round_idx: int, *, sliced: bool = True, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        """Yield batches ``start`` to ``stop`` of a round: this rank's slice of each, or with ``sliced=False`` all."""

    def anchor_batches(self, round_idx: int, *, of: Scope = "part", start: int | None = None) -> Iterator[Any]:
        """Yield one pass over the rank's part or the graph, for the round that begins after ``start`` batches."""


@runtime_checkable
class BringsHooks(Protocol):
    """A data module whose ranks may do something together at meetings."""

    def meeting_hooks(self) -> Sequence[Any]:
        """Return the hooks that do it, for one fit; they come behind means, and before what reads a part."""


@runtime_checkable
class JudgesParts(Protocol):
    """A data module that knows its graph, and whether models that learn from its parts can be averaged."""

    def against_averaging(self) -> str | None:
        """Return why averaging alone loses accuracy on these parts, and what to do; None where it loses little."""

    def counts_of_nodes(self) -> Collection[int]:
        """Return how many nodes the graph has, and how many there are of each type."""


@runtime_checkable
class TrainsReplicasApart(Protocol):
    """A strategy of rounds, between whose meetings every rank has other weights.

    Attributes:
        clock: What says when a round is over.
    """

    clock: Any


@runtime_checkable
class WeighsRanks(Protocol):
    """A strategy that weighs the loss of a rank by its seeds. DDP does not.

    Attributes:
        weights: What a rank counts for.
    """

    weights: Any


@runtime_checkable
class RowsOfRanks(Protocol):
    """A module whose rows may live with one rank each."""

    def settled_version(self) -> int | None:
        """Make the rows, and return how often they have changed, alike on all ranks; None where all lie here."""
