"""A ``Data`` or ``HeteroData`` that ``torch.save`` saved. Its tensors are mapped, not read."""

from __future__ import annotations

from pathlib import Path

import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import BaseStorage, EdgeStorage, GlobalStorage, NodeStorage

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
