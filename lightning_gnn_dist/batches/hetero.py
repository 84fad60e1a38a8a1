"""A batch of a typed graph: an ordinary PyG ``HeteroData`` that builds each ``edge_index`` when it is first read."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import EdgeStorage, NodeStorage

from lightning_gnn_dist.batches.batch import LABELS, PoolOf, Promising, blocks_of, gathered
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.engine.temporal.hops import SEED_TIME
from lightning_gnn_dist.engine.typed.apart import Apart, places_of, take_apart
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType, TypeNames
from lightning_gnn_dist.sampling.block import Block

_ENDS, _LABELS_OF_LINKS = "edge_label_index", "edge_label"


class EdgeStore(Promising, EdgeStorage):  # type: ignore[misc]
    """The store of one edge type of a batch."""


class SampledHeteroData(HeteroData):  # type: ignore[misc]
    """A batch of a typed graph as loaders yield it. The seeds are the first nodes of their type, ``seed_type``.

    In a batch of links ``seed_type`` is an edge type: ``batch[seed_type]`` has ``edge_label_index`` and ``edge_label``,
    and the ends of all targets are the first ``batch[node_type].batch_size`` nodes of each of its two node types.

    Beside what PyG's ``NeighborLoader`` sets for each type (``n_id``, ids in the type; ``num_sampled_nodes``,
    ``num_sampled_edges``; the graph's arrays), it has ``blocks``: for each layer, outermost first, a dict with a
    bipartite CSR for each edge type. Nodes of a type are in the order of hops, so a layer reads, for each edge type
    and its block, as ``conv((x[source], x[target][:block.num_dst]), block.adj)``.
    """

    @property
    def seed_type(self) -> str | EdgeType:
        """The node type of the seeds; in a batch of links the edge type of its targets."""
        found: str | EdgeType = self.__dict__["_seed_type"]
        return found

    @property
    def n_id(self) -> Tensor:
        """The ids of the nodes of the seeds' type, the seeds first."""
        if len(kinds := set(_ends_of(self.seed_type))) > 1:
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
        names = [n for n in asked.keys() if n.startswith(_LABELS_OF_LINKS) and n != _ENDS]  # noqa: SIM118
        of_targets = {name: asked.pop(name) for name in names}
        for kind in _ends_of(self.seed_type):
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
            source, target = _ends_of(self.seed_type)
            raise AttributeError(
                f"This batch has seeds of two types, and no n_id of its own: batch[{source!r}].n_id and "
                f"batch[{target!r}].n_id are the ids of its nodes, the ends of its targets first."
            )
        return super().__getattr__(key)


class TypedArrays(NamedTuple):
    """A batch by types, and the arrays that it takes rows of.

    Attributes:
        types: The types of the graph.
        apart: The batch by types.
        node_arrays: For each node type its arrays, by name.
        edge_arrays: For each edge type its arrays, by name.
        places: The rows that are taken, of each edge type with arrays, and those of each node type that ``apart`` has.
            None where all arrays are the batch's own already: then labels are as it is to have them.
        coverage: The coverage of every node of a part, if it has one.
    """

    types: TypeNames
    apart: Apart
    node_arrays: Mapping[str, Mapping[str, Tensor]]
    edge_arrays: Mapping[EdgeType, Mapping[str, Tensor]]
    places: Mapping[EdgeType, Tensor] | None = None
    coverage: Tensor | None = None

    @classmethod
    def of(cls, graph: Graph, sample: Sample) -> TypedArrays:
        """The batch of a sample of a typed graph, and the graph's arrays."""
        types = graph.types
        assert types is not None
        apart = take_apart(graph, sample, with_ids=any(types.edge_arrays.values()))
        places = {
            kind: places_of(graph, number, rows.edge_ids)
            for number, (kind, rows) in enumerate(zip(types.edge_types, apart.rows, strict=True))
            if types.edge_arrays[kind]
        }
        coverage = graph.__dict__.get("node_arrays", {}).get("coverage")
        return cls(types, apart, types.node_arrays, types.edge_arrays, places, coverage)


