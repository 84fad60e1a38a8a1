"""The way of a request to the owners of its rows, and of their answers back into its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lightning_gnn_dist.engine.row_kernels import put_rows

Join = Callable[[list[Tensor]], Tensor]


class Route:
    """Sorts the rows of a request by the rank that they go to, and the answers back into order.

    Args:
        owners: The rank that each row goes to.
        num_ranks: The number of ranks.
    """

    def __init__(self, owners: Tensor, num_ranks: int) -> None:
        self.order = owners.argsort(stable=True)
        self.sizes: list[int] = torch.bincount(owners, minlength=num_ranks).tolist()

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the rows that each rank is sent, in order of rank."""
        return list(rows[self.order].split(self.sizes))

    def restore(self, answers: Sequence[Tensor]) -> Tensor:
        """Return one answer for each row of the request, in its order."""
        rows = torch.cat(list(answers))
        out = torch.empty_like(rows)
        out[self.order] = rows
        return out

    def joined(self, counts: Sequence[Tensor], entries: Sequence[Tensor], starts: Tensor) -> Tensor:
        """Return the entries of all rows in the order of the request, each row's from its place in ``starts`` on."""
        out = entries[0].new_empty(sum(map(len, entries)))
        for rows, lengths, some in zip(self.order.split(self.sizes), counts, entries, strict=True):
            put_rows(rows.numpy(), lengths.numpy(), some.numpy(), starts.numpy(), out.numpy())
        return out

    def in_order(self, answers: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor, Join]:
        """Bring what owners have drawn, how many edges for each row and their senders, into the order of the request.

        Returns how many edges each row has, their senders, and what brings another number of each edge into order.
        """
        lengths = [answer[0].to(torch.int64) for answer in answers]
        counts = self.restore(lengths)
        join = partial(self.joined, lengths, starts=counts.cumsum(0) - counts)
        return counts, join([answer[1] for answer in answers]), join
