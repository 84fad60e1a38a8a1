"""Scores of all pairs of some senders and some receivers, by rows that layers have computed for both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_gnn_dist.batches.batch import ENDS, NamesOfTypes
from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.batches.seed_batch import Neighbourhood, SeedsOnly
from lightning_gnn_dist.graph.typed.names import EdgeType
from lightning_gnn_dist.layers.model_layers import ModelLayers
from lightning_gnn_dist.layers.through_layers import COPIES

Score = Literal["model", "dot"]
_WORK = 24  # bytes of a pair beside its score: what is sorted, and where it stands


class Ends(NamedTuple):
    """Some nodes of one type.

    Attributes:
        ids: Their ids in their type.
        rows: The rows that the last layer has computed for them.
    """

    ids: Tensor
    rows: Tensor


Scorer = Callable[[Ends, Ends], Tensor]


def bytes_of_pair(score: Score, row: Tensor) -> int:
    """Return the bytes that scoring a pair takes.

    Args:
        score: How it is scored.
        row: A row of a node.
    """
    copies = 0 if score == "dot" else 2 * COPIES
    return int(COPIES * row.element_size() + _WORK + copies * row.nbytes)


def scorer_of(score: Score, module: LightningModule, model: ModelLayers, asked: Asked) -> Scorer:
    """Return what scores pairs.

    Args:
        score: How: by ``forward()`` of the module, or by dot products of rows.
        module: The module that the user has written.
        model: Its layers.
        asked: What batches of pairs say.
    """
    if score == "model":
        return ByModel(module, model, asked)
    return lambda senders, receivers: senders.rows.flatten(1) @ receivers.rows.flatten(1).T


class Asked(NamedTuple):
    """What batches of pairs say beside their rows.

    Attributes:
        names: The names of a batch's arrays, by the keys of its stores.
        node_types: The types of nodes.
        edge_type: The type of the links, if the graph has types.
    """

    names: NamesOfTypes
    node_types: tuple[str, ...]
    edge_type: EdgeType | None


class ByModel:
    """Scores pairs as the user's module scores the targets of a batch: it is called with a batch of these pairs.

    Args:
        module: The module.
        model: Its layers.
        asked: What batches say.
    """

    def __init__(self, module: LightningModule, model: ModelLayers, asked: Asked) -> None:
        self._module, self._owner, self._asked = module, model.owner, asked

    def __call__(self, senders: Ends, receivers: Ends) -> Tensor:
        count = len(senders.ids) * len(receivers.ids)
        found = self._module(self._batch(senders, receivers))
        if not isinstance(found, Tensor) or found.shape != (count,):
            got = f"a tensor of {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise TypeError(
                f"forward() of {type(self._module).__name__} returned {got} for the {count} pairs of a batch: it must "
                'return a score for each column of edge_label_index. Or name score="dot", dot products of rows.'
            )
        return found.view(len(senders.ids), len(receivers.ids))

    def _batch(self, senders: Ends, receivers: Ends) -> Any:
        edge_type, kinds = self._asked.edge_type, self._asked.node_types
        source, target = (0, 0) if edge_type is None else (kinds.index(edge_type[0]), kinds.index(edge_type[2]))
        of_types: list[list[Ends]] = [[] for _ in kinds]
        of_types[source].append(senders)
        of_types[target].append(receivers)
        rows: RowsOfTypes = [torch.cat([end.rows for end in ends]) if ends else None for ends in of_types]
        ids = [torch.cat([end.ids for end in ends]) if ends else None for ends in of_types]
        keys: list[Any] = [None] if edge_type is None else list(kinds)

        def seed_rows(key: object, name: str) -> Tensor | None:
            return ids[keys.index(key)] if name == "n_id" else None

        def rows_of(module: object) -> Callable[[], RowsOfTypes] | None:
            return (lambda: rows) if module is self._owner else None

        num_seeds = {key: 0 if some is None else len(some) for key, some in zip(keys, ids, strict=True)}
        first = len(senders.ids) if source == target else 0
        others = {ENDS: _pairs(len(senders.ids), len(receivers.ids), first, senders.rows.device)}
        neighbourhood = Neighbourhood(num_seeds, self._refuse, seed_rows, rows_of)
        return SeedsOnly.around(neighbourhood, self._asked.names, edge_type, others)

    def _refuse(self) -> Any:
        raise ValueError(
            f"forward() of {type(self._module).__name__} reads more of a batch than the rows of layers() and "
            'edge_label_index, and pairs have no more: let it score through_layers(self, batch), or name score="dot".'
        )


def _pairs(num_senders: int, num_receivers: int, first: int, device: torch.device) -> Tensor:
    """Return each sender with each receiver, which begin at a place of their own."""
    senders = torch.arange(num_senders, device=device).repeat_interleave(num_receivers)
    return torch.stack([senders, torch.arange(first, first + num_receivers, device=device).repeat(num_senders)])
