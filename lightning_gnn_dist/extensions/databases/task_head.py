"""What a model says about the questions of a task: a linear layer, and the loss and the metrics that go with it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import HeteroData
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import (
    BinaryAUROC,
    BinaryAveragePrecision,
    MulticlassAccuracy,
    MulticlassF1Score,
    MultilabelAUROC,
    MultilabelAveragePrecision,
)
from torchmetrics.regression import MeanAbsoluteError, R2Score

from lightning_gnn_dist.extensions.links.ranking import RecommendingHead
from lightning_gnn_dist.graph.typed.tables import Tables

BINARY, CLASSES, LABELS = "binary_classification", "multiclass_classification", "multilabel_classification"


def head_of(tables: Tables, task: str, channels: int) -> TaskHead | RecommendingHead:
    """The head of any task, whose ``forward`` takes the rows of all nodes of a batch, by type, and the batch.

    Args:
        tables: What became of the tables: ``graph.types.tables``, or ``read_tables(path)``.
        task: The task.
        channels: Numbers in a row.
    """
    kind = TaskHead if tables.task(task).receiver is None else RecommendingHead
    return kind(tables, task, channels)


class TaskHead(nn.Module):
    """Says as many numbers about a question as its task asks for: logits, or standard deviations from the mean.

    Args:
        tables: What became of the tables: ``graph.types.tables``, or ``read_tables(path)``.
        task: The task.
        channels: Numbers in the row of a question.
    """

    def __init__(self, tables: Tables, task: str, channels: int) -> None:
        super().__init__()
        self.task = tables.task(task)
        self.linear = nn.Linear(channels, self.task.num_outputs)

    def forward(self, rows: Mapping[str, Tensor], batch: HeteroData) -> Tensor:
        """What is said of the questions of a batch, shape ``(questions, outputs)``."""
        said: Tensor = self.linear(rows[self.task.name][: batch[self.task.name].batch_size])
        return said

    def loss(self, said: Tensor, batch: HeteroData) -> Tensor:
        """The mean loss of what was said of a batch: cross entropy, or of a regression the absolute error."""
        y = batch[self.task.name].y
        if self.task.task_type == CLASSES:
            return functional.cross_entropy(said, y)
        if self.task.task_type in (BINARY, LABELS):
            return functional.binary_cross_entropy_with_logits(said, y.view_as(said).float())
        return functional.l1_loss(said.squeeze(1), (y - self.task.mean) / self.task.std)

    def answer(self, said: Tensor, batch: HeteroData) -> Tensor:
        """The same as probabilities, or as numbers of a regression: what metrics take and users read."""
        if self.task.task_type == CLASSES:
            return said.softmax(1)
        if self.task.task_type in (BINARY, LABELS):
            return said.sigmoid().squeeze(1) if self.task.task_type == BINARY else said.sigmoid()
        return said.squeeze(1) * self.task.std + self.task.mean

    def judge(self, metrics: MetricCollection, said: Tensor, batch: HeteroData) -> None:
        """Let the metrics see what was said of a batch."""
        metrics.update(self.answer(said, batch), batch[self.task.name].y)

    def metrics(self, prefix: str = "") -> MetricCollection:
        """The metrics of the task, RelBench's first. Logged as objects they are exact over ranks."""
        count = self.task.num_outputs
        found: dict[str, Metric]
        if self.task.task_type == BINARY:
            found = {"auroc": BinaryAUROC(), "ap": BinaryAveragePrecision()}
        elif self.task.task_type == CLASSES:
            found = {"accuracy": MulticlassAccuracy(count, average="micro"), "f1": MulticlassF1Score(count)}
        elif self.task.task_type == LABELS:
            found = {"auroc": MultilabelAUROC(count), "ap": MultilabelAveragePrecision(count)}
        else:
            found = {"nmae": NormalizedError(self.task.std), "mae": MeanAbsoluteError(), "r2": R2Score()}
        # Groups are found by comparing states, which ranks with other questions could find otherwise.
        return MetricCollection(dict(found), prefix=prefix, compute_groups=False)


class NormalizedError(MeanAbsoluteError):
    """The mean absolute error as a share of the standard deviation of training answers.

    Args:
        std: That standard deviation.
    """

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def compute(self) -> Tensor:
        return super().compute() / self.std
