"""A batch of which only the rows of its seeds are there; its neighbourhood is sampled if somebody reads on.

batch.y[: batch.batch_size]   -> the seeds' rows, at once
batch.x, batch.edge_index     -> promises, of which a layer-by-layer evaluation knows what a model makes of them
batch.x.sum(), batch.blocks   -> the whole neighbourhood, as in any other batch
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_gnn_dist.batches.batch import (
    Later,
    NamesOfTypes,
    NodeStore,
    Promising,
    SampledData,
    SampledHeteroData,
    ends_of,
)
from lightning_gnn_dist.batches.one_hop import RowsOfTypes
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.block import Block

Apply = Callable[[Tensor], Tensor]
Rows = Callable[[], Tensor]
_SIZES_OF_NODES, _SIZES_OF_EDGES = ("num_sampled_nodes",), ("num_sampled_edges",)
_SIZES = {*_SIZES_OF_NODES, *_SIZES_OF_EDGES, "num_nodes"}


@dataclass(eq=False)
class Neighbourhood:
    """What a batch holds: the rows of its seeds, and its whole neighbourhood once that was asked for.

    Attributes:
        num_seeds: How many seeds the batch has, by the key of their store: their type, or None where there is one.
        make: Samples the whole neighbourhood.
        seed_rows: Returns the rows of a store's seeds of the array of a name; None if it has no row for each node.
        known_rows: Returns a function for what a module has computed for the seeds of each type, or None if that is
            not known.
        move: Copies a tensor to where the batch was brought since.
    """

    num_seeds: dict[Any, int]
    make: Callable[[], SampledData]
    seed_rows: Callable[[Any, str], Tensor | None]
    known_rows: Callable[[object], Callable[[], RowsOfTypes] | None]
    move: Apply = lambda tensor: tensor

    @cached_property
    def whole(self) -> SampledData:
        """The batch with all its neighbours."""
        batch: SampledData = self.make().apply(self.move)
        return batch

    @property
    def is_read(self) -> bool:
        """Whether somebody has asked for the whole neighbourhood, and may have written to it."""
        return "whole" in self.__dict__

    def promises(self, key: object, names: Iterable[str]) -> dict[str, Any]:
        """Return a promise for each name in the store of a key."""

        def promise(name: str) -> Any:
            def read() -> Any:
                return stores_of(self.whole)[key][name]

            def of_seeds() -> Tensor | None:
                rows = None if self.is_read or key not in self.num_seeds else self.seed_rows(key, name)
                return None if rows is None else self.move(rows)

            if name in _SIZES:
                return Later(read)
            return Promise(read, of_seeds, self.num_seeds.get(key, 0), (self, name))

        return {name: promise(name) for name in names}

    def rows_of(self, module: object) -> Callable[[], RowsOfTypes] | None:
        """Return a function for what a module has computed for the seeds of each type.

        None if that is not known, or if the batch may have changed since.
        """
        found = None if self.is_read else self.known_rows(module)
        return None if found is None else lambda: [rows if rows is None else self.move(rows) for rows in found()]


class Promise(Tensor):
    """A tensor with a row for each node of a batch that is made when it is used, however it is used.

    Its first rows are the seeds': ``promise[:batch_size]`` is had without the others, and so are its type and device.
    """

    _read: Rows
    _seed_rows: Callable[[], Tensor | None]
    _batch_size: int
    _made: Tensor | None
    origin: object  # what it is promised of: a neighbourhood and a name

    @staticmethod
    def __new__(
        cls, read: Rows, seed_rows: Callable[[], Tensor | None], batch_size: int, origin: object = None
    ) -> Promise:
        promise: Promise = Tensor._make_wrapper_subclass(cls, (0,))
        promise._read, promise._seed_rows, promise._batch_size = read, seed_rows, batch_size
        promise._made, promise.origin = None, origin
        return promise

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (func is Tensor.__getitem__ or func in _OF_ANY_ROW) and isinstance(args[0], cls):
            rows = args[0]._of_seeds(args[1] if func is Tensor.__getitem__ else slice(0))
            if rows is not None:
                return rows if func is Tensor.__getitem__ else func(rows)
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # Scripted and compiled functions come straight to this one.
        args, kwargs = tree_map(lambda item: item.read() if isinstance(item, cls) else item, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.read().__reduce_ex__(protocol)

    def read(self) -> Tensor:
        """Return the tensor, always the same one: somebody may have written to it."""
        if self._made is None:
            self._made = self._read()
        return self._made

    def _of_seeds(self, index: object) -> Tensor | None:
        """Return what an index takes from the seeds' rows; None if it may reach beyond them."""
        if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
            return None
        if self._made is not None or not isinstance(index.stop, int) or not 0 <= index.stop <= self._batch_size:
            return None
        rows = self._seed_rows()
        return None if rows is None else rows[: index.stop]


_OF_ANY_ROW: Any = {
    Tensor.device.__get__,
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_floating_point,
}


def stores_of(batch: Any) -> dict[Any, Any]:
    """The stores of a batch by their keys: of each type, or the only one, whose key is None."""
    return {store._key: store for store in [*batch.node_stores, *batch.edge_stores]}


