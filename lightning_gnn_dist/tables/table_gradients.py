"""The gradients of tables where ranks exchange gradients at every step: torch's DDP leaves them alone.

DDP would divide all other gradients by the number of ranks once more. So it is told to ignore tables, and behind its
own exchange, the last of an accumulation, ranks gather the rows that each has touched. As with other parameters, the
gradient of all is the sum over ranks, divided by their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from lightning_gnn_dist.tables.merging import sum_gradients
from lightning_gnn_dist.tables.owned_embedding import owned_tables
from lightning_gnn_dist.tables.owned_gradients import hand_to_owners
from lightning_gnn_dist.tables.tables import coalesced, dense_parameters, of_rows, tables_of
from lightning_gnn_dist.wire import collectives

_IGNORED = "_ddp_params_and_buffers_to_ignore"


class TableGradients:
    """Exchanges gradients of tables. Make it before DDP wraps the module; all take rank 0's tables. Collective.

    Args:
        module: The module that DDP wraps.
        strategy: The strategy's name, for errors.
    """

    def __init__(self, module: nn.Module, strategy: str) -> None:
        self._module, self._tables, self._owned = module, tables_of(module), owned_tables(module)
        if self._tables and not dense_parameters(module):
            others = "" if self._owned else "use LocalSGDStrategy, or "
            raise ValueError(
                f"{', '.join(self._tables)} is all that trains, and {strategy} needs a parameter with dense gradients, "
                f"too: {others}add a layer."
            )
        owned = {id(table.parameter) for table in self._owned.values()}
        self._tables = {name: table for name, table in self._tables.items() if id(table) not in owned}
        collectives.broadcast_([table.data for table in self._tables.values()])

    def hidden(self) -> AbstractContextManager[None]:
        """Let DDP, which wraps the module in the block, ignore the tables."""
        owned = [table.parameter for table in self._owned.values()]
        return hidden_from_ddp(self._module, [*self._tables.values(), *owned])

    @torch.no_grad()
    def exchange(self) -> bool:
        """Replace the gradients by the mean over ranks; where no rank has one, there is none. Collective.

        Returns whether those are finite that lie on one rank each.
        """
        size = collectives.world_size()
        if size == 1:
            return True
        if self._tables:
            self._exchange_all(size)
        return hand_to_owners(self._owned.values())

    def _exchange_all(self, size: int) -> None:
        own = [coalesced(table, name) for name, table in self._tables.items()]
        tables = list(self._tables.values())
        for table, total in zip(tables, sum_gradients(tables, own), strict=True):
            table.grad = None if total is None else of_rows(table, total._indices()[0], total._values().div_(size))


@contextmanager
def hidden_from_ddp(module: nn.Module, parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let DDP, and Lightning where it makes replicas equal, ignore some parameters of a module in the block."""
    hidden = {id(each) for each in parameters}
    ignored = [name for name, each in module.named_parameters(remove_duplicate=False) if id(each) in hidden]
    if ignored:
        vars(module)[_IGNORED] = ignored
    try:
        yield
    finally:
        vars(module).pop(_IGNORED, None)
