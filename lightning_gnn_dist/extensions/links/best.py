"""The best receivers found so far for each of some senders, as receivers come piece by piece.

Receivers with a higher score come first, and of equal scores those with the lower id, in whichever pieces they come. A
score of minus infinity is none.
"""

from __future__ import annotations

import math
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
        found = Best(ids[at], scores.gather(1, at))
        return self.joined([found])

    def joined(self, others: list[Best]) -> Best:
        """Return the best of these and of others that were found for the same senders."""
        parts, k = [self, *others], self.ids.shape[1]
        ids, scores = torch.cat([part.ids for part in parts], 1), torch.cat([part.scores for part in parts], 1)
        by_id = ids.argsort(1)
        ids, scores = ids.gather(1, by_id), scores.gather(1, by_id)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        ids, scores = ids.gather(1, order), scores.gather(1, order)
        return Best(ids.masked_fill(scores == -math.inf, NONE), scores)

    def of(self, senders: slice) -> Best:
        """Return those of some senders."""
        return Best(self.ids[senders], self.scores[senders])


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
