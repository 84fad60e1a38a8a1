r"""Rankings: of a true edge among false ones, and the best receivers of some questions among all.

With :math:`a` negatives that score higher than an edge and :math:`b` that score the same, its rank is

.. math::
    r = 1 + a + b / 2,
    \qquad \mathrm{MRR} = \mathrm{mean}(1 / r),
    \qquad \mathrm{Hits@}k = \mathrm{mean}(r \le k)

A model recommends by the rows of questions and of receivers :math:`h`. With right answers :math:`R_q` and the receivers
:math:`r_1, r_2, \ldots` in the order of their scores,

.. math::
    s(q, r) = \langle W h_q, h_r \rangle, \qquad
    \mathrm{MAP@}k = \mathrm{mean}_q \frac{1}{\min(|R_q|, k)}
        \sum_{i \le k,\, r_i \in R_q} \frac{|\{r_1, \ldots, r_i\} \cap R_q|}{i}

RelBench divides so, where ``RetrievalMAP`` of torchmetrics divides by the right ones among the first :math:`k` alone.

Receivers with a higher score come first, of equal scores those with the lower id. A score of minus infinity is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from lightning_gnn_dist.checks import check_at_least, check_list, check_tensor, shown
from lightning_gnn_dist.graph.storage.row_file import rows_of
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.wire.collectives import rank, world_size

NONE = -1  # the id where a question has no more receivers


class Recommended(NamedTuple):
    """What is recommended to some questions of a task.

    Attributes:
        questions: The rows of the task's table, increasing, shape ``(n,)``.
        receivers: The receivers of each, the best first, shape ``(n, k)``; -1 where there are fewer.
        scores: Their scores, minus infinity where there are fewer.
    """

    questions: Tensor
    receivers: Tensor
    scores: Tensor

    @classmethod
    def none(cls, questions: Tensor, k: int, like: Tensor) -> Recommended:
        """No receivers yet, with scores of the type and on the device of some tensor."""
        scores = like.new_full((len(questions), k), -math.inf)
        return cls(questions, torch.full_like(scores, NONE, dtype=torch.int64), scores)

    @property
    def records(self) -> NDArray[Any]:
        """The receivers and their scores as records ``receiver`` and ``score``, shape ``(n, k)``."""
        scores = rows_of(self.scores, len(self.scores))
        found = np.empty(scores.shape, [("receiver", np.int64), ("score", scores.dtype)])
        found["receiver"], found["score"] = self.receivers.cpu().numpy(), scores
        return found


def highest(scores: Tensor, k: int) -> Tensor:
    """Return where the ``k`` highest scores of each row stand, the highest first: of equal ones the first."""
    values, at = scores.topk(min(k + 1, scores.shape[1]))
    if values.shape[1] > k:
        # Of equal scores topk does not say which it takes.
        is_open = (values[:, k] == values[:, k - 1]) & (values[:, k] > -math.inf)
        at = at[:, :k]
        at[is_open] = scores[is_open].sort(dim=1, descending=True, stable=True).indices[:, :k]
    at = at.sort(1).values
    return at.gather(1, scores.gather(1, at).sort(dim=1, descending=True, stable=True).indices)


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


_AT_ONCE = 1 << 24  # scores
_PARTS = ("rows", "ids", "times")


class Said(NamedTuple):
    """What a model says of a batch of a task that recommends.

    Attributes:
        questions: A row for each question of the batch.
        receivers: A row for each receiver.
    """

    questions: Tensor
    receivers: Tensor


class RecommendingHead(nn.Module):
    """Scores pairs of a question and a receiver by the product of their rows.

    Args:
        tables: What became of the tables: ``graph.types.tables``, or ``read_tables(path)``.
        task: A task that recommends.
        channels: Numbers in a row.
    """

    def __init__(self, tables: Tables, task: str, channels: int) -> None:
        super().__init__()
        self.task = tables.task(task)
        self.linear = nn.Linear(channels, channels, bias=False)
        self.ranking = self._metric()  # of a prediction
        self._left = 0

    def forward(self, rows: dict[str, Tensor], batch: HeteroData) -> Said:
        """What is said of the questions and receivers of a batch, by the rows of all its nodes, by type."""
        assert self.task.receiver is not None
        name, receiver = self.task.name, self.task.receiver
        asked, known = rows[name][: batch[name].batch_size], rows[receiver][: batch[receiver].batch_size]
        return Said(self.linear(asked), known)

    def loss(self, said: Said, batch: HeteroData) -> Tensor:
        """The mean cross entropy of each right answer among the false ones drawn for it."""
        targets = batch[self.task.answers]
        question, receiver = targets.edge_label_index
        scores = (said.questions[question] * said.receivers[receiver]).sum(1)
        right, false = scores.split([n := int(targets.edge_label.sum()), len(scores) - n])
        logits = torch.cat([right[:, None], false.view(n, -1)], 1)
        return functional.cross_entropy(logits, torch.zeros_like(question[:n]))

    def judge(self, metrics: MetricCollection, said: Said, batch: HeteroData) -> None:
        """Let the metrics see a batch."""
        metrics.update(said, batch)

    def answer(self, said: Said, batch: HeteroData) -> Recommended:
        """What is recommended to this rank's share of questions, after its last batch; to none before. Collective."""
        left = int(batch[self.task.answers].edge_label_left)
        if left + 1 != self._left:  # the first batch of a pass, or of one after a pass that was broken off
            self.ranking.reset()
        self._left = left
        self.ranking.update(said, batch)
        if left:
            return Recommended.none(batch[self.task.name].n_id[:0], self.task.k, said.receivers[:0])
        found = self.ranking.own_share()
        self.ranking.reset()
        return found

    def metrics(self, prefix: str = "") -> MetricCollection:
        """The metric of the task, which is RelBench's."""
        return MetricCollection({"map": self._metric()}, prefix=prefix, compute_groups=False)

    def _metric(self) -> MeanAveragePrecision:
        assert self.task.answers is not None
        return MeanAveragePrecision(self.task.answers, self.task.k)


