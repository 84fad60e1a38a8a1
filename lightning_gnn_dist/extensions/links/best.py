"""The best receivers of some senders, as scores of further receivers come.

Receivers with a higher score come first, and of equal scores those with the lower id, in whichever pieces they come. A
score of minus infinity is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

NONE = -1  # the id where a sender has no more receivers


class Best(NamedTuple):
    """The best receivers of some senders.

    Attributes:
        ids: The receivers of each sender, the best first, shape ``(n, k)``; -1 where there are fewer.
        scores: Their scores.
    """

    ids: Tensor
    scores: Tensor

    @classmethod
    def none(cls, num_senders: int, k: int, like: Tensor) -> Best:
        """No receivers yet, with scores of the type and on the device of some tensor."""
        scores = like.new_full((num_senders, k), -math.inf)
        return cls(torch.full_like(scores, NONE, dtype=torch.int64), scores)

    def or_better(self, ids: Tensor, scores: Tensor) -> Best:
        """Return the best of these and of further receivers.

        Args:
            ids: The further receivers, increasing, shape ``(m,)``.
            scores: Their scores for each sender, shape ``(n, m)``.
        """
        at = highest(scores, self.ids.shape[1])
        return Best.joined([self, Best(ids[at], scores.gather(1, at))])

    @classmethod
    def joined(cls, parts: Sequence[Best]) -> Best:
        """Return the best of all that were found for the same senders, as many as the first has."""
        k = parts[0].ids.shape[1]
        ids, scores = (torch.cat(arrays, 1) for arrays in zip(*parts, strict=True))
        by_id = ids.argsort(1)
        order = scores.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices[:, :k]
        at = by_id.gather(1, order)
        ids, scores = ids.gather(1, at), scores.gather(1, at)
        return cls(ids.masked_fill(scores == -math.inf, NONE), scores)


def highest(scores: Tensor, k: int) -> Tensor:
    """Return where the ``k`` highest scores of each row stand, in any order: of equal ones the first."""
    if scores.shape[1] <= k:
        return torch.arange(scores.shape[1], device=scores.device).expand(scores.shape)
    top = scores.topk(k + 1)
    at, values = top.indices[:, :k], top.values
    is_open = (values[:, k] == values[:, k - 1]) & (values[:, k] > -math.inf)  # which of them topk takes is not said
    if bool(is_open.any()):
        at[is_open] = scores[is_open].sort(dim=1, descending=True, stable=True).indices[:, :k]
    return at
