"""What ranks ask each other about shards, and what they answer: several questions to each owner in one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from lightning_gnn_dist.batches.pool import Pool, gather_rows
from lightning_gnn_dist.wire.asking import Asking

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


SEVERAL = 100  # the kind of several questions at once


class Question(NamedTuple):
    """A question to all ranks.

    Attributes:
        kind: What it asks for.
        of_ranks: What each rank is asked. Nobody is asked about nothing, which is where the first tensor is empty.
    """

    kind: int
    of_ranks: list[Message]


def ask_owners(asking: Asking, owner: Answers, questions: Sequence[Question]) -> list[list[Message]]:
    """Return for each question the answer of each rank: the own one too, which ``owner`` gives, as those to nothing."""
    if not questions:
        return []
    ranks, is_alone = range(asking.size), len(questions) == 1
    sent = [[(kind, of[rank]) for kind, of in questions if len(of[rank][0])] for rank in ranks]
    own, kind = sent[asking.rank], questions[0].kind if is_alone else SEVERAL
    joint = [None if not of_rank else of_rank[0][1] if is_alone else _joint(of_rank) for of_rank in sent]
    came, mine = asking.ask(kind, joint, lambda: [owner.answer(*question) for question in own])
    said = [iter([] if answer is None else [answer] if is_alone else _unpacked(answer)) for answer in came]
    said[asking.rank] = iter(mine)
    return [
        [next(said[rank]) if len(of[rank][0]) else owner.answer(kind, of[rank]) for rank in ranks]
        for kind, of in questions
    ]


def answer_of(owner: Answers, kind: int, question: Message) -> Message:
    """Return what an owner answers to a question, or to several in one."""
    if kind != SEVERAL:
        return owner.answer(kind, question)
    kinds, *questions = question
    return _packed([owner.answer(*asked) for asked in zip(kinds.tolist(), _unpacked(questions), strict=True)])


def _joint(questions: list[tuple[int, Message]]) -> Message:
    kinds, messages = zip(*questions, strict=True)
    return [torch.tensor(kinds, dtype=torch.uint8), *_packed(messages)]


def _packed(messages: Sequence[Message]) -> Message:
    """Messages as one, whose first tensor says how many tensors each of them has."""
    return [torch.tensor(list(map(len, messages)), dtype=torch.uint8), *chain(*messages)]


def _unpacked(message: Message) -> list[Message]:
    counts, *tensors = message
    rest = iter(tensors)
    return [list(islice(rest, count)) for count in counts.tolist()]