def assemble_typed(
    graph: Graph | TypedArrays,
    sample: Sample,
    pool_of: PoolOf = lambda _: None,
    *,
    widen: Widen = True,
    all_labels: bool = True,
) -> SampledHeteroData:
    """Make a batch of a sample of a typed graph, as :func:`~lightning_gnn_dist.batches.batch.assemble` does.

    With ``all_labels=False`` there is a ``y`` of the seeds alone. A batch may have all its arrays in place of a graph.
    """
    source, batch = graph if isinstance(graph, TypedArrays) else TypedArrays.of(graph, sample), SampledHeteroData()
    types, apart = source.types, source.apart
    seed_type = _seed_type(types, apart, sample)
    batch.__dict__["_seed_type"] = seed_type
    batch.batch_size = sample.num_sampled_nodes[0]
    for kind, ids, per_hop in zip(types.node_types, apart.nodes, apart.num_sampled, strict=True):
        store = batch._node_store_dict[kind] = NodeStorage(_parent=batch, _key=kind)
        arrays, is_asked = source.node_arrays[kind], kind in _ends_of(seed_type)
        if not all_labels and not is_asked:
            arrays = {name: array for name, array in arrays.items() if name != LABELS}
        num_labels = None if all_labels else per_hop[0]
        taken = None if source.places is None else ids
        of_type = _of_type(pool_of, kind)
        store._mapping |= gathered(arrays, taken, of_type, widen=widen, num_labels=num_labels)
        store["n_id"] = store.get("n_id", ids)
        store["num_nodes"], store["num_sampled_nodes"] = ids.numel(), per_hop
        if is_asked:
            store["batch_size"] = per_hop[0]
    if source.coverage is not None:
        batch.coverage = source.coverage[sample.nodes[: batch.batch_size]]
    _add_edges(batch, source, pool_of, widen=widen)
    _add_extra(batch, types, sample, apart)
    return batch


def _add_extra(batch: SampledHeteroData, types: TypeNames, sample: Sample, apart: Apart) -> None:
    """Give each type its rows of what the sampler says of all nodes, and the seeds or targets what it says of them."""
    for name, array in sample.extra.items():
        if name == SEED_TIME or name.startswith(_LABELS_OF_LINKS):
            batch[batch.seed_type][name] = _in_types(apart, array) if name == _ENDS else array
            continue
        for number, kind in enumerate(types.node_types):
            batch._node_store_dict[kind][name] = array[apart.kinds == number]


def _add_edges(batch: SampledHeteroData, source: TypedArrays, pool_of: PoolOf, *, widen: Widen) -> None:
    types, apart = source.types, source.apart
    upto = {kind: list(accumulate(counts)) for kind, counts in zip(types.node_types, apart.num_sampled, strict=True)}
    for kind, rows in zip(types.edge_types, apart.rows, strict=True):
        store = batch._edge_store_dict[kind] = EdgeStore(_parent=batch, _key=kind)
        if arrays := source.edge_arrays[kind]:
            taken = None if source.places is None else source.places[kind]
            store._mapping |= gathered(arrays, taken, _of_type(pool_of, kind), widen=widen)
        store["num_sampled_edges"] = rows.num_sampled
        csr, x = (rows.indptr, rows.indices), batch._node_store_dict[kind[0]].get("x")
        ends = upto[kind[2]], upto[kind[0]]
        store.promise(blocks_of(*ends, rows.num_sampled, csr, x, store.get("edge_weight"), is_corrected=False))


def _of_type(pool_of: PoolOf, kind: Any) -> PoolOf:
    return lambda name: pool_of(f"{kind} {name}")


def _in_types(apart: Apart, ends: Tensor) -> Tensor:
    """Positions of nodes in a batch as positions among the batch's nodes of their type."""
    kinds = apart.kinds[: int(ends.max()) + 1 if ends.numel() else 0]
    places = torch.empty(kinds.numel(), dtype=torch.int64)
    for number in kinds.unique():
        is_of = kinds == number
        places[is_of] = torch.arange(int(is_of.sum()))
    return places[ends]


def _ends_of(seed_type: str | EdgeType) -> tuple[str, ...]:
    """The node types of seeds."""
    return (seed_type,) if isinstance(seed_type, str) else (seed_type[0], seed_type[2])


def _seed_type(types: TypeNames, apart: Apart, sample: Sample) -> str | EdgeType:
    """The type of the seeds; of a batch without any, that of the training nodes."""
    if sample.target_type is not None:
        return types.edge_types[sample.target_type]
    found = [kind for kind, counts in zip(types.node_types, apart.num_sampled, strict=True) if counts[0]]
    if len(found) > 1:
        raise ValueError(f"The seeds of a batch must be nodes of one type, got some of {found}.")
    return found[0] if found else types.seed_type()
