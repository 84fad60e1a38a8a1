r"""Metrics of how high a true edge ranks among false ones.

With :math:`a` negatives that score higher than the edge and :math:`b` that score the same, its rank is

.. math::
    r = 1 + a + b / 2,
    \qquad \mathrm{MRR} = \mathrm{mean}(1 / r),
    \qquad \mathrm{Hits@}k = \mathrm{mean}(r \le k)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_gnn_dist.checks import check_at_least, check_list, check_tensor, shown

DEFAULT = (1, 10, 50)


class LinkRanking(MetricCollection):
    """``mrr`` and ``hits@1``, ``hits@10``, ``hits@50`` of a model that scores the targets of :class:`LinkDataModule`.

        self.ranking = LinkRanking()                                                   # in __init__
        self.ranking.update(self(batch), batch.edge_label)                             # in validation_step
        self.log_dict(self.ranking, batch_size=int(batch.edge_label.sum()))

    Ranks exchange sums and counts, so the result is exact for unequal shares. An edge whose score is NaN ranks last,
    and a negative whose score is NaN ranks above its edge.

    Args:
        hits: The ``k`` of each Hits@k. Each edge needs at least ``k`` negatives. Default: 1, 10 and 50, as far as the
            first batch has as many.
        prefix: Put before every name, such as ``"val/"``.
    """

    def __init__(self, hits: Sequence[int] | None = None, *, prefix: str | None = None) -> None:
        self._open = DEFAULT if hits is None else ()
        hits = DEFAULT if hits is None else hits
        check_list("hits", hits, "[1, 10, 50]")
        for number in hits:
            check_at_least(1, **{"hits: an entry": number})
        if prefix is not None and not isinstance(prefix, str):
            raise TypeError(f'prefix must be a text such as "val/", or None, got {shown(prefix)}.')
        metrics: dict[str, Metric | MetricCollection] = {"mrr": ReciprocalRank()}
        super().__init__(metrics | {f"hits@{k}": HitsAt(k) for k in hits}, prefix=prefix, compute_groups=False)

    def update(self, scores: Tensor, edge_label: Tensor) -> None:  # type: ignore[override]  # of a dict of modules
        """Add a batch, as :meth:`RankMean.update` takes it."""
        self._leave_out(edge_label)
        super().update(scores, edge_label)

    def forward(self, scores: Tensor, edge_label: Tensor) -> dict[str, Any]:
        """Add a batch, and return its own values."""
        self._leave_out(edge_label)
        found: dict[str, Any] = super().forward(scores, edge_label)
        return found

    def _leave_out(self, edge_label: object) -> None:
        """Of the default, leave out each Hits@k of more negatives than the first batch has for an edge."""
        if not isinstance(edge_label, Tensor) or not (num_edges := int((edge_label == 1).sum())):
            return  # which each metric refuses
        for k in self._open:
            if edge_label.numel() // num_edges - 1 < k:
                del self[f"hits@{k}"]
        self._open = ()


class RankMean(Metric):
    """The mean over edges of a function of their ranks, which a subclass defines as :meth:`of_ranks`."""

    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def of_ranks(self, ranks: Tensor, num_negatives: int) -> Tensor:
        """Return the values to average, one for each edge; ``ranks`` has shape ``(num_edges,)``."""
        raise NotImplementedError

    def update(self, scores: Tensor, edge_label: Tensor) -> None:
        """Add a batch: one score and label per target, true edges first, then the negatives of each in turn."""
        check_tensor("scores", scores, "one number for each target")
        check_tensor("edge_label", edge_label, "1 for each edge and 0 for each negative")
        if edge_label.dim() != 1 or not bool(((edge_label == 0) | (edge_label == 1)).all()):
            raise ValueError(f"edge_label must be a vector of 1 and 0, got {shown(edge_label)}: use batch.edge_label.")
        num_edges = int(edge_label.sum())
        if num_edges == 0:
            raise ValueError(
                f"edge_label must have an edge (1) to rank, got {shown(edge_label)}: use batch.edge_label."
            )
        if not bool(edge_label[:num_edges].all()):
            raise ValueError("edge_label must have all edges (1) before their negatives (0): use batch.edge_label.")
        if scores.shape != edge_label.shape or scores.numel() % num_edges:
            raise ValueError(
                f"Ranking needs a score for each target of a batch, and as many negatives for each of its {num_edges} "
                f"edges: got scores {tuple(scores.shape)} for labels {tuple(edge_label.shape)}."
            )
        edges, negatives = scores[:num_edges, None], scores[num_edges:].view(num_edges, -1)
        beaten_by, level_with = (~(negatives <= edges)).sum(1), (~(negatives < edges)).sum(1)
        ranks = 1 + (beaten_by + level_with) / 2
        # Not in place: what trainer.test() leaves behind may not be written to outside inference mode.
        self.total = self.total + self.of_ranks(ranks, negatives.shape[1]).sum(dtype=self.total.dtype)
        self.count = self.count + num_edges

    def compute(self) -> Tensor:
        return (self.total / self.count).to(torch.float32)


class ReciprocalRank(RankMean):
    """MRR: the mean of 1 / rank."""

    def of_ranks(self, ranks: Tensor, num_negatives: int) -> Tensor:
        return 1 / ranks.to(self.total.dtype)


class HitsAt(RankMean):
    """Hits@k: the share of edges whose rank is at most ``k``."""

    def __init__(self, k: int) -> None:
        super().__init__()
        check_at_least(1, k=k)
        self.k = k

    def of_ranks(self, ranks: Tensor, num_negatives: int) -> Tensor:
        if num_negatives < self.k:
            raise ValueError(
                f"With {num_negatives} negatives for each edge, Hits@{self.k} is always 1: draw more with "
                f"split_edges(graph, negatives={2 * self.k}), or use LinkRanking(hits=[...])."
            )
        return ranks <= self.k
