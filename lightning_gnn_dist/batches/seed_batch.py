"""A batch of which only the rows of its seeds are there; its neighbourhood is sampled if somebody reads on.

batch.y[: batch.batch_size]   -> the seeds' rows, at once
batch.x, batch.edge_index     -> promises, of which a layer-by-layer evaluation knows what a model makes of them
batch.x.sum(), batch.blocks   -> the whole neighbourhood, as in any other batch
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_gnn_dist.batches.batch import BatchStore, SampledData
from lightning_gnn_dist.sampling.block import Block

Apply = Callable[[Tensor], Tensor]
Rows = Callable[[], Tensor]
_SIZES = ("num_sampled_nodes", "num_sampled_edges")


class Neighbourhood:
    """What a batch holds: the rows of its seeds, and its whole neighbourhood once that was asked for.

    Args:
        num_seeds: How many seeds the batch has.
        make: Samples the whole neighbourhood.
        seed_rows: Returns the seeds' rows of the array of a name, or None if it has no row for each node.
        rows_of: Returns a function for what a module has computed for the seeds, or None if that is not known.
        moves: The copies to another device that were made of the batch's tensors since.
    """

    def __init__(
        self,
        num_seeds: int,
        make: Callable[[], SampledData],
        seed_rows: Callable[[str], Tensor | None],
        rows_of: Callable[[object], Rows | None],
        moves: tuple[Apply, ...] = (),
    ) -> None:
        self.num_seeds = num_seeds
        self._make, self._seed_rows, self._rows_of, self._moves = make, seed_rows, rows_of, moves

    @cached_property
    def whole(self) -> SampledData:
        """The batch with all its neighbours."""
        batch = self._make()
        for move in self._moves:
            batch = batch.apply(move)
        return batch

    @property
    def is_read(self) -> bool:
        """Whether somebody has asked for the whole neighbourhood, and may have written to it."""
        return "whole" in self.__dict__

    def promises(self, names: Iterable[str]) -> dict[str, Any]:
        """Return a promise for each name."""
        return {name: _Sizes(self, name) if name in _SIZES else self._promise(name) for name in names}

    def rows_of(self, module: object) -> Rows | None:
        """Return a function for what a module has computed for the seeds.

        None if that is not known, or if the batch may have changed since.
        """
        found = None if self.is_read else self._rows_of(module)
        return None if found is None else lambda: self._moved(found())

    def then(self, move: Apply) -> Neighbourhood:
        """Return the same neighbourhood on another device."""
        return Neighbourhood(self.num_seeds, self._make, self._seed_rows, self._rows_of, (*self._moves, move))

    def _promise(self, name: str) -> Promise:
        def of_seeds() -> Tensor | None:
            rows = None if self.is_read else self._seed_rows(name)
            return None if rows is None else self._moved(rows)

        return Promise(lambda: self.whole[name], of_seeds, self.num_seeds, (self, name))

    def _moved(self, rows: Tensor) -> Tensor:
        for move in self._moves:
            rows = move(rows)
        return rows


class _Sizes:
    """A promise of a list of numbers, one for each hop."""

    def __init__(self, neighbourhood: Neighbourhood, name: str) -> None:
        self.read: Callable[[], list[int]] = lambda: neighbourhood.whole[name]


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
        cls,
        read: Rows,
        seed_rows: Callable[[], Tensor | None],
        batch_size: int,
        origin: object = None,
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


class SeedStore(BatchStore):
    """A store that samples the neighbourhood when the sizes of its hops are read."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        if isinstance(value, _Sizes):
            value = self._mapping[key] = value.read()
        return value


class SeedBatch(SampledData):
    """A batch as loaders yield it, which samples the neighbourhood of its seeds when that is read."""

    @classmethod
    def around(cls, neighbourhood: Neighbourhood, names: Iterable[str], **others: Any) -> SeedBatch:
        """Return a batch with a promise for each name and for ``edge_index``, and ``others`` as they are."""
        batch, store = cls(), SeedStore()
        given = others | {"batch_size": neighbourhood.num_seeds}
        store._mapping = neighbourhood.promises(names) | given | neighbourhood.promises([*_SIZES, "edge_index"])
        batch.__dict__.update(_store=store, _promised=(neighbourhood, dict(store._mapping)))
        store._parent = batch
        return batch

    @property
    def neighbourhood(self) -> Neighbourhood:
        """What the batch promises."""
        found: Neighbourhood = self.__dict__["_promised"][0]
        return found

    def read(self) -> SeedBatch:
        """Sample the neighbourhood, and put it where it was promised."""
        (neighbourhood, before), store = self.__dict__["_promised"], self._store
        mapping, whole = store._mapping, neighbourhood.whole._store
        edges = mapping.get("edge_index")
        has_edges = isinstance(edges, Promise) and before["edge_index"] is edges  # otherwise somebody replaced them
        for name, value in before.items():
            if mapping.get(name) is value and isinstance(value, Promise | _Sizes):
                mapping[name] = whole._mapping[name]
        store._edge_arrays, store._num_layers = whole._edge_arrays, whole._num_layers
        if has_edges:
            store._blocks = store._blocks or whole._blocks
            if mapping.get("edge_weight") is not whole._mapping.get("edge_weight"):
                store._set_weight(mapping.get("edge_weight"))
        return self

    def ordinary(self) -> SampledData:
        """Return the same batch, with all that was promised."""
        batch, store = SampledData(), self.read()._store
        batch._store._blocks, batch._store._edge_arrays = store._blocks, store._edge_arrays
        batch._store._num_layers = store._num_layers
        batch._store._mapping |= store._mapping
        return batch

    def __deepcopy__(self, memo: Any) -> SampledData:
        return copy.deepcopy(self.ordinary(), memo)

    def __reduce__(self) -> Any:
        return copy.copy, (self.ordinary(),)

    def _found_blocks(self) -> tuple[Block, ...]:
        blocks: tuple[Block, ...] = self.read()._store.blocks_of_layers
        return blocks

    def rows_of(self, module: object) -> Tensor | None:
        """Return what a module has computed for the seeds; None if that is not known, or of a batch since changed."""
        neighbourhood, before = self.__dict__["_promised"]
        now = self._store._mapping
        is_same = now.keys() == before.keys() and all(
            now[name] is value or isinstance(value, _Sizes) for name, value in before.items()
        )
        rows = neighbourhood.rows_of(module) if is_same else None
        return None if rows is None else rows()

    def apply(self, function: Apply, *names: str) -> SampledData:
        if not names:
            self.read()
        applied: SampledData = super().apply(function, *names)
        return applied

    def apply_(self, function: Callable[[Tensor], Any], *names: str) -> SampledData:
        applied: SampledData = super(SeedBatch, self.read()).apply_(function, *names)
        return applied

    def to(self, device: Any, *names: str, non_blocking: bool = False) -> SampledData:
        """Like PyG's, without reading what is promised."""
        if names or self.neighbourhood.is_read:
            moved: SampledData = super().to(device, *names, non_blocking=non_blocking)
            return moved

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, non_blocking=non_blocking)

        (neighbourhood, before), mapping = self.__dict__["_promised"], self._store._mapping
        after = neighbourhood.then(move)
        promises, unchanged = after.promises(before), dict[str, Any]()
        for name, value in mapping.items():
            was = before.get(name)
            if was is value and isinstance(value, Promise | _Sizes):
                mapping[name] = promises[name]
            elif isinstance(value, Tensor):
                mapping[name] = move(value)
            if was is value:
                unchanged[name] = mapping[name]
        self.__dict__["_promised"] = after, {name: unchanged.get(name) for name in before}
        return self
