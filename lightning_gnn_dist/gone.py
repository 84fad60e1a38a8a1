"""What the release before had and this one has not, and what to use in its place.

A row is a public name (``AutoStrategy``), an argument of a class or function (``NeighborSampler.shared``), a value of
one (``Correction.way='anchor'``), a method (``Graph.extended``), a command (``lightning-gnn-dist report``) or an option
of one (``inspect --plan``). The rows of a release are deleted with the next.
"""

from __future__ import annotations

GONE: dict[str, str] = {
    # what went: a sentence without a full stop, which says the way out
    "AutoStrategy": "GrappaStrategy() first, and rounds where a step's bytes take longer than it (docs/choosing.md)",
    "Trainer.strategy='choose'": "name one, 'grappa' first (docs/choosing.md has a table)",
    "lightning-gnn-dist choose": "fit, with the strategy that the table of docs/choosing.md names",
    "Exchange.bits": "take Exchange(), or send less with share, every or overlap",
    "Exchange.sums": "take Exchange(), which computes the same step",
}


def way_out(what: str) -> str | None:
    """Return the sentence that answers something that went, or None if it is no row of the table."""
    return f"{what} went: {GONE[what]}." if what in GONE else None
