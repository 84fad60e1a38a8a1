"""The gradients of tables where ranks exchange gradients at every step: torch's DDP leaves them alone.

DDP would divide all other gradients by the number of ranks once more. So it is told to ignore tables, and behind its
own exchange, the last of an accumulation, ranks gather the rows that each has touched. As with other parameters, the
gradient of all is the sum over ranks, divided by their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from lightning_gnn_dist.rounds.rows.merging import sum_gradients
from lightning_gnn_dist.rounds.rows.tables import coalesced, dense_parameters, of_rows, tables_of
from lightning_gnn_dist.wire import collectives


class TableGradients:
    """Exchanges gradients of tables. Make it before DDP wraps the module; all take rank 0's tables. Collective.

    Args:
        module: The module that DDP wraps.
        strategy: The strategy's name, for errors.
    """

    def __init__(self, module: nn.Module, strategy: str) -> None:
        self._module, self._tables = module, tables_of(module)
        if not self._tables:
            return
        if not dense_parameters(module):
            raise ValueError(
                f"{', '.join(self._tables)} is all that trains, and {strategy} needs a parameter with dense gradients, "
                "too: use LocalSGDStrategy, or add a layer."
            )
        collectives.broadcast_([table.data for table in self._tables.values()])

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Let DDP, which wraps the module in the block, ignore the tables."""
        tables = {id(table) for table in self._tables.values()}
        named = self._module.named_parameters(remove_duplicate=False)
        if tables:
            ignored = [name for name, each in named if id(each) in tables]
            vars(self._module)["_ddp_params_and_buffers_to_ignore"] = ignored
        try:
            yield
        finally:
            if tables:
                del vars(self._module)["_ddp_params_and_buffers_to_ignore"]

    @torch.no_grad()
    def exchange(self) -> None:
        """Replace the gradients by the mean over ranks; where no rank has one, there is none. Collective."""
        size = collectives.world_size()
        if not self._tables or size == 1:
            return
        own = [coalesced(table, name) for name, table in self._tables.items()]
        tables = list(self._tables.values())
        for table, total in zip(tables, sum_gradients(tables, own), strict=True):
            table.grad = None if total is None else of_rows(table, total._indices()[0], total._values().div_(size))
