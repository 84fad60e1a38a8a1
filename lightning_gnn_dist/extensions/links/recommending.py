r"""What a model recommends: a score for each question and receiver, and how the right ones rank among all of them.

With rows of questions and of receivers :math:`h`, right answers :math:`R_q` and the receivers :math:`r_1, r_2, \ldots`
in the order of their scores,

.. math::
    s(q, r) = \langle W h_q, h_r \rangle, \qquad
    \mathrm{MAP@}k = \mathrm{mean}_q \frac{1}{\min(|R_q|, k)}
        \sum_{i \le k,\, r_i \in R_q} \frac{|\{r_1, \ldots, r_i\} \cap R_q|}{i}

RelBench divides so, where ``RetrievalMAP`` of torchmetrics divides by the right ones among the first :math:`k` alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities import dim_zero_cat

from lightning_gnn_dist.checks import check_at_least
from lightning_gnn_dist.extensions.links.ranking import BestLinks
from lightning_gnn_dist.graph.typed.tables import Tables
from lightning_gnn_dist.layers.choice import share_of
from lightning_gnn_dist.wire.collectives import rank, world_size

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

    def answer(self, said: Said, batch: HeteroData) -> BestLinks:
        """What is recommended to this rank's share of questions, after its last batch; to none before. Collective."""
        left = int(batch[self.task.answers].edge_label_left)
        if left + 1 != self._left:  # the first batch of a pass, or of one after a pass that was broken off
            self.ranking.reset()
        self._left = left
        self.ranking.update(said, batch)
        if left:
            return BestLinks.none(batch[self.task.name].n_id[:0], self.task.k, said.receivers[:0])
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
        self.best: BestLinks | None = None
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
        best = BestLinks.none(questions, self.k, known[:0])
        for time in asked_at.unique():
            at, of_time = (asked_at == time).nonzero().view(-1), known_at == time
            ids, rows = receivers[of_time], known[of_time]
            for some in at.split(max(1, _AT_ONCE // max(1, len(ids)))):
                found = BestLinks.none(questions[some], self.k, rows[:0]).or_better(ids, asked[some] @ rows.T)
                best.receivers[some], best.scores[some] = found[1:]
        self.best = best
        return average_precision(questions, best.receivers, dim_zero_cat(self.right))

    def _sorted(self, name: str) -> list[Tensor]:
        """Rows, ids and times, in the order of the ids, which decides between equal scores."""
        found = [dim_zero_cat(getattr(self, f"{name}_{part}")) for part in _PARTS]
        order = found[1].argsort(stable=True)
        return [array[order] for array in found]

    def own_share(self) -> BestLinks:
        """Return what is recommended to this rank's share of the questions. Collective."""
        self.compute()
        assert self.best is not None
        share = share_of(len(self.best.senders), world_size(), rank())
        return BestLinks(*(array[share.start : share.stop] for array in self.best))


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
