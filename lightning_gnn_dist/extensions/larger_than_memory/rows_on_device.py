"""Batches whose wide rows lie on a device where they are read most, and in RAM otherwise.

    ids of a bulk, in RAM -> which rows are held, which are missing -> missing ones through page-locked memory
    -> on the device: held.index_select(slots), then the missing rows are written to their places

What is held is decided on the host, so the device is never waited for, but once a bulk for ids that were drawn there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.batches.batch import LABELS, SampledData
from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import Content, Taken, made_of
from lightning_gnn_dist.engine.lending import sent
from lightning_gnn_dist.engine.sample import Sample
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.typed.types import EdgeType

MAX_SLOT = 2**31 - 1
Arrays = dict[str, Tensor]
# (type, name, array, rows) -> these rows of the array, where it lies
Gather = Callable[[str | EdgeType, str, Tensor, Tensor], Tensor]


class Crossing:
    """Counts what crosses the bus between RAM and a device, and how many rows need not. Threads share it."""

    def __init__(self) -> None:
        self._lock = Lock()
        self.num_bytes, self.asked, self.hits = 0, 0, 0

    def __reduce__(self) -> Any:  # a copy counts for itself, as in a process that Lightning spawns
        return Crossing, ()

    def add(self, num_bytes: int, asked: int = 0, hits: int = 0) -> None:
        """Count bytes, and rows that batches needed, some of which were on the device."""
        with self._lock:
            self.num_bytes, self.asked, self.hits = self.num_bytes + num_bytes, self.asked + asked, self.hits + hits

    @property
    def figures(self) -> dict[str, float]:
        """Numbers to log."""
        figures = {"data/bus_bytes": float(self.num_bytes)} if self.num_bytes else {}
        if not self.asked:
            return figures
        hits = {"data/cache_hits": float(self.hits), "data/cache_hit_rate": self.hits / self.asked}
        return figures | {"data/cache_asked": float(self.asked)} | hits


class HeldRows:
    """Rows of the wide arrays of a node type that lie on a device.

    Args:
        arrays: All rows by name, in RAM.
        ids: The ids of the rows that are held, increasing. None: all are.
        held: Their rows on the device, by name.
    """

    def __init__(self, arrays: Arrays, ids: Tensor | None, held: Arrays) -> None:
        self.arrays, self.held = arrays, held
        self._num_rows = max(map(len, arrays.values()), default=0)
        self._slots: Tensor | None = None
        if ids is not None:
            self._slots = torch.full((self._num_rows,), -1, dtype=torch.int32)
            self._slots[ids] = torch.arange(len(ids), dtype=torch.int32)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.held.values())

    def split(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the row of each id is held, and the places of those that are not."""
        if self._slots is None:
            return ids if self._num_rows > MAX_SLOT else ids.to(torch.int32), ids[:0]
        slots = self._slots.index_select(0, ids)
        missing = (slots < 0).nonzero().view(-1)
        return slots.clamp_(min=0), missing


class RowsOnDevice:
    """Makes batches on a device, with rows that lie there and rows that lie in RAM.

    Args:
        device: The device.
        names: Each node type, and the names of its arrays in the order that batches have.
        of_types: The rows of each node type.
        crossing: Counts what is brought there.
    """

    def __init__(
        self,
        device: torch.device,
        names: Sequence[tuple[str, list[str]]],
        of_types: Sequence[HeldRows],
        crossing: Crossing,
    ) -> None:
        self._device, self._names, self.of_types, self._crossing = device, names, of_types, crossing

    @property
    def num_bytes(self) -> int:
        return sum(rows.num_bytes for rows in self.of_types)

    def batches(
        self, graph: Graph, samples: Sequence[Sample], gather: Gather, *, widen: Widen, all_labels: bool
    ) -> list[SampledData]:
        """Make batches of samples, all on the device.

        Args:
            graph: The graph that was sampled, in RAM, or its edges and narrow arrays on the device.
            samples: What was drawn, where the graph is.
            gather: Takes rows of an array.
            widen: As :func:`~lightning_gnn_dist.batches.source.assemble` has it.
            all_labels: The same.
        """
        contents = [Content.of(graph, sample) for sample in samples]
        made = []
        for content, ids in zip(contents, self._in_ram([content.apart.nodes for content in contents]), strict=True):
            read = self._read(content, ids, gather, all_labels=all_labels)
            batch: Any = made_of(read, widen=widen, all_labels=all_labels)
            made.append(batch.apply(self._brought))
        return made

    def _in_ram(self, nodes: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
        """Return the ids of each batch and type in RAM. Those that were drawn on the device come at once."""
        flat = [ids for of_batch in nodes for ids in of_batch]
        if all(ids.device.type == "cpu" for ids in flat):
            return nodes
        here = torch.cat(flat).to("cpu", non_blocking=True)  # page-locked
        torch.cuda.current_stream(self._device).synchronize()
        self._crossing.add(here.nbytes)
        pieces = iter(here.split([len(ids) for ids in flat]))
        return [[next(pieces) for _ in of_batch] for of_batch in nodes]

    def _read(self, content: Content, ids: Sequence[Tensor], gather: Gather, *, all_labels: bool) -> Content:
        """Return the content with the rows that the batch takes of all arrays."""
        num_labels = [None if all_labels else per_hop[0] for per_hop in content.apart.num_sampled]
        of_nodes = enumerate(zip(content.nodes, ids, num_labels, strict=True))
        nodes = [self._nodes(number, *of, gather) for number, of in of_nodes]
        of_edges = zip(content.types.edge_types, content.edges, strict=True)
        edges = [Taken(_taken(kind, of, gather)) for kind, of in of_edges]
        return content._replace(nodes=nodes, edges=edges)

    def _nodes(self, number: int, taken: Taken, ids: Tensor, num_labels: int | None, gather: Gather) -> Taken:
        kind, names = self._names[number]
        wide = self._wide(kind, self.of_types[number], ids, gather)
        narrow = {name: array for name, array in taken.arrays.items() if name not in wide}
        found = _taken(kind, Taken(narrow, taken.rows), gather, num_labels) | wide
        return Taken({name: found[name] for name in names})

    def _wide(self, kind: str, rows: HeldRows, ids: Tensor, gather: Gather) -> Arrays:
        """Return the wide rows of some ids on the device, as they are stored."""
        if not rows.arrays:
            return {}
        slots, missing = rows.split(ids)
        self._crossing.add(0, len(ids), len(ids) - len(missing))
        if len(missing) == len(ids):
            return {name: self._brought(gather(kind, name, array, ids)) for name, array in rows.arrays.items()}
        at, found = self._brought(slots), Arrays()
        to = self._brought(missing) if len(missing) else missing
        for name, held in rows.held.items():
            found[name] = held.index_select(0, at)
            if len(missing):
                found[name].index_copy_(0, to, self._brought(gather(kind, name, rows.arrays[name], ids[missing])))
        return found

    def _brought(self, array: Tensor) -> Tensor:
        """Begin the copy of an array to the device; the host does not wait for it."""
        if array.device == self._device:
            return array
        self._crossing.add(array.nbytes)
        return sent(array, self._device)


def _taken(kind: str | EdgeType, taken: Taken, gather: Gather, num_labels: int | None = None) -> Arrays:
    """Return the rows that a batch takes of arrays of a type."""
    rows = taken.rows
    if rows is None:
        return dict(taken.arrays)
    return {
        name: gather(kind, name, array, rows[:num_labels] if name == LABELS else rows)
        for name, array in taken.arrays.items()
    }
