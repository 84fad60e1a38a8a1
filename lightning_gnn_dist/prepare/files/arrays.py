"""Arrays by their names: in a folder of ``.npy``, in an ``.npz``, or in a graph of PyG that was saved."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.graph.storage.npy import NpyFile
from lightning_gnn_dist.prepare.files.columns import check_num_nodes
from lightning_gnn_dist.prepare.files.row_files import LoadedArray, RowFiles

Entry: TypeAlias = Path | NpyFile  # a file, a folder of several, or an array out of an archive


def names_in(place: Path) -> list[str]:
    """The names of all arrays."""
    if place.suffix != ".npz" or place.is_dir():
        return list(entries(place))
    with _archive(place) as archive:
        return list(archive.files)


def entries(place: Path, drop: Collection[str] = ()) -> dict[str, Entry]:
    """Arrays by name: ``x.npy``, or ``x/`` with several files; those of an archive are read."""
    if place.suffix == ".npz" and not place.is_dir():
        with _archive(place) as archive:
            return {name: _loaded(place, name, archive[name]) for name in archive.files if name not in drop}
    if not place.is_dir():
        raise ValueError(f"{place} holds no arrays: give a folder of .npy, an .npz, or a table.")
    folders = [path for path in place.iterdir() if path.is_dir() and any(path.iterdir())]
    files = [path for path in place.glob("*.npy") if not path.is_dir()]
    for path in (path for path in files if path.with_suffix("") in folders):
        raise ValueError(f"{path} and the folder {path.with_suffix('')} hold the same array: remove one of them.")
    found = sorted([*files, *folders], key=lambda path: path.stem)
    return {path.stem: path for path in found if path.stem not in drop}


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


_OF_PYG = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, HeteroData, BaseStorage, NodeStorage, EdgeStorage]


def load_pyg(path: Path) -> Data | HeteroData:
    """The graph that ``torch.save`` saved, mapped. Nothing of the file is run."""
    try:
        with torch.serialization.safe_globals(_OF_PYG):
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
