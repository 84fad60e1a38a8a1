"""Graphs from arrays: a PyG file, an ``.npz``, or a directory of ``.npy``."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.files import open_file
from lightning_gnn_dist.graph.storage.npy import Column, NpyFile
from lightning_gnn_dist.prepare.files.raw import RawGraph, Source, check_drop, check_num_nodes, check_purposes
from lightning_gnn_dist.prepare.files.text_tables import Progress

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
_OF_PYG = [Data, DataEdgeAttr, DataTensorAttr, GlobalStorage, HeteroData, BaseStorage, NodeStorage, EdgeStorage]
INDEX_LISTS = {"train_idx": "train", "val_idx": "val", "valid_idx": "val", "test_idx": "test"}


def of_pyg(path: Path, drop: Collection[str]) -> Source:
    """The source in a ``Data`` that ``torch.save`` saved. Its tensors are mapped, not read."""
    return _mapped(_read_pyg(path, drop))


def of_directory(path: Path, drop: Collection[str]) -> Source:
    """The source in a directory with a file for each array. They are mapped."""
    files = sorted(path.glob("*.npy"))
    for folder in (folder for folder in path.iterdir() if folder.is_dir() and any(folder.glob("*.npy"))):
        raise ValueError(
            f"{folder} is a folder, and an array in several files is read out of core alone: --out-of-core."
        )
    for file in files:
        NpyFile.of(file).type  # noqa: B018  refused here if torch has no such type
    arrays = {file.stem: np.load(file, mmap_mode="c", allow_pickle=False) for file in files}
    return _mapped(_from_arrays(arrays, path, drop))


def of_npz(path: Path, drop: Collection[str]) -> Source:
    """The source in an archive of arrays, of which only the headers are read now."""
    sizes = {}
    with told(path), zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                sizes[name.removesuffix(".npy")] = shape, int(np.prod(shape)) * dtype.itemsize
    check_drop(drop, sizes, path)
    num_edges = sizes["edge_index"][0][-1] if "edge_index" in sizes else 0
    num_nodes = next((shape[0] for name, (shape, _) in sizes.items() if ALIASES.get(name, name) in ("x", "y")), 0)
    num_bytes = sum(size for name, (_, size) in sizes.items() if name != "edge_index" and name not in drop)

    def read(on_progress: Progress) -> RawGraph:
        with told(path), np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files if name not in drop or name == "edge_index"}
        return _from_arrays(arrays, path, [])

    return Source(num_nodes, num_edges, num_bytes, read)


@contextmanager
def told(path: Path) -> Iterator[None]:
    """What is said of an archive that cannot be read."""
    try:
        with open_file(path):  # and neither a folder nor a pipe
            yield
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise ValueError(
            f"{path} is no archive of arrays, or is damaged ({str(error).rstrip('. ')}). Write it with numpy.savez."
        ) from error


def _mapped(graph: RawGraph) -> Source:
    arrays = [*graph.node_arrays.values(), *graph.edge_arrays.values()]
    num_bytes = sum(array.nbytes for array in arrays)
    return Source(graph.num_nodes, graph.edge_index.shape[-1], num_bytes, lambda _: graph)


def _read_pyg(path: Path, drop: Collection[str]) -> RawGraph:
    data = load_pyg(path)
    if not isinstance(data, Data):
        raise TypeError(f"{path} holds a {type(data).__name__}, and a torch_geometric.data.Data is needed.")
    data.num_nodes = data.num_nodes  # stored, because PyG infers it from arrays that may be dropped
    check_drop(drop, data.keys(), path)
    for name in drop:
        del data[name]
    nodes, edges = convert.arrays_of(data)
    return RawGraph(data.edge_index, int(data.num_nodes), nodes, edges)


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


def _from_arrays(arrays: Mapping[str, Column], path: Path, drop: Collection[str]) -> RawGraph:
    check_drop(drop, arrays, path)
    found = {ALIASES.get(name, name): array for name, array in arrays.items() if name not in drop}
    check_purposes(((name, purpose_of(name)) for name in arrays if name not in drop), path)
    if "edge_index" not in found:
        raise ValueError(f"{path} holds no edge_index, of shape (2, edges), but {sorted(arrays)}.")
    edge_index = found.pop("edge_index")
    num_nodes = num_nodes_of(found, path)
    tensors = node_tensors(found, num_nodes)
    data = Data(edge_index=torch.from_numpy(np.ascontiguousarray(edge_index)), num_nodes=num_nodes, **tensors)
    return RawGraph(data.edge_index, num_nodes, *convert.arrays_of(data))


def node_tensors(found: Mapping[str, Column], num_nodes: int) -> dict[str, Tensor]:
    """The node arrays as tensors, with lists of nodes turned into masks."""
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in _with_masks(found, num_nodes).items()
    }
    if "y" in tensors and tensors["y"].dim() == 2 and tensors["y"].shape[1] == 1:
        tensors["y"] = tensors["y"][:, 0]  # OGB's labels have shape (N, 1)
    return tensors


def num_nodes_of(found: dict[str, Column], path: Path) -> int:
    """How many nodes there are: as ``num_nodes`` says, which is taken out, or other arrays show."""
    if "num_nodes" in found:
        return number_in(found.pop("num_nodes"), path)
    for name in ("x", "y", "train_mask"):
        if name in found:
            return len(found[name])
    raise ValueError(f"{path} does not say how many nodes there are: add x, y or num_nodes (edges name only some).")


def purpose_of(name: str) -> str:
    """What an array is called in a graph."""
    return f"{INDEX_LISTS[name]}_mask" if name in INDEX_LISTS else ALIASES.get(name, name)


def number_in(array: Column, path: Path) -> int:
    """How many nodes ``num_nodes`` says that there are."""
    if array.size != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"{path}: num_nodes must hold one whole number, got {array.dtype} of shape {array.shape}.")
    count = int(array.reshape(-1)[0])
    check_num_nodes(count, f"{path}: num_nodes says")
    return count


def _with_masks(found: Mapping[str, Column], num_nodes: int) -> dict[str, Column]:
    """The arrays, with ``train_idx`` and its like, which list nodes, turned into masks."""
    arrays = {}
    for name, array in found.items():
        if name not in INDEX_LISTS:
            arrays[name] = array
            continue
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise ValueError(f"{name} must be a vector of node ids, got {array.dtype} of shape {array.shape}.")
        if array.size and not 0 <= array.min() <= array.max() < num_nodes:
            raise ValueError(f"{name} names nodes {array.min()} to {array.max()}, but the graph has {num_nodes}.")
        mask = np.zeros(num_nodes, np.bool_)
        mask[array] = True
        convert.check_once(name, array.size, int(mask.sum()))
        arrays[f"{INDEX_LISTS[name]}_mask"] = mask
    return arrays
