"""What ranks ask each other about shards, and what they answer: tensors, in as few bytes as they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool, gather_rows

Message: TypeAlias = list[Tensor]

# Kinds of questions.
DRAW, ROWS, NODES, EDGES, LINKED, DEGREES, TIMES_OF_NODES, TIMES_OF_EDGES = range(8)
_WIDTHS = (torch.uint8, torch.int16, torch.int32)


class Answers(Protocol):
    """Answers questions about a shard, in any thread."""

    def answer(self, kind: int, question: Message) -> Message: ...


def narrow(numbers: Tensor, most: int) -> Tensor:
    """Numbers from 0 to ``most`` in as few bytes as ``most`` needs."""
    dtype = next((dtype for dtype in _WIDTHS if most <= torch.iinfo(dtype).max), torch.int64)
    return numbers.to(dtype)


def gathered(arrays: Mapping[str, Tensor], places: Tensor, pool: Pool) -> Message:
    """The rows of all arrays at some places, in the order of the arrays' names."""
    local = places.to(torch.int64)
    return [gather_rows(arrays[name], local, pool) for name in sorted(arrays)]


def letters_of(name: str | None) -> Tensor:
    """A name as it travels; None travels as no letters."""
    return torch.tensor(list((name or "").encode()), dtype=torch.uint8)


def name_of(letters: Tensor) -> str:
    return letters.numpy().tobytes().decode()
