"""Says on disk what is done: a journal, so that work goes on after a kill, and of a whole graph its ``meta.json``."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage import store
from lightning_gnn_dist.graph.storage.files import check_entries, flush, read_json, write_whole
from lightning_gnn_dist.graph.storage.npy import checksum_of
from lightning_gnn_dist.graph.storage.store import map_npy
from lightning_gnn_dist.prepare.arrays import SPLITS, Progress

if TYPE_CHECKING:
    from lightning_gnn_dist.graph.typed.types import GraphTypes

OF_DATA = ("x", "edge_index", "edge_attr", "y", "pos", "time")


class Journal:
    """Values by name in ``state.json``. They reach the disk after the files that they describe.

    Args:
        folder: The folder in which the work is done.
        inputs: What the work depends on. A folder with work on other inputs is refused.
    """

    def __init__(self, folder: Path, inputs: dict[str, Any]) -> None:
        self.folder = folder
        self._file = folder / "state.json"
        self._inputs = json.loads(json.dumps(inputs))
        self._values: dict[str, Any] = self._read()

    def get(self, name: str, default: Any = None) -> Any:
        """The value that was recorded last under this name."""
        return self._values.get(name, default)

    def record(self, files: Iterable[Path] = (), **values: Any) -> None:
        """Record values, after ``files``, which they describe, have reached the disk."""
        for file in files:
            flush(file)
        self._values |= values
        write_whole(self._file, json.dumps({"inputs": self._inputs, "values": self._values}))

    def _read(self) -> dict[str, Any]:
        if not self._file.exists():
            return {}
        way_out = f"Delete {self.folder} to begin anew."
        content = read_json(self._file, way_out)
        check_entries(content, {"inputs": dict[str, object], "values": dict[str, object]}, self._file, way_out)
        before, values = content["inputs"], content["values"]
        for name in self._inputs | before:
            if before.get(name) != self._inputs.get(name):
                raise ValueError(
                    f"{self.folder} holds unfinished work with {name} = {before.get(name)}, not "
                    f"{self._inputs.get(name)}: repeat that to finish it, or delete the folder to begin anew."
                )
        return dict(values)


@contextmanager
def journal_of(folder: Path, inputs: dict[str, Any]) -> Iterator[Journal]:
    """The journal of a folder, which is made if missing, and locked against other processes during the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"Another process works in {folder}: let it finish.") from error
        yield Journal(folder, inputs)


@dataclass(frozen=True)
class Prepared:
    """What was prepared.

    Args:
        num_nodes: Number of nodes.
        num_edges: Number of edges.
        num_bytes: Bytes of all arrays.
        arrays: Names of the arrays per node, then per edge.
        splits: Number of nodes that each mask marks, by its name without ``_mask``.
        types: The types of the graph, if it has any.
    """

    num_nodes: int
    num_edges: int
    num_bytes: int
    arrays: list[str]
    splits: dict[str, int]
    types: GraphTypes | None = None


def describe(
    draft: Path,
    names: Sequence[str],
    halves: Collection[str],
    types: GraphTypes | None,
    rows_at_once: int,
    progress: Progress,
) -> Prepared:
    """Compute fingerprint and checksums, and write ``meta.json`` last of all.

    Args:
        draft: The folder of the arrays.
        names: The arrays of nodes, in the order in which a graph from memory has them, if it has no types.
        halves: Names of arrays of bfloat16, which files hold as bits.
        types: The types of the graph, if it has any.
        rows_at_once: Rows that are hashed together.
        progress: Called with the share of the files that is done.
    """
    files = sorted(draft.rglob("*.npy")) if types else _in_order(draft, names)
    arrays = {
        name: array.view(torch.bfloat16) if name.rpartition("/")[2] in halves and array.dtype == torch.int16 else array
        for name, array in map_arrays(draft, files).items()
    }
    masks = convert.masks_of({name.removeprefix("nodes/"): array for name, array in arrays.items()})
    told = {name: arrays[name] for name in ("indptr", "indices")} | (types.masks if types else masks)
    fingerprint = convert.fingerprint_of((name, a.dtype, a.shape, a.split(rows_at_once)) for name, a in told.items())
    checksums = {}
    for number, (name, file) in enumerate(zip(arrays, files, strict=True)):
        flush(file)
        checksums[name] = checksum_of(file)
        progress((number + 1) / len(files))
    about = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    store.describe(draft, about, fingerprint, checksums, types.about if types else None)
    for path in {draft / "meta.json", *(file.parent for file in files)}:
        flush(path)
    splits = {name.removesuffix("_mask"): int(mask.sum()) for name, mask in masks.items()}
    if types is not None:
        splits = {f"{kind} {name}": ids.numel() for name in SPLITS for kind, ids in types.splits(name).items()}
    return Prepared(
        num_nodes=arrays["indptr"].numel() - 1,
        num_edges=arrays["indices"].numel(),
        num_bytes=sum(array.nbytes for array in arrays.values()),
        arrays=list(types.arrays) if types else [name.partition("/")[2] for name in [*arrays][2:]],
        splits=splits,
        types=types,
    )


def map_arrays(draft: Path, files: Iterable[Path]) -> dict[str, Tensor]:
    """Map some files of a folder, by their names in a graph."""
    names = {str(file.relative_to(draft))[: -len(".npy")]: file for file in files}
    return {name: torch.from_numpy(map_npy(file)) for name, file in names.items()}


def _place(name: str) -> int:
    """Where PyG's ``Data`` has an array: its arguments first, then others as they come."""
    return OF_DATA.index(name) if name in OF_DATA else len(OF_DATA)


def _in_order(draft: Path, of_nodes: Sequence[str]) -> list[Path]:
    """The files of a graph without types, in the order that PyG gives to arrays."""
    ordered = [draft / "indptr.npy", draft / "indices.npy"]
    for folder, first in ((draft / "nodes", of_nodes), (draft / "edges", ())):
        names = [*first, *(file.stem for file in sorted(folder.glob("*.npy")))]
        ordered += [folder / f"{name}.npy" for name in sorted(dict.fromkeys(names), key=_place)]
    return ordered
