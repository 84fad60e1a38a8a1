"""Batches of a part whose layers run with rows that other ranks compute, in every step or at meetings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_gnn_dist.batches.batch import EdgeStore, SampledData, SampledHeteroData
from lightning_gnn_dist.batches.one_hop import OfPart
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.rows import Lookup, edge_positions
from lightning_gnn_dist.homes.access import Owners
from lightning_gnn_dist.layers.layer_pass import GraphNodes, Ids, ids_of
from lightning_gnn_dist.layers.through_layers import has_layers, norm_of_all_rows
from lightning_gnn_dist.sampling.block import Block

Run: TypeAlias = Callable[["RunsLayers", Sequence[Callable[[Any], Any]]], Any]

_HIDDEN = ("edge_index", "edge_index_dict", "blocks", "adj_t", "adj_t_dict")
_WHY = (
    "This batch has no {key}: with boundary=Exchange() ranks send each other rows between the layers, and with "
    "boundary=History() at meetings. Define layers(), and let forward() return through_layers(self, batch); for one of "
    "PyG's models, layers() returns layers_of(self.gnn). Within a layer its batch has edges, which it may change."
)


class PartNodes(GraphNodes):
    """The own nodes of a part. Nodes are told by their ids in the whole graph.

    Args:
        part: The rank's own nodes, and all others that send to them.
        owners: The ids of all of these in the whole graph, and the rank that owns each.
        num_ranks: How many ranks own nodes.
        options: What :class:`GraphNodes` take.
    """

    def __init__(self, part: Graph, owners: Owners, num_ranks: int, **options: Any) -> None:
        super().__init__(part, **options)
        self._owners, self._num_ranks, self._find = owners, num_ranks, Lookup(owners.ids)

    def by_owner(self, nodes: Tensor) -> list[Tensor]:
        ranks = self._owners.ranks[self.rows_at(nodes)]
        return [nodes[ranks == rank] for rank in range(self._num_ranks)]

    def senders(self, nodes: Ids) -> Tensor:
        edges = edge_positions(self.rows.indptr, self.rows_at(nodes))
        senders = self.rows.indices[edges].to(torch.int64).unique()
        found: Tensor = torch.cat([ids_of(nodes), self._owners.ids[senders]]).unique()
        return found

    def rows_at(self, nodes: Ids) -> Tensor:
        return self._find(ids_of(nodes))[0]

    def _ids(self, of_types: list[Tensor]) -> list[Tensor]:
        return [self._owners.ids[at] for at in super()._ids(of_types)]


class RunsLayers(OfPart):
    """Nodes that a rank computes rows for, the seeds first, and senders among other ranks' nodes.

    Its edges are not handed out: a layer that ran on them all at once would take rows for granted that other ranks
    compute.
    """

    __dict__: dict[str, Any]
    node_stores: list[Any]
    edge_stores: list[Any]

    def through(self, layers: Sequence[Callable[[Any], Any]]) -> Any:
        return self.__dict__["_run"](self, layers)

    @property
    def outermost(self) -> list[Block]:
        """The edges of each type that the first layer computes on."""
        return [store._blocks[0] for store in self.edge_stores]

    def __getattr__(self, key: str) -> Any:
        if key in _HIDDEN:
            raise AttributeError(_WHY.format(key=key))
        return super().__getattr__(key)  # type: ignore[misc]


class PartBatch(RunsLayers, SampledData):
    """That of a graph without types."""

    @property
    def edge_index(self) -> Any:
        raise AttributeError  # __getattr__ says why

    def _found_blocks(self) -> tuple[Block, ...]:
        return ()


class HiddenEdges(EdgeStore):
    """The edges of one type, of which only the layers see some."""

    @property
    def num_edges(self) -> int:
        return int(self._blocks[0].num_edges)

    def __getitem__(self, key: str) -> Any:
        if key in _HIDDEN:
            raise AttributeError(_WHY.format(key=key))
        return super().__getitem__(key)


class PartHeteroBatch(RunsLayers, SampledHeteroData):
    """That of a graph with types."""

    @property
    def blocks(self) -> Any:
        raise AttributeError  # __getattr__ says why


def part_batch_of(batch: Any, run: Run) -> Any:
    """The batch with what runs layers on it."""
    kind = PartBatch if isinstance(batch, SampledData) else PartHeteroBatch
    part: Any = kind.__new__(kind)
    part.__dict__.update(copy.copy(batch).__dict__, _run=run)
    if isinstance(batch, SampledData):
        part._store._parent = part
        return part
    for key, store in part._edge_store_dict.items():
        hidden = part._edge_store_dict[key] = HiddenEdges(_parent=part, _key=key)
        hidden.__dict__.update({name: value for name, value in store.__dict__.items() if name != "_parent"})
        hidden._mapping.pop("edge_index", None)
    for store in part.stores:
        store._parent = part
    return part


def norm_of_batch(module: nn.Module) -> str | None:
    """Return the name and type of a layer that normalises by all rows that it is given, or None."""
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            return f"{name} ({type(child).__name__})"
    return norm_of_all_rows(module)


def against_running_layers(module: nn.Module) -> str | None:
    """Return why a boundary cannot run the layers of a module for it, and what to do; None where it can."""
    if not has_layers(module):
        return (
            f"{type(module).__name__} does not say what its layers are: define layers(), and let forward() return "
            "through_layers(self, batch). For one of PyG's models, layers() returns layers_of(self.gnn). "
            "Any module trains with boundary=Halo()."
        )
    if (norm := norm_of_batch(module)) is None:
        return None
    return (
        f"{norm} normalises by the rows of all nodes at once, and a rank has its own: use torch.nn.LayerNorm (in "
        'PyG\'s models norm="LayerNorm", norm_kwargs={"mode": "node"}), or boundary=Halo().'
    )
