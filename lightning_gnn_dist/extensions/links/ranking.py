"""The best receivers of some senders, as scores of further receivers come.

Receivers with a higher score come first, and of equal scores those with the lower id, in whichever pieces they come. A
score of minus infinity is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gnn_dist.graph.storage.row_file import rows_of

NONE = -1  # the id where a sender has no more receivers


class BestLinks(NamedTuple):
    """The best links of some senders.

    Attributes:
        senders: Their ids, shape ``(n,)``: of a task the questions, the rows of its table, increasing.
        receivers: The receivers of each, the best first, shape ``(n, k)``; -1 where there are fewer.
        scores: Their scores, minus infinity where there are fewer.
    """

    senders: Tensor
    receivers: Tensor
    scores: Tensor

    @classmethod
    def none(cls, senders: Tensor, k: int, like: Tensor) -> BestLinks:
        """No receivers yet, with scores of the type and on the device of some tensor."""
        scores = like.new_full((len(senders), k), -math.inf)
        return cls(senders, torch.full_like(scores, NONE, dtype=torch.int64), scores)

    def or_better(self, ids: Tensor, scores: Tensor) -> BestLinks:
        """Return the best of these and of further receivers.

        Args:
            ids: The further receivers, increasing, shape ``(m,)``.
            scores: Their scores for each sender, shape ``(n, m)``.
        """
        at = highest(scores, self.receivers.shape[1])
        return BestLinks.joined([self, BestLinks(self.senders, ids[at], scores.gather(1, at))])

    @classmethod
    def joined(cls, parts: Sequence[BestLinks]) -> BestLinks:
        """Return the best of all that were found for the same senders, as many as the first has."""
        senders, k = parts[0].senders, parts[0].receivers.shape[1]
        ids, scores = (torch.cat(arrays, 1) for arrays in list(zip(*parts, strict=True))[1:])
        by_id = ids.argsort(1)
        order = scores.gather(1, by_id).sort(dim=1, descending=True, stable=True).indices[:, :k]
        at = by_id.gather(1, order)
        ids, scores = ids.gather(1, at), scores.gather(1, at)
        return cls(senders, ids.masked_fill(scores == -math.inf, NONE), scores)

    @property
    def questions(self) -> Tensor:
        """The senders of a task that recommends."""
        return self.senders

    @property
    def records(self) -> NDArray[Any]:
        """The receivers and their scores as records ``receiver`` and ``score``, shape ``(n, k)``."""
        scores = rows_of(self.scores, len(self.scores))
        found = np.empty(scores.shape, [("receiver", np.int64), ("score", scores.dtype)])
        found["receiver"], found["score"] = self.receivers.cpu().numpy(), scores
        return found


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
