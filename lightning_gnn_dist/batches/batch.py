"""A batch: an ordinary PyG ``Data`` that builds its ``edge_index`` when it is first read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage
from torch_geometric.data.view import ItemsView, ValuesView

from lightning_gnn_dist.batches.pool import Pool, Widen, gather_rows
from lightning_gnn_dist.engine.sample import EdgesOfType
from lightning_gnn_dist.graph.typed.types import EdgeType, GraphTypes, TypeNames
from lightning_gnn_dist.sampling.block import Block, innermost, rebase

PoolOf = Callable[[str], Pool | None]
NamesOfTypes = dict[Any, list[str]]  # by the key of a store, which is None where a batch has only one
LABELS = "y"
ENDS, LABELS_OF_LINKS = "edge_label_index", "edge_label"
_ABSENT = {
    "e_id": "This batch has no e_id: the graph does not know where its edges stood in data.edge_index, for they are "
    "sorted. Graph.from_pyg(data, edge_ids=True) keeps that, in 8 bytes for each edge.",
    "input_id": "This batch has no input_id: batches of training links have none, for nobody lists the edges that a "
    "rank learns. batch.n_id[batch.edge_label_index] are the ends of its edges, by their ids in the whole graph.",
}


class Later:
    """An entry of a store that is made when it is first read."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read


class ReadsLater(BaseStorage):  # type: ignore[misc]
    """Adds to a PyG store that entries, and the input rows ``x0``, may be made when they are first read."""

    _read_inputs: Callable[[], Tensor] | None = None

    def promise_x0(self, read: Callable[[], Tensor]) -> None:
        """Let ``read`` return ``x0`` when it is first read; until then no name tells of it."""
        self._read_inputs = read

    def __getitem__(self, key: str) -> Any:
        value = self._mapping.get(key)
        if isinstance(value, Later):
            self._mapping[key] = value.read()
        elif key == "x0" and value is None and self._read_inputs is not None:
            self._mapping[key] = self._read_inputs()
        return super().__getitem__(key)


class Promising(ReadsLater):
    """Adds to a PyG store that its ``edge_index`` is a promise: it is built from the blocks when it is first read.

    The promise is the entry ``edge_index: None``, which PyG's own stores never hold.
    """

    _blocks: tuple[Block, ...] = ()
    _edge_arrays: frozenset[str] = frozenset()  # names that the graph knows
    _num_layers = 0  # how many hops have a block for a layer, the seeds' first; 0 stands for all

    def promise(self, blocks: tuple[Block, ...], num_layers: int = 0) -> None:
        """Hold these blocks, and promise an ``edge_index`` of the edges of the first one."""
        self._blocks, self._num_layers = blocks, num_layers
        self._mapping["edge_index"] = None

    @property
    def blocks_of_layers(self) -> tuple[Block, ...]:
        """A block for each layer, outermost first."""
        return innermost(self._blocks, self._num_layers)

    @property
    def is_pending(self) -> bool:
        return "edge_index" in self._mapping and self._mapping["edge_index"] is None

    @property
    def num_edges(self) -> int:
        return int(self._blocks[0].num_edges if self.is_pending else super().num_edges)

    def is_on(self, device: torch.device) -> bool:
        """Whether all tensors are on the device; False also where what it holds would have to be searched."""
        held = *self._mapping.values(), *(block.indptr for block in self._blocks[:1])
        return all(each.device == device if isinstance(each, Tensor) else _is_plain(each) for each in held)

    def __getitem__(self, key: str) -> Any:
        if key == "edge_index" and self.is_pending:
            self._mapping[key] = self._blocks[0].edge_index
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        if key == "edge_index":
            self._blocks = ()  # they describe other edges
        elif key == "edge_weight":
            self._set_weight(value)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        if key == "edge_weight":
            self._set_weight(None)

    def _set_weight(self, weight: Any) -> None:
        if self._blocks:
            first = self._blocks[0]
            weight = weight_of(weight, first.num_edges, first.dtype)
            self._blocks = rebase(self._blocks, replace(first, weight=weight, is_corrected=False))

    def get(self, key: str, value: Any = None) -> Any:
        return self[key] if key in self._mapping else value

    def values(self, *args: str) -> ValuesView:
        return ValuesView(self, *args)  # a view reads one item at a time, through __getitem__

    def items(self, *args: str) -> ItemsView:
        return ItemsView(self, *args)

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), **dict(self.items())}

    def __repr__(self) -> str:
        return repr(self.to_dict())

    def __getstate__(self) -> dict[str, Any]:
        # A view is pickled with its whole base, so only the sizes of the views are.
        sizes = [(block.num_dst, block.num_src, block.num_edges) for block in self._blocks[1:]]
        return {**super().__getstate__(), "_blocks": (self._blocks[:1], sizes)}

    def __setstate__(self, mapping: dict[str, Any]) -> None:
        outermost, sizes = mapping["_blocks"]
        blocks = *outermost, *(outermost[0].head(*size) for size in sizes)
        super().__setstate__({**mapping, "_blocks": blocks})

    def apply(self, func: Callable[[Tensor], Tensor], *args: str) -> Self:
        """Like PyG's, but keep the promise, and apply ``func`` once to the CSR that all blocks share."""
        blocks = self._blocks
        super().apply(func, *self._kept(args))
        if blocks and not args:
            outermost = blocks[0].apply(func)
            blocks = blocks if outermost is blocks[0] else rebase(blocks, outermost)
        self._blocks = blocks
        return self

    def _kept(self, names: tuple[str, ...]) -> list[str]:
        """The names, by default those of all entries, without an ``edge_index`` that is not built yet."""
        return [name for name in names or self._mapping if name != "edge_index" or not self.is_pending]

    def apply_(self, func: Callable[[Tensor], Any], *args: str) -> Self:
        super().apply_(func, *self._kept(args))
        for block in self._blocks[: 0 if args else 1]:
            block.apply(func)
        return self


