"""A batch of a part whose layers need rows of other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch_geometric.data import Data

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.sampling.block import Block

Run: TypeAlias = Callable[["PartBatch", Sequence[Callable[[Data], Tensor]]], Tensor]
_HIDDEN = ("edge_index", "blocks", "adj_t")


class PartBatch(SampledData):
    """Nodes that a rank computes rows for, the seeds first, and senders among other ranks' nodes.

    Its edges are not handed out: a layer that ran on them all at once would take rows for granted that other ranks
    compute.
    """

    @classmethod
    def of(cls, batch: SampledData, run: Run) -> PartBatch:
        """The batch with what runs layers on it."""
        part = cls.__new__(cls)
        part.__dict__.update(copy.copy(batch).__dict__, _run=run)
        part._store._parent = part
        return part

    def through(self, layers: Sequence[Callable[[Data], Tensor]]) -> Tensor:
        """Run layers, with rows of other ranks between each two, and return the rows of the seeds.

        Collective, if ranks exchange them in every step.
        """
        rows: Tensor = self.__dict__["_run"](self, layers)
        return rows

    @property
    def outermost(self) -> Block:
        """The edges that the first layer computes on."""
        return self.all_blocks[0]

    @property
    def all_blocks(self) -> list[Block]:
        """What ``blocks`` is of other batches."""
        return list(self._store._blocks)

    @property
    def edge_index(self) -> Any:
        raise AttributeError  # __getattr__ says why

    def _found_blocks(self) -> tuple[Block, ...]:
        return ()

    def __getattr__(self, key: str) -> Any:
        if key in _HIDDEN:
            raise AttributeError(
                f"This batch has no {key}: with boundary=Exchange() ranks send each other rows between the layers, and "
                "with boundary=History() at meetings. "
                "Define layers(), and let forward() return through_layers(self, batch); for one of PyG's models, "
                "layers() returns layers_of(self.gnn). Within a layer its batch has edges, which it may change."
            )
        return super().__getattr__(key)