class MeanAveragePrecision(Metric):
    """MAP@k of all receivers, exact on any number of ranks: what each computes is the rows of its share, once.

    Ranks exchange rows, as many numbers as questions and receivers have, and each scores all pairs, in blocks. What is
    found for each question stays in ``best``.

    Args:
        answers: The edge type of the answers.
        k: How many receivers are judged. A question without a known answer does not count.
    """

    higher_is_better = True
    full_state_update = False
    right: list[Tensor]

    def __init__(self, answers: tuple[str, str, str], k: int) -> None:
        super().__init__()
        check_at_least(1, k=k)
        self.answers, self.k = answers, k
        self.best: Recommended | None = None
        for name in ("asked", "known"):
            for part in _PARTS:
                self.add_state(f"{name}_{part}", [], dist_reduce_fx="cat")
        self.add_state("right", [], dist_reduce_fx="cat")

    def update(self, said: Said, batch: HeteroData) -> None:
        """Add the rows of a batch's questions and receivers."""
        store = batch[self.answers]
        for name, rows, kind in zip(("asked", "known"), said, self.answers[::2], strict=True):
            nodes, count = batch[kind], len(rows)
            of_parts = rows.detach(), nodes.n_id[:count], store.seed_time[nodes.batch[:count]]
            for part, found in zip(_PARTS, of_parts, strict=True):
                getattr(self, f"{name}_{part}").append(found.contiguous())
        self.right.append(store.edge_label_answers.T.contiguous())

    def compute(self) -> Tensor:
        (asked, questions, asked_at), (known, receivers, known_at) = map(self._sorted, ("asked", "known"))
        best = Recommended.none(questions, self.k, known[:0])
        for time in asked_at.unique():
            at, of_time = (asked_at == time).nonzero().view(-1), known_at == time
            ids, rows = receivers[of_time], known[of_time]
            for some in at.split(max(1, _AT_ONCE // max(1, len(ids)))):
                scores = asked[some] @ rows.T
                at = highest(scores, self.k)
                found = scores.gather(1, at)
                best.scores[some, : at.shape[1]] = found
                best.receivers[some, : at.shape[1]] = ids[at].masked_fill(found == -math.inf, NONE)
        self.best = best
        return average_precision(questions, best.receivers, dim_zero_cat(self.right))

    def _sorted(self, name: str) -> list[Tensor]:
        """Rows, ids and times, in the order of the ids, which decides between equal scores."""
        found = [dim_zero_cat(getattr(self, f"{name}_{part}")) for part in _PARTS]
        order = found[1].argsort(stable=True)
        return [array[order] for array in found]

    def own_share(self) -> Recommended:
        """Return what is recommended to this rank's share of the questions. Collective."""
        self.compute()
        assert self.best is not None
        share = share_of(len(self.best.questions), world_size(), rank())
        return Recommended(*(array[share.start : share.stop] for array in self.best))


def average_precision(questions: Tensor, found: Tensor, right: Tensor) -> Tensor:
    """The mean average precision of questions that have an answer.

    Args:
        questions: Their ids, increasing, shape (n,).
        found: What is recommended for each, the best first, shape (n, k).
        right: Question and receiver of each right answer, shape (m, 2).
    """
    right = right.unique(dim=0)
    base = int(torch.cat([right[:, 1], found.view(-1)]).max()) + 2 if right.numel() else 2
    is_right = torch.isin(questions[:, None] * base + found + 1, right[:, 0] * base + right[:, 1] + 1)
    places = torch.arange(1, found.shape[1] + 1, device=found.device)
    precision = is_right.cumsum(1).double() / places * is_right
    counts = torch.bincount(torch.searchsorted(questions, right[:, 0].contiguous()), minlength=len(questions))
    of_question = precision.sum(1) / counts.clamp(1, found.shape[1])
    return of_question[counts > 0].mean().float()