class BatchStore(Promising, GlobalStorage):  # type: ignore[misc]
    """The store of a batch without types."""


class OfSeeds:
    """What every batch says of its seeds."""

    stores: list[BaseStorage]  # the first is that of the batch as a whole
    batch_size: int

    @property
    def num_targets(self) -> int:
        """The number of terms in the mean loss: pairs of nodes in a batch of links, otherwise seeds."""
        pairs = store_of_seeds(self).get(ENDS)
        return int(self.batch_size if pairs is None else pairs.shape[1])

    @property
    def is_filler(self) -> bool:
        """Whether the batch repeats seeds of its pass, only to fill the pass up, and must not count."""
        return bool(self.stores[0].get("is_filler", False))

    @is_filler.setter
    def is_filler(self, is_filler: bool) -> None:
        self.stores[0]["is_filler"] = is_filler


class SampledData(OfSeeds, Data):  # type: ignore[misc]
    """A batch as loaders yield it: its nodes and edges, the seeds first.

    Beside what PyG's ``NeighborLoader`` sets (``n_id``, ``batch_size``, ``num_sampled_nodes``,
    ``num_sampled_edges``, the graph's arrays), it has ``blocks``: one bipartite CSR per layer, outermost
    first. A module that reads only these never causes ``edge_index`` to be built.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        store = BatchStore(_parent=self)
        store._mapping = self._store._mapping
        self.__dict__["_store"] = store

    @property
    def blocks(self) -> list[Block]:
        """One block per layer, outermost first. Gone once ``edge_index`` is replaced."""
        found = self._found_blocks()
        if not found:
            raise AttributeError  # __getattr__ says why
        return list(found)

    @blocks.setter
    def blocks(self, blocks: list[Block]) -> None:
        self._store._blocks, self._store._num_layers = tuple(blocks), 0

    def _found_blocks(self) -> tuple[Block, ...]:
        blocks: tuple[Block, ...] = self._store.blocks_of_layers
        return blocks

    @property
    def has_blocks(self) -> bool:
        """Whether the batch still has its blocks."""
        return bool(self._found_blocks())

    def to(self, device: Any, *names: str, non_blocking: bool = False) -> Self:
        """Like PyG's, which takes long to walk through a batch that is there already."""
        if not names and self._store.is_on(torch.device(device)):
            return self
        moved: Self = super().to(device, *names, non_blocking=non_blocking)
        return moved

    def __getattr__(self, key: str) -> Any:
        if key == "blocks":
            raise AttributeError(
                "This batch has no blocks: they went when its edge_index was replaced, for they describe the "
                "edges that were sampled. Use edge_index, or replace it in a copy: copy.copy(batch)."
            )
        if key in _ABSENT and key not in self._store:
            raise AttributeError(_ABSENT[key])
        return super().__getattr__(key)


