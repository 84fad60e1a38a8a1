"""A batch of a typed graph: an ordinary PyG ``HeteroData`` that builds each ``edge_index`` when it is first read."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, Self

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from lightning_gnn_dist.batches.batch import LABELS, Promising, WithInputs
from lightning_gnn_dist.graph.typed.names import EdgeType, TypeNames
from lightning_gnn_dist.sampling.block import Block

ENDS, LABELS_OF_LINKS = "edge_label_index", "edge_label"


class EdgeStore(Promising, EdgeStorage):  # type: ignore[misc]
    """The store of one edge type of a batch."""


class NodeStore(WithInputs, NodeStorage):  # type: ignore[misc]
    """The store of one node type of a batch."""


class SampledHeteroData(HeteroData):  # type: ignore[misc]
    """A batch of a typed graph as loaders yield it. The seeds are the first nodes of their type, ``seed_type``.

    In a batch of links ``seed_type`` is an edge type: ``batch[seed_type]`` has ``edge_label_index`` and ``edge_label``,
    and the ends of all targets are the first ``batch[node_type].batch_size`` nodes of each of its two node types.

    Beside what PyG's ``NeighborLoader`` sets for each type (``n_id``, ids in the type; ``num_sampled_nodes``,
    ``num_sampled_edges``; the graph's arrays), it has ``blocks``: for each layer, outermost first, a dict with a
    bipartite CSR for each edge type. Nodes of a type are in the order of hops, so a layer reads, for each edge type
    and its block, as ``conv((x[source], x[target][:block.num_dst]), block.adj)``.
    """

    @classmethod
    def of(cls, types: TypeNames, seed_type: str | EdgeType) -> Self:
        """Return an empty batch with a store for each type."""
        return cls._with_stores(types.node_types, types.edge_types, seed_type)

    @classmethod
    def like(cls, batch: SampledHeteroData) -> Self:
        """Return an empty batch with the stores of another one."""
        return cls._with_stores(batch._node_store_dict, batch._edge_store_dict, batch.seed_type)

    @classmethod
    def _with_stores(cls, node_types: Iterable[str], edge_types: Iterable[EdgeType], seed_type: str | EdgeType) -> Self:
        batch = cls()
        batch.__dict__["_seed_type"] = seed_type
        for kind in node_types:
            batch._node_store_dict[kind] = NodeStore(_parent=batch, _key=kind)
        for edge_type in edge_types:
            batch._edge_store_dict[edge_type] = EdgeStore(_parent=batch, _key=edge_type)
        return batch

    @property
    def seed_type(self) -> str | EdgeType:
        """The node type of the seeds; in a batch of links the edge type of its targets."""
        found: str | EdgeType = self.__dict__["_seed_type"]
        return found

    @property
    def n_id(self) -> Tensor:
        """The ids of the nodes of the seeds' type, the seeds first."""
        if len(kinds := set(ends_of(self.seed_type))) > 1:
            raise AttributeError  # __getattr__ says why
        ids: Tensor = self[kinds.pop()].n_id
        return ids

    @property
    def blocks(self) -> list[dict[EdgeType, Block]]:
        """For each layer, outermost first, a block for each edge type. Gone once an ``edge_index`` is replaced."""
        stores = self.edge_items()
        if not all(getattr(store, "_blocks", ()) for _, store in stores):
            raise AttributeError  # __getattr__ says why
        kinds, blocks = [kind for kind, _ in stores], [store.blocks_of_layers for _, store in stores]
        return [dict(zip(kinds, of_layer, strict=True)) for of_layer in zip(*blocks, strict=True)]

    @property
    def num_targets(self) -> int:
        """The number of terms in the mean loss: pairs of nodes in a batch of links, otherwise seeds."""
        if isinstance(self.seed_type, str):
            return int(self.batch_size)
        return int(self[self.seed_type].edge_label_index.shape[1])

    @property
    def is_filler(self) -> bool:
        """Whether the batch repeats seeds of its pass, only to fill the pass up, and must not count."""
        return bool(self._global_store.get("is_filler", False))

    def to_homogeneous(self, *args: Any, **kwargs: Any) -> Data:
        """As PyG does, with a label for every node: -1, or NaN, for those that are no seeds."""
        whole = copy.copy(self)
        asked = whole[self.seed_type]
        asked.pop("input_id", None)  # of seeds alone
        # PyG would take these for arrays of all edges.
        names = [n for n in asked.keys() if n.startswith(LABELS_OF_LINKS) and n != ENDS]  # noqa: SIM118
        of_targets = {name: asked.pop(name) for name in names}
        for kind in ends_of(self.seed_type):
            seeds = whole[kind]
            labels = seeds.get(LABELS)
            if labels is not None and len(labels) < seeds.num_nodes:
                unknown, missing = float("nan") if labels.is_floating_point() else -1, seeds.num_nodes - len(labels)
                seeds[LABELS] = torch.cat([labels, labels.new_full((missing, *labels.shape[1:]), unknown)])
        data = HeteroData.to_homogeneous(whole, *args, **kwargs)
        for name, rows in of_targets.items():
            data[name] = rows
        return data

    def __getattr__(self, key: str) -> Any:
        if key == "blocks":
            gone = [kind for kind, store in self.edge_items() if not getattr(store, "_blocks", ())]
            raise AttributeError(
                f"This batch has no blocks: they went when its edge_index of {gone[0]} was replaced, for they describe "
                "the edges that were sampled. Use edge_index, or replace it in a copy: copy.copy(batch)."
            )
        if key == "n_id" and not isinstance(self.seed_type, str):
            source, target = ends_of(self.seed_type)
            raise AttributeError(
                f"This batch has seeds of two types, and no n_id of its own: batch[{source!r}].n_id and "
                f"batch[{target!r}].n_id are the ids of its nodes, the ends of its targets first."
            )
        return super().__getattr__(key)


def store_of_seeds(batch: Any) -> Any:
    """What a batch says of its seeds is written here: into the store of their type, or the only one."""
    return batch[batch.seed_type] if isinstance(batch, SampledHeteroData) else batch._store


def ends_of(seed_type: str | EdgeType) -> tuple[str, ...]:
    """The node types of seeds."""
    return (seed_type,) if isinstance(seed_type, str) else (seed_type[0], seed_type[2])
