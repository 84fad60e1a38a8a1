"""A batch of which only the rows of its seeds are there; its neighbourhood is sampled if somebody reads on.

batch.y[: batch.batch_size]   -> the seeds' rows, at once
batch.x, batch.edge_index     -> promises, of which a layer-by-layer evaluation knows what a model makes of them
batch.x.sum(), batch.blocks   -> the whole neighbourhood, as in any other batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.sampling.block import Block

Apply = Callable[[Tensor], Tensor]


class Neighbourhood:
    """What a batch holds: the rows of its seeds, and its whole neighbourhood once that was asked for.

    Args:
        num_seeds: How many seeds the batch has.
        make: Samples the whole neighbourhood.
        seed_rows: Returns the seeds' rows of the array of a name, or None if it has no row for each node.
        rows_of: Returns what a module has computed for the seeds, or None if that is not known.
        functions: What was applied to the tensors of the batch since, such as a copy to a device.
    """

    def __init__(
        self,
        num_seeds: int,
        make: Callable[[], SampledData],
        seed_rows: Callable[[str], Tensor | None],
        rows_of: Callable[[object], Tensor | None],
        functions: tuple[Apply, ...] = (),
    ) -> None:
        self.num_seeds = num_seeds
        self._make, self._seed_rows, self._rows_of, self._functions = make, seed_rows, rows_of, functions

    @cached_property
    def whole(self) -> SampledData:
        """The batch with all its neighbours."""
        batch = self._make()
        for function in self._functions:
            batch = batch.apply(function)
        return batch

    @property
    def is_read(self) -> bool:
        """Whether somebody has asked for the whole neighbourhood, and may have written to it."""
        return "whole" in self.__dict__

    def promise(self, name: str) -> Promise:
        """Return a promise of an array."""
        of_seeds = partial(self._seed_rows, name)
        return Promise(lambda: self.whole[name], lambda: self._applied(of_seeds()), self.num_seeds, (self, name))

    def rows_of(self, module: object) -> Tensor | None:
        """Return what a module has computed for the seeds; None if that is not known, or of a batch since changed."""
        return None if self.is_read else self._applied(self._rows_of(module))

    def then(self, function: Apply) -> Neighbourhood:
        """Return the same neighbourhood with a function applied to its tensors."""
        return Neighbourhood(self.num_seeds, self._make, self._seed_rows, self._rows_of, (*self._functions, function))

    def _applied(self, rows: Tensor | None) -> Tensor | None:
        for function in self._functions:
            rows = None if rows is None else function(rows)
        return rows


class Promise(Tensor):
    """A tensor with a row for each node of a batch that is made when it is used, however it is used.

    Its first rows are the seeds': ``promise[:batch_size]`` is had without the others.
    """

    _read: Callable[[], Tensor]
    _seed_rows: Callable[[], Tensor | None]
    _batch_size: int
    origin: object  # what it is promised of: a neighbourhood and a name

    @staticmethod
    def __new__(
        cls,
        read: Callable[[], Tensor],
        seed_rows: Callable[[], Tensor | None],
        batch_size: int,
        origin: object = None,
    ) -> Promise:
        promise: Promise = torch.empty(0).as_subclass(cls)
        promise._read, promise._seed_rows, promise._batch_size = read, seed_rows, batch_size
        promise.origin = origin
        return promise

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__ and isinstance(args[0], cls):
            rows = args[0]._of_seeds(args[1])
            if rows is not None:
                return rows
        args, kwargs = tree_map(lambda item: item._read() if isinstance(item, cls) else item, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().__reduce_ex__(protocol)

    def _of_seeds(self, index: object) -> Tensor | None:
        """Return what an index takes from the seeds' rows; None if it may reach beyond them."""
        if not isinstance(index, slice) or index.start not in (None, 0) or index.step not in (None, 1):
            return None
        if not isinstance(index.stop, int) or not 0 <= index.stop <= self._batch_size:
            return None
        rows = self._seed_rows()
        return None if rows is None else rows[: index.stop]


class SeedBatch(SampledData):
    """A batch as loaders yield it, which samples the neighbourhood of its seeds when that is read."""

    @classmethod
    def around(cls, neighbourhood: Neighbourhood, names: Iterable[str], **others: Any) -> SeedBatch:
        """Return a batch with a promise for each name and for ``edge_index``, and ``others`` as they are."""
        batch = cls()
        mapping = batch._store._mapping
        mapping |= {name: neighbourhood.promise(name) for name in [*names, "edge_index"]}
        mapping |= others | {"batch_size": neighbourhood.num_seeds}
        batch.__dict__["_promised"] = neighbourhood, dict(mapping)
        return batch

    @property
    def neighbourhood(self) -> Neighbourhood:
        """What the batch promises."""
        found: Neighbourhood = self.__dict__["_promised"][0]
        return found

    def read(self) -> SeedBatch:
        """Sample the neighbourhood, and put it where it was promised."""
        whole, mapping = self.neighbourhood.whole, self._store._mapping
        if isinstance(mapping.get("edge_index"), Promise):
            for name, value in whole._store._mapping.items():
                if isinstance(mapping.get(name), Promise | None):
                    mapping[name] = value
            self._store._blocks = whole._store._blocks
        return self

    def _found_blocks(self) -> tuple[Block, ...]:
        blocks: tuple[Block, ...] = self.read()._store._blocks
        return blocks

    @property
    def num_sampled_nodes(self) -> list[int]:
        """The number of nodes that each hop adds."""
        found: list[int] = self.neighbourhood.whole.num_sampled_nodes
        return found

    @property
    def num_sampled_edges(self) -> list[int]:
        """The number of edges that each hop adds."""
        found: list[int] = self.neighbourhood.whole.num_sampled_edges
        return found

    def rows_of(self, module: object) -> Tensor | None:
        """Return what a module has computed for the seeds; None if that is not known, or of a batch since changed."""
        neighbourhood, before = self.__dict__["_promised"]
        now = self._store._mapping
        is_same = all(now.get(name) is value for name, value in before.items())
        return neighbourhood.rows_of(module) if is_same else None

    def apply(self, function: Apply, *names: str) -> SeedBatch:
        """Like PyG's, without reading what is promised."""
        if names:
            applied: SeedBatch = super().apply(function, *names)
            return applied
        (neighbourhood, before), mapping = self.__dict__["_promised"], self._store._mapping
        after, unchanged = neighbourhood.then(function), dict[str, Any]()
        for name, value in mapping.items():
            if isinstance(value, Promise) and before.get(name) is value:
                mapping[name] = after.promise(name)
            elif isinstance(value, Tensor):
                mapping[name] = function(value)
            if before.get(name) is value:
                unchanged[name] = mapping[name]
        self.__dict__["_promised"] = after, {name: unchanged.get(name) for name in before}
        return self
