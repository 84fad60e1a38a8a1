"""What is wrong with one shard is said on all ranks: the others would see no more than a lost connection."""

from __future__ import annotations

from collections.abc import Callable

import torch

from lightning_gnn_dist.wire.collectives import all_gather_rows

_MOST_BYTES = 2048  # of what is said


def check_on_all_ranks(check: Callable[[], None], shard: int) -> None:
    """Check the own shard. All ranks raise or none: whose shard is right says why another is refused. Collective.

    Args:
        check: Raises a ValueError if the shard is refused.
        shard: The number of the own shard.
    """
    refusal: ValueError | None = None
    try:
        check()
    except ValueError as error:
        refusal = error
    said = b"" if refusal is None else f"Shard {shard}: {refusal}".encode()[:_MOST_BYTES]
    row = torch.zeros(_MOST_BYTES, dtype=torch.uint8)
    row[: len(said)] = torch.tensor(list(said), dtype=torch.uint8)
    texts = [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in all_gather_rows(row)]
    if refusal is not None:
        raise refusal
    if others := [text for text in texts if text]:
        raise ValueError(others[0])
