"""Scores of all pairs of some senders and some receivers, by rows that layers have computed for both."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gnn_dist.batches.batch import ENDS, NamesOfTypes
from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedsOnly
from lightning_gnn_dist.extensions.links.edges import LinkEnds, ends_of
from lightning_gnn_dist.extensions.links.link_split import LinkSplit
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeRanges

Score = Literal["model", "dot"]
LeftOut = Literal["edges", "val", "test", "self"]


class Links(NamedTuple):
    """Links between nodes of given types.

    Attributes:
        where: The graph, or the folder of its shards.
        split: The split, if every host has it.
        types: The types of the graph.
        edge_type: The type of the links, if the graph has types.
        leave_out: Which pairs are not proposed.
    """

    where: Graph | Path
    split: LinkSplit | None
    types: TypeRanges
    edge_type: EdgeType | None
    leave_out: tuple[LeftOut, ...]

    @property
    def ends(self) -> LinkEnds:
        """The nodes that they may be between."""
        return ends_of(self.types, self.edge_type)

    @property
    def kinds(self) -> tuple[int, int]:
        """The numbers of the types of senders and receivers."""
        names, kind = self.types.node_types, self.edge_type or self.types.edge_types[0]
        return names.index(kind[0]), names.index(kind[2])


class Ends(NamedTuple):
    """Some nodes of one type: their ids in it, and the rows that the last layer has computed for them."""

    ids: Tensor
    rows: Tensor


Scorer = Callable[[Ends, Ends], Tensor]


def by_rows(senders: Ends, receivers: Ends) -> Tensor:
    """Score pairs by dot products of rows."""
    return senders.rows.flatten(1) @ receivers.rows.flatten(1).T


class ByModel:
    """Scores pairs as the user's module scores the targets of a batch: it is called with a batch of these pairs.

    Args:
        module: The module.
        owner: The module in it whose layers have computed the rows.
        links: The links.
        names: The names of a batch's arrays, by the keys of its stores.
    """

    def __init__(self, module: LightningModule, owner: object, links: Links, names: NamesOfTypes) -> None:
        self._module, self._owner, self._links, self._names = module, owner, links, names

    def __call__(self, senders: Ends, receivers: Ends) -> Tensor:
        shape = len(senders.ids), len(receivers.ids)
        found, count = self._module(self._batch(senders, receivers)), shape[0] * shape[1]
        if not isinstance(found, Tensor) or found.shape != (count,):
            got = f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(
                f"forward() of {type(self._module).__name__} returned {got} for the {count} pairs of a batch: it must "
                'return a score for each column of edge_label_index. Or name score="dot", dot products of rows.'
            )
        return found.view(shape)

    def _batch(self, senders: Ends, receivers: Ends) -> Any:
        links, types = self._links, self._links.types.node_types
        keys: list[Any] = [None] if links.edge_type is None else list(types)
        of_types: list[list[Ends]] = [[] for _ in types]
        for kind, ends in zip(links.kinds, (senders, receivers), strict=True):
            of_types[kind].append(ends)
        rows: RowsOfTypes = [torch.cat([end.rows for end in ends]) if ends else None for ends in of_types]
        ids = [torch.cat([end.ids for end in ends]) if ends else None for ends in of_types]
        around = Neighbourhood(
            {key: 0 if some is None else len(some) for key, some in zip(keys, ids, strict=True)},
            self._refuse,
            lambda key, name: ids[keys.index(key)] if name == "n_id" else None,
            lambda module: (lambda: rows) if module is self._owner else None,
        )
        first = len(senders.ids) if links.kinds[0] == links.kinds[1] else 0  # receivers stand behind senders
        pairs = torch.cartesian_prod(
            *(torch.arange(len(end.ids), device=end.rows.device) for end in (senders, receivers))
        )
        pairs = pairs.view(-1, 2).T + torch.tensor([[0], [first]], device=pairs.device)
        return SeedsOnly.around(around, self._names, links.edge_type, {ENDS: pairs})

    def _refuse(self) -> Any:
        raise ValueError(
            f"forward() of {type(self._module).__name__} reads more of a batch than the rows of layers() and "
            'edge_label_index, and pairs have no more: let it score through_layers(self, batch), or name score="dot".'
        )
