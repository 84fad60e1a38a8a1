"""Arrays with a row per node or edge in files, read and written some rows at a time, and what they are called."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_fits
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile, append, write_header
from lightning_gnn_dist.graph.storage.store import as_numpy

SPLITS = ("train", "val", "test")
# Names in use elsewhere, OGB's among them, and the names in a graph.
ALIASES = {
    "node_feat": "x",
    "feat": "x",
    "features": "x",
    "node_label": "y",
    "label": "y",
    "labels": "y",
    "edge_feat": "edge_attr",
}


NO_CLASS = "-1"
LABELS_OF_EDGES = ("y", "edge_y")
EDGES = "edge_index"  # without which there is no graph


class Drop:
    """What to leave out. All is shown to it that could be, so that what is nowhere is refused.

    Args:
        names: Names of arrays and columns.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self.names, self.known = frozenset(names), set[str]()

    def kept(self, names: Iterable[str]) -> list[str]:
        """Those that are not left out."""
        names = [*names]
        self.known.update(name for name in names if name != EDGES)
        return [name for name in names if name == EDGES or name not in self.names]

    def check(self, where: Path) -> None:
        """Refuse to leave out what is not there."""
        if missing := sorted(self.names - self.known):
            raise ValueError(f"{where} has no {missing[0]!r} to drop, but {sorted(self.known)}.")


def purpose_of(name: str) -> str:
    """What an array is called in a graph."""
    return convert.SPLITS.get(name, ALIASES.get(name, name))


def check_purposes(purposes: Iterable[tuple[str, str]], where: Path | None) -> None:
    """Refuse two sources for one array. Each purpose is what something is called there, and in the graph."""
    sources: dict[str, str] = {}
    for name, array in purposes:
        if (other := sources.setdefault(array, name)) != name:
            raise ValueError(
                f"{where} holds two arrays for one purpose, {other!r} and {name!r}, which both say {array!r} of the "
                f"graph: leave one of them out (--drop {name})."
            )


def check_num_nodes(count: int, who: str) -> None:
    """Refuse a number of nodes that cannot be meant, in words that say ``who`` told it."""
    if count < 1:
        raise ValueError(f"{who} {count:,} nodes, and a graph has at least 1.")
    check_fits(convert.BYTES_PER_NODE * count, f"{who} {count:,} nodes, numbered 0, 1, 2, ..., and their edges")


SPLIT_WORDS = {split: split for split in SPLITS} | {"valid": "val", "validation": "val"}


def id_of(names: Sequence[str]) -> str:
    """The column with the id of each row's node: one with such a name, otherwise the first."""
    found = [name for name in names if name.lower() in {"id", "node", "node_id"}]
    if len(found) > 1:
        raise ValueError(f"The table of nodes has {found}, each of which may say what node a row is about: rename one.")
    return found[0] if found else names[0]


def check_classes(words: Collection[str], where: str) -> None:
    """Refuse -1 among labels that are words: it would become a class."""
    if NO_CLASS in words:
        raise ValueError(f"{where} holds {NO_CLASS} among words: where a label is a word, an empty cell is no label.")


if TYPE_CHECKING:
    from torch_geometric.data import Data, HeteroData

Progress: TypeAlias = Callable[[float], None]  # told the share that is done


@dataclass(frozen=True, eq=False)
class LoadedArray(NpyFile):
    """An array out of an archive or a file of PyG, in RAM or mapped, that is read as a file is.

    Args:
        numbers: All of its numbers, one after the other.
        torch_type: The torch type of what is stored, where NumPy has none such.
    """

    numbers: Column
    torch_type: torch.dtype | None = None

    @classmethod
    def of_array(cls, path: Path, array: Column | Tensor) -> LoadedArray:
        """The array that is called ``path`` in errors."""
        kind = array.dtype if isinstance(array, Tensor) else None
        numbers = as_numpy(array) if isinstance(array, Tensor) else np.ascontiguousarray(array)
        return cls(path, tuple(array.shape), numbers.dtype, 0, False, numbers.reshape(-1), kind)

    @property
    def type(self) -> torch.dtype:
        return super().type if self.torch_type is None else self.torch_type

    def read(self, first: int, count: int) -> Column:
        return self.numbers[first : first + count]


