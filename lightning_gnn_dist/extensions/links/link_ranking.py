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
        metrics: dict[str, Metric | MetricCollection] = {"mrr": RankMean()}
        super().__init__(metrics | {f"hits@{k}": RankMean(k) for k in hits}, prefix=prefix, compute_groups=False)

    def update(self, scores: Tensor, edge_label: Tensor) -> None:  # type: ignore[override]  # of a dict of modules
        """Add a batch: one score and label per target, true edges first, then the negatives of each in turn."""
        super().update(*self._ranks(scores, edge_label))

    def forward(self, scores: Tensor, edge_label: Tensor) -> dict[str, Any]:
        """Add a batch, and return its own values."""
        found: dict[str, Any] = super().forward(*self._ranks(scores, edge_label))
        return found

    def _ranks(self, scores: Tensor, edge_label: Tensor) -> tuple[Tensor, int]:
        """Return the rank of each edge, and among how many negatives it is.

        Of the default, leave out each Hits@k of more negatives than the first batch has for an edge.
        """
        ranks, num_negatives = ranks_of(scores, edge_label)
        for k in self._open:
            if num_negatives < k:
                del self[f"hits@{k}"]
        self._open = ()
        return ranks, num_negatives


def ranks_of(scores: Tensor, edge_label: Tensor) -> tuple[Tensor, int]:
    """Return the rank of each edge of a batch, and among how many negatives it is; refuse what cannot be ranked."""
    check_tensor("scores", scores, "one number for each target")
    check_tensor("edge_label", edge_label, "1 for each edge and 0 for each negative")
    if edge_label.dim() != 1 or not bool(((edge_label == 0) | (edge_label == 1)).all()):
        raise ValueError(f"edge_label must be a vector of 1 and 0, got {shown(edge_label)}: use batch.edge_label.")
    num_edges = int(edge_label.sum())
    if num_edges == 0:
        raise ValueError(f"edge_label must have an edge (1) to rank, got {shown(edge_label)}: use batch.edge_label.")
    if not bool(edge_label[:num_edges].all()):
        raise ValueError("edge_label must have all edges (1) before their negatives (0): use batch.edge_label.")
    if scores.shape != edge_label.shape or scores.numel() % num_edges:
        raise ValueError(
            f"Ranking needs a score for each target of a batch, and as many negatives for each of its {num_edges} "
            f"edges: got scores {tuple(scores.shape)} for labels {tuple(edge_label.shape)}."
        )
    edges, negatives = scores[:num_edges, None], scores[num_edges:].view(num_edges, -1)
    beaten_by, level_with = (~(negatives <= edges)).sum(1), (~(negatives < edges)).sum(1)
    return 1 + (beaten_by + level_with) / 2, negatives.shape[1]


class RankMean(Metric):
    """The mean over edges of 1 / rank; with ``k`` the share of them whose rank is at most that."""

    full_state_update = False
    higher_is_better = True
    total: Tensor
    count: Tensor

    def __init__(self, k: int | None = None) -> None:
        super().__init__()
        self.k = k
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, ranks: Tensor, num_negatives: int) -> None:
        """Add the ranks of some edges among so many negatives each."""
        if self.k is not None and num_negatives < self.k:
            raise ValueError(
                f"With {num_negatives} negatives for each edge, Hits@{self.k} is always 1: draw more with "
                f"split_edges(graph, negatives={2 * self.k}), or use LinkRanking(hits=[...])."
            )
        values = 1 / ranks.to(self.total.dtype) if self.k is None else ranks <= self.k
        # Not in place: what trainer.test() leaves behind may not be written to outside inference mode.
        self.total = self.total + values.sum(dtype=self.total.dtype)
        self.count = self.count + len(ranks)

    def compute(self) -> Tensor:
        return (self.total / self.count).to(torch.float32)