class SeedsOnly:
    """A batch as loaders yield it, which samples the neighbourhood of its seeds when that is read."""

    __dict__: dict[str, Any]

    @classmethod
    def around(
        cls, neighbourhood: Neighbourhood, names: NamesOfTypes, seed_type: str | EdgeType | None, others: dict[str, Any]
    ) -> Any:
        """Return a batch with a promise for each name and for ``edge_index``.

        Args:
            neighbourhood: What it promises.
            names: The names of its arrays by the keys of its stores.
            seed_type: That of its seeds or targets, if the graph has types.
            others: What these have beside, as it is.
        """
        batch: Any = SeedBatch()
        if seed_type is not None:
            nodes = [kind for kind in names if isinstance(kind, str)]
            batch = SeedHeteroBatch._with_stores(nodes, [kind for kind in names if kind not in nodes], seed_type)
        num_seeds, asked = neighbourhood.num_seeds, (None,) if seed_type is None else ends_of(seed_type)
        for kind, store in stores_of(batch).items():
            sizes = [*_SIZES_OF_NODES] if kind is None or isinstance(store, NodeStore) else []
            sizes += ["num_nodes"] if isinstance(store, NodeStore) else []
            sizes += [*_SIZES_OF_EDGES, "edge_index"] if isinstance(store, Promising) else []
            store._mapping = neighbourhood.promises(kind, names[kind])
            store._mapping |= others if kind == seed_type else {}
            store._mapping |= {"batch_size": num_seeds[kind]} if kind in asked else {}
            store._mapping |= neighbourhood.promises(kind, sizes)
        if seed_type is not None:
            batch._global_store._mapping["batch_size"] = sum(num_seeds.values())
        batch.__dict__["_promised"] = neighbourhood, batch._held()
        return batch

    @property
    def neighbourhood(self) -> Neighbourhood:
        """What the batch promises."""
        found: Neighbourhood = self.__dict__["_promised"][0]
        return found

    def _held(self) -> dict[Any, dict[str, Any]]:
        return {key: dict(store._mapping) for key, store in stores_of(self).items()}

    def read(self) -> Any:
        """Sample the neighbourhood, and put it where it was promised."""
        neighbourhood, before = self.__dict__["_promised"]
        whole = stores_of(neighbourhood.whole)
        for key, store in stores_of(self).items():
            _fill(store, whole[key], before[key])
        return self

    def rows_of(self, module: object) -> Any:
        """Return what a module has computed for the seeds; None if that is not known, or of a batch since changed."""
        neighbourhood, before = self.__dict__["_promised"]
        is_same = all(_is_same(store._mapping, before[key]) for key, store in stores_of(self).items())
        rows = neighbourhood.rows_of(module) if is_same else None
        return None if rows is None else rows()

    def __deepcopy__(self, memo: Any) -> Any:
        return copy.deepcopy(self.ordinary(), memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.ordinary(),)

    def ordinary(self) -> Any:
        """Return the same batch, with all that was promised."""
        held: Any = self.read()
        batch = SampledHeteroData.like(held) if isinstance(held, SampledHeteroData) else SampledData()
        for store, made in zip(held.stores, batch.stores, strict=True):
            made._mapping |= store._mapping
            if isinstance(made, Promising):
                made._blocks, made._edge_arrays, made._num_layers = store._blocks, store._edge_arrays, store._num_layers
        return batch

    def apply(self, function: Apply, *names: str) -> Any:
        if not names:
            self.read()
        return super().apply(function, *names)  # type: ignore[misc]

    def apply_(self, function: Callable[[Tensor], Any], *names: str) -> Any:
        self.read()
        return super().apply_(function, *names)  # type: ignore[misc]

    def to(self, device: Any, *names: str, non_blocking: bool = False) -> Any:
        """Like PyG's, without reading what is promised."""
        if names or self.neighbourhood.is_read:
            return super().to(device, *names, non_blocking=non_blocking)  # type: ignore[misc]

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, non_blocking=non_blocking)

        neighbourhood, before = self.__dict__["_promised"]
        after, unchanged = replace(neighbourhood, move=lambda tensor: move(neighbourhood.move(tensor))), {}
        for key, store in stores_of(self).items():
            held, was, promises = store._mapping, before[key], after.promises(key, before[key])
            same = [name for name, value in held.items() if was.get(name) is value]
            for name, value in held.items():
                if name in same and isinstance(value, Promise | Later):
                    held[name] = promises[name]
                elif isinstance(value, Tensor):
                    held[name] = move(value)
            unchanged[key] = {name: held[name] if name in same else None for name in was}
        self.__dict__["_promised"] = after, unchanged
        return self


class SeedBatch(SeedsOnly, SampledData):
    """That of a graph without types."""

    def _found_blocks(self) -> tuple[Block, ...]:
        blocks: tuple[Block, ...] = self.read()._store.blocks_of_layers
        return blocks


class SeedHeteroBatch(SeedsOnly, SampledHeteroData):
    """That of a graph with types."""


def _fill(store: Any, whole: Any, before: dict[str, Any]) -> None:
    """Put what was promised into a store, but for what somebody has replaced since."""
    mapping = store._mapping
    edges = mapping.get("edge_index")
    has_edges = isinstance(edges, Promise) and before["edge_index"] is edges  # otherwise somebody replaced them
    for name, value in before.items():
        if mapping.get(name) is value and isinstance(value, Promise | Later):
            mapping[name] = whole._mapping[name]
    if "edge_index" not in before:
        return
    store._edge_arrays, store._num_layers = whole._edge_arrays, whole._num_layers
    if has_edges:
        store._blocks = store._blocks or whole._blocks
        if mapping.get("edge_weight") is not whole._mapping.get("edge_weight"):
            store._set_weight(mapping.get("edge_weight"))


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    if now.keys() != before.keys():
        return False
    return all(now[name] is value or isinstance(value, Later) for name, value in before.items())