@dataclass(frozen=True)
class RowFiles:
    """One array whose rows lie in one file after the other.

    Args:
        files: The files, with rows of the same type and shape.
    """

    files: tuple[NpyFile, ...]

    def __post_init__(self) -> None:
        self.files[0].type  # noqa: B018  refused here, before any work, if torch has no such type

    @classmethod
    def of(cls, path: Path | NpyFile) -> RowFiles:
        """One array, or all ``.npy`` of a folder in the order of their names."""
        if isinstance(path, NpyFile):
            return cls((path,))
        files = [NpyFile.of(file) for file in (sorted(path.glob("*.npy")) if path.is_dir() else [path])]
        if not files:
            raise ValueError(
                f"{path} is a folder without .npy files, and one array is expected in it: --drop {path.stem}."
            )
        for file in files:
            if (file.dtype, file.shape[1:]) != (files[0].dtype, files[0].shape[1:]):
                raise ValueError(
                    f"{file.path} holds rows of {file.dtype} {file.shape[1:]}, but {files[0].path} rows of "
                    f"{files[0].dtype} {files[0].shape[1:]}: files of one array must be alike."
                )
            if file.by_column:
                raise ValueError(f"{file.path} is stored by column: save numpy.ascontiguousarray(array).")
        return cls(tuple(files))

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.files[0].shape
        return (sum(file.shape[0] for file in self.files), *first[1:]) if first else ()

    @property
    def bytes_per_row(self) -> int:
        return math.prod(self.shape[1:]) * self.files[0].dtype.itemsize

    @property
    def is_one_number_per_row(self) -> bool:
        return math.prod(self.shape[1:]) == 1

    def as_tensor(self, rows: Column) -> Tensor:
        """Some rows as a tensor of the type that the array is of."""
        tensor = torch.from_numpy(rows)
        return tensor.view(torch.bfloat16) if self.files[0].type == torch.bfloat16 else tensor

    @property
    def without_content(self) -> Tensor:
        """The type and the shape of the array."""
        return torch.empty(self.shape, dtype=self.files[0].type, device="meta")

    def load(self) -> Column:
        """The whole array, in RAM."""
        return np.concatenate([file.read(0, math.prod(file.shape)) for file in self.files]).reshape(self.shape)

    def read(self, first: int, count: int) -> Column:
        """``count`` rows from row ``first`` on."""
        found = [*self.pieces(first, count * self.bytes_per_row, first + count)]
        return np.concatenate(found) if found else np.empty((0, *self.shape[1:]), self.files[0].dtype)

    def pieces(self, first: int, bytes_at_once: int, end: int | None = None) -> Iterator[Column]:
        """Yield the rows from ``first`` to ``end``, or the last, in pieces of ``bytes_at_once`` bytes or of one row."""
        at_once = max(1, bytes_at_once // max(self.bytes_per_row, 1))
        width = math.prod(self.shape[1:])
        left = self.shape[0] if end is None else end
        for file in self.files:
            stop = min(file.shape[0], left)
            for start in range(min(first, stop), stop, at_once):
                count = min(at_once, stop - start)
                yield file.read(start * width, count * width).reshape(count, *self.shape[1:])
            first, left = max(first - file.shape[0], 0), max(left - file.shape[0], 0)


@dataclass(frozen=True)
class Carried:
    """What edges carry: the rows of several arrays side by side, as bytes that move together.

    Args:
        arrays: The arrays, by name.
    """

    arrays: dict[str, RowFiles]

    @property
    def bytes_per_edge(self) -> int:
        return sum(rows.bytes_per_row for rows in self.arrays.values())

    def rows(self, first: int, count: int) -> dict[str, Column]:
        """The rows of ``count`` edges from ``first`` on, by array, checked: later only bytes are moved."""
        found = {name: rows.read(first, count) for name, rows in self.arrays.items()}
        for name, array in found.items():
            tensor = self.arrays[name].as_tensor(array)
            if name in LABELS_OF_EDGES and tensor.is_floating_point():
                tensor = tensor.masked_fill(tensor.isnan(), 0)  # NaN is no label
            convert.check_finite(tensor, first, name=name, row="edge")
        return found

    def read(self, first: int, count: int) -> Column:
        """What ``count`` edges from ``first`` on carry, shape ``(count, bytes_per_edge)``."""
        parts = [array.reshape(count, -1).view(np.uint8) for array in self.rows(first, count).values()]
        return np.concatenate(parts, axis=1)

    def split(self, carried: Column) -> Iterator[tuple[str, Column]]:
        """Yield each array's name, and its bytes in ``carried``."""
        start = 0
        for name, rows in self.arrays.items():
            yield name, carried[:, start : start + rows.bytes_per_row]
            start += rows.bytes_per_row


class GrowingArrays:
    """Arrays in a folder that get rows piece by piece.

    Args:
        folder: The folder, which is made.
        source: Where the rows come from, for errors.
    """

    def __init__(self, folder: Path, source: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._source = folder, source
        self._shapes: dict[str, tuple[np.dtype[np.generic], tuple[int, ...]]] = {}
        self._counts: dict[str, int] = {}

    def add(self, arrays: Mapping[str, Column]) -> None:
        """Add rows to arrays by name."""
        for name, array in arrays.items():
            shape, path = (array.dtype, array.shape[1:]), self._folder / f"{name}.npy"
            if (known := self._shapes.setdefault(name, shape)) != shape:
                kinds = " and ".join(f"{dtype}{list(more) or ''}" for dtype, more in (known, shape))
                raise ValueError(f"{self._source}: {name} holds {kinds}: files of one table must be alike.")
            if name not in self._counts:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.unlink(missing_ok=True)
                write_header(path, array.dtype, (0, *array.shape[1:]))
            append(path, array)
            self._counts[name] = self._counts.get(name, 0) + len(array)

    def finish(self) -> list[Path]:
        """Write the numbers of rows into the headers, and return the files."""
        for name, (dtype, shape) in self._shapes.items():
            write_header(self._folder / f"{name}.npy", dtype, (self._counts[name], *shape))
        return [self._folder / f"{name}.npy" for name in self._shapes]


Entry: TypeAlias = Path | NpyFile  # a file, a folder of several, or an array out of an archive


def entries(place: Path, drop: Drop | None = None) -> dict[str, Entry]:
    """Arrays by name: ``x.npy``, or ``x/`` with several files; those of an archive are read."""
    drop = drop or Drop()
    if place.suffix == ".npz" and not place.is_dir():
        with _archive(place) as archive:
            return {name: _loaded(place, name, archive[name]) for name in drop.kept(archive.files)}
    if not place.is_dir():
        raise ValueError(f"{place} holds no arrays: give a folder of .npy, an .npz, or a table.")
    folders = [path for path in place.iterdir() if path.is_dir() and any(path.iterdir())]
    files = [path for path in place.glob("*.npy") if not path.is_dir()]
    for path in (path for path in files if path.with_suffix("") in folders):
        raise ValueError(f"{path} and the folder {path.with_suffix('')} hold the same array: remove one of them.")
    found = {path.stem: path for path in sorted([*files, *folders], key=lambda path: path.stem)}
    return {name: found[name] for name in drop.kept(found)}


def number_in(rows: RowFiles) -> int:
    """How many nodes ``num_nodes`` says that there are."""
    array, path = rows.load(), rows.files[0].path
    if array.size != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{path}: num_nodes must hold one whole number, got {array.dtype} of shape {array.shape}.")
    count = int(array.reshape(-1)[0])
    check_num_nodes(count, f"{path}: num_nodes says")
    return count


def _loaded(place: Path, name: str, array: object) -> LoadedArray:
    if not isinstance(array, np.ndarray):
        raise ValueError(f"{name} is no array")
    return LoadedArray.of_array(place / name, array)


@contextmanager
def _archive(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """Open an archive; if it cannot be read, say what to do."""
    try:
        with open_file(path), np.load(path, allow_pickle=False) as archive:  # neither a folder nor a pipe
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array")
            yield archive
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(
            f"{path} is no archive of arrays, or is damaged ({str(error).rstrip('. ')}). Write it with numpy.savez."
        ) from error


def load_pyg(path: Path) -> Data | HeteroData:
    """The graph that ``torch.save`` saved, mapped. Nothing of the file is run."""
    from torch_geometric.data import Data, HeteroData, data, storage  # which tables and arrays do without: 2 seconds

    kinds = [Data, data.DataEdgeAttr, data.DataTensorAttr, storage.GlobalStorage, HeteroData]
    kinds += [storage.BaseStorage, storage.NodeStorage, storage.EdgeStorage]
    try:
        with torch.serialization.safe_globals(kinds):
            content = torch.load(path, mmap=True, weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read without running code out of it ({str(error).splitlines()[0]}). If you trust it, "
            "load it yourself and save the graph: Graph.from_pyg(torch.load(path, weights_only=False)).save(out)."
        ) from error
    # InMemoryDataset saves a dictionary, slices if there are several graphs, and the class.
    if isinstance(content, tuple) and content and isinstance(content[0], dict | Data | HeteroData):
        if len(content) > 1 and content[1] is not None:
            raise ValueError(f"{path} holds a data set of several graphs: save the one you want, dataset[0].")
        kind = HeteroData if HeteroData in content[2:] else Data
        content = kind.from_dict(content[0]) if isinstance(content[0], dict) else content[0]
    if not isinstance(content, Data | HeteroData):
        raise TypeError(f"{path} holds a {type(content).__name__}, and a torch_geometric.data.Data is needed.")
    return content
