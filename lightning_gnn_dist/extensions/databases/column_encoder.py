"""Rows of tables as rows that a model learns from: a linear map of numbers and ages, and embeddings of categories.

    h_v = W_t [x_v, log(1 + 100 |a|), a, sign(a)] + sum_c E_(t,c)[code_(v,c)] + b_t,  a = (time of seed - moment) / span

It trains with the model. PyTorch Frame has such encoders, too, and is not used: its statistics are of all rows that it
is given, and its frames are no tensors with a row for each node, so they could be neither mapped, divided nor sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import HeteroData
from torch_geometric.data.storage import NodeStorage

from lightning_gnn_dist.checks import check_at_least, check_path
from lightning_gnn_dist.graph.storage.store import tables_at
from lightning_gnn_dist.graph.typed.tables import CATEGORIES, MOMENTS, NO_MOMENT, NUMBERS, TIME, Feature, Tables

PER_AGE = 3  # numbers that tell an age
LONGEST = 10.0  # spans


def read_tables(path: str | Path) -> Tables:
    """Read what became of the tables of a prepared database.

    Args:
        path: The directory of the graph, or that of its shards.
    """
    found = tables_at(check_path("path", path))
    if found is None:
        raise ValueError(
            f"{path} was not made of tables with keys, so it knows no columns: lightning-gnn-dist prepare."
        )
    return found


class ColumnEncoder(nn.Module):
    """Makes a row of each node of a batch, of the columns of its table and of its age.

    Args:
        tables: What became of the tables: ``graph.types.tables``, or ``read_tables(path)``.
        task: The task that is learned: its questions get rows of 0, and columns that it hides are left out.
        channels: Numbers in a row.
    """

    def __init__(self, tables: Tables, task: str, channels: int) -> None:
        super().__init__()
        check_at_least(1, channels=channels)
        self.task, self.channels, self.of_tables = tables.task(task).name, channels, nn.ModuleDict()
        for table, features in tables.seen_by(task).items():
            is_timed = table in tables.timed
            self.of_tables[_key(table)] = TableEncoder(features, tables.span, channels, is_timed=is_timed)

    def forward(self, batch: HeteroData) -> dict[str, Tensor]:
        """The rows of all nodes of a batch, by node type."""
        seeds = batch[getattr(batch, "seed_type", self.task)]  # of pairs an edge type
        times = seeds.seed_time if "seed_time" in seeds else None
        kinds = [kind for kind in batch.node_types if _key(kind) in self.of_tables]
        made = {kind: self.of_tables[_key(kind)](batch[kind], times) for kind in kinds}
        questions = next(iter(made.values())).new_zeros(batch[self.task].num_nodes, self.channels)
        return {self.task: questions} | made


class TableEncoder(nn.Module):
    """Makes a row of each row of one table.

    Args:
        features: Where its columns are.
        span: The unit of ages.
        channels: Numbers in a row.
        is_timed: Whether rows have times.
    """

    def __init__(self, features: Sequence[Feature], span: float, channels: int, *, is_timed: bool) -> None:
        super().__init__()
        self.span, self.features = span, {kind: _of_kind(features, kind) for kind in (NUMBERS, CATEGORIES, MOMENTS)}
        self.features[MOMENTS] += [Feature("", TIME, 0, 1)] if is_timed else []
        width = sum(feature.width for feature in self.features[NUMBERS]) + PER_AGE * len(self.features[MOMENTS])
        self.linear = nn.Linear(width, channels) if width else None
        self.bias = nn.Parameter(torch.zeros(channels)) if self.linear is None else None
        sizes = [feature.size for feature in self.features[CATEGORIES]]
        self.embedding = nn.EmbeddingBag(sum(sizes), channels, mode="sum") if sizes else None
        self.starts: Tensor
        self.register_buffer("starts", torch.tensor([sum(sizes[:at]) for at in range(len(sizes))]), persistent=False)

    def forward(self, rows: NodeStorage, seed_times: Tensor | None) -> Tensor:
        """The rows of some nodes; without times of seeds their ages are 0."""
        numbers = [
            *self._columns(rows, NUMBERS),
            *(self._age(each, rows, seed_times) for each in self._columns(rows, MOMENTS)),
        ]
        made = self.bias if self.linear is None else self.linear(torch.cat(numbers, 1))
        assert made is not None
        if self.embedding is not None:
            codes = torch.cat(list(self._columns(rows, CATEGORIES)), 1)
            made = made + self.embedding(codes + self.starts)
        return made.expand(rows.num_nodes, -1) if made.dim() == 1 else made

    def _columns(self, rows: NodeStorage, kind: str) -> list[Tensor]:
        """The columns of each feature of a kind, each of shape (nodes, width)."""
        arrays = {feature.array: rows[feature.array] for feature in self.features[kind]}
        by_column = {name: array.unsqueeze(1) if array.dim() == 1 else array for name, array in arrays.items()}
        return [by_column[each.array][:, each.first : each.first + each.width] for each in self.features[kind]]

    def _age(self, moments: Tensor, rows: NodeStorage, seed_times: Tensor | None) -> Tensor:
        if seed_times is None:
            return torch.zeros(len(moments), PER_AGE, device=moments.device)
        age = (seed_times[rows.batch, None] - moments).double() / self.span
        age = torch.where(moments == NO_MOMENT, 0, age).clamp(-LONGEST, LONGEST).float()
        return torch.cat([age.abs().mul(100).log1p(), age, age.sign()], 1)


def _key(table: str) -> str:
    """The name of a module: a module has attributes of its own, and none with a dot."""
    return f"of_{table}".replace(".", "_dot_")


def _of_kind(features: Sequence[Feature], kind: str) -> list[Feature]:
    return [feature for feature in features if feature.kind == kind]