def in_type(batch: Any, dtype: torch.dtype | None) -> SampledData:
    """The batch with all its floating point numbers in another type; None leaves them as they are."""
    if dtype is not None:
        batch.apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        for store in batch.stores:  # several, if the batch has types
            if (blocks := getattr(store, "_blocks", ())) and blocks[0].dtype != dtype:
                store._blocks = rebase(blocks, replace(blocks[0], dtype=dtype))
    made: SampledData = batch
    return made


def names_of_types(types: GraphTypes) -> NamesOfTypes:
    """The names of a graph's arrays that batches have, and ``n_id``, by the keys of their stores."""
    nodes = {kind: [*dict.fromkeys([*arrays, "n_id"])] for kind, arrays in types.node_arrays.items()}
    edges = {kind: [*arrays] for kind, arrays in types.edge_arrays.items()}
    if types.have_names:
        return {**nodes, **edges}
    return {None: [*nodes[types.node_types[0]], *edges[types.edge_types[0]]]}


def bytes_of(batch: Any) -> int:
    """The bytes of all that a batch holds, without a promised ``edge_index``."""
    outermost: list[Block] = [block for store in batch.stores for block in getattr(store, "_blocks", ())[:1]]
    tensors = [value for store in batch.stores for value in store._mapping.values() if isinstance(value, Tensor)]
    return sum(tensor.nbytes for tensor in tensors) + sum(b.indptr.nbytes + b.indices.nbytes for b in outermost)


def device_of_batch(batch: Any) -> torch.device:
    """Where a batch is. Reads nothing that it promises."""
    seeds = getattr(batch, "seed_type", None)  # whose ids a batch has without sampling
    store = batch.node_stores[0] if seeds is None else batch[seeds if isinstance(seeds, str) else seeds[0]]
    found: torch.device = store["n_id"].device
    return found


def gathered(
    arrays: Mapping[str, Tensor],
    rows: Tensor | None,
    pool_of: PoolOf = lambda _: None,
    *,
    widen: Widen,
    num_labels: int | None = None,
    kind: str | EdgeType | None = None,
) -> dict[str, Tensor]:
    """Some rows of arrays, as a batch or one of its types has them: of ``y`` the ``num_labels`` first ones.

    Pools are named by the ``kind`` of the arrays.
    """
    found = {}
    for name, array in arrays.items():
        of = rows[:num_labels] if name == LABELS and rows is not None else rows
        wide = widen is not False if name == LABELS else widen  # a loss is taken in float32
        pool = pool_of(name if kind is None else f"{kind} {name}")
        found[name] = gather_rows(array, of, pool, widen=wide)
    return found


def blocks_of(
    rows: EdgesOfType, receivers: list[int], senders: list[int], x: Any, edge_weight: Any, *, is_corrected: bool
) -> tuple[Block, ...]:
    """The blocks of all layers over one CSR, and before them that of all rows, where no layer computes the last ones.

    Of receivers and senders there are so many up to each hop.
    """
    dtype, edges = dtype_of(x), list(accumulate(rows.num_sampled))
    weight = weight_of(edge_weight, edges[-1], dtype)
    outermost = Block(rows.indptr.numel() - 1, senders[-1], rows.indptr, rows.indices, weight, dtype, is_corrected)
    has_more_rows = outermost.num_dst > receivers[-2]
    if has_more_rows:
        edges[-1] = int(outermost.indptr[receivers[-2]])
    inner = range(len(edges) - 1 if has_more_rows else len(edges) - 2, -1, -1)
    return outermost, *(outermost.head(receivers[hop], senders[hop + 1], edges[hop]) for hop in inner)


def dtype_of(x: Any) -> torch.dtype:
    """The type of a matrix's values beside these features."""
    return x.dtype if isinstance(x, Tensor) and x.is_floating_point() else torch.float32


def _is_plain(value: Any) -> bool:
    """Whether a value is a number or a text, or a list of these."""
    return all(isinstance(each, int | float | str | None) for each in (value if isinstance(value, list) else [value]))


def weight_of(edge_weight: Any, num_edges: int, dtype: torch.dtype) -> Tensor | None:
    """The values of a block's matrix if ``edge_weight`` has one number per edge, otherwise None."""
    if not isinstance(edge_weight, Tensor) or edge_weight.numel() != num_edges:
        return None
    return edge_weight.reshape(-1).to(dtype)


class EdgeStore(Promising, EdgeStorage):  # type: ignore[misc]
    """The store of one edge type of a batch."""


class NodeStore(ReadsLater, NodeStorage):  # type: ignore[misc]
    """The store of one node type of a batch."""


class SampledHeteroData(OfSeeds, HeteroData):  # type: ignore[misc]
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
