"""A small typed graph, drawn at random, and comparisons of ``HeteroData``."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")
COUNTS = {"paper": 12, "author": 7, "venue": 3}
EDGES = {
    ("author", "writes", "paper"): 30,
    ("paper", "cites", "paper"): 40,
    ("paper", "in", "venue"): 0,
    ("venue", "of", "paper"): 9,
    ("paper", "by", "author"): 20,
}


def small(seed: int = 0) -> HeteroData:
    """Three node types of different arrays, one of them without; loops, repeated edges, a type without edges."""
    generator = torch.Generator().manual_seed(seed)
    data = HeteroData()
    data["paper"].x = torch.randn(12, 5, generator=generator)
    data["paper"].y = torch.randint(3, (12,), generator=generator)
    data["paper"].train_mask = torch.arange(12) % 2 == 0
    data["paper"].time = torch.randint(5, (12,), generator=generator)
    data["author"].x = torch.randn(7, 2, generator=generator).half()
    data["author"].train_mask = torch.arange(7) < 2
    data["venue"].num_nodes = 3
    for (source, name, target), count in EDGES.items():
        ends = [torch.randint(COUNTS[end], (count,), generator=generator) for end in (source, target)]
        data[source, name, target].edge_index = torch.stack(ends)
    data["paper", "cites", "paper"].time = torch.randint(4, (40,), generator=generator).double()
    data["paper", "cites", "paper"].y = torch.randint(2, (40,), generator=generator)
    data["author", "writes", "paper"].edge_attr = torch.randn(30, 2, generator=generator)
    return data


def save_arrays(data: HeteroData, folder: Path) -> None:
    """Write each array of each type into a file, as ``prepare`` reads them."""
    for place, stores in (("nodes", data.node_types), ("edges", data.edge_types)):
        for kind in stores:
            target = folder / place / (kind if isinstance(kind, str) else "__".join(kind))
            target.mkdir(parents=True)
            for name, array in data[kind].to_dict().items():
                np.save(target / name, array.numpy() if isinstance(array, Tensor) else np.array(array))


def check_same(found: HeteroData, expected: HeteroData) -> None:
    """All arrays are equal. Edges are found in another order, of which ``e_id`` of the found ones tells."""
    assert found.metadata() == expected.metadata()
    for kind in expected.node_types:
        assert found[kind].num_nodes == expected[kind].num_nodes
        _check_arrays(found[kind].to_dict(), expected[kind].to_dict())
    for edge_type in expected.edge_types:
        content = expected[edge_type].to_dict()
        order = found[edge_type].e_id
        in_order = {
            name: array[..., order] if name == "edge_index" else array[order] for name, array in content.items()
        }
        _check_arrays(found[edge_type].to_dict(), in_order)


def _check_arrays(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    arrays = {name: array for name, array in expected.items() if isinstance(array, Tensor)}
    assert arrays.keys() <= found.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and torch.equal(found[name], array), name


def data_with(**arrays: Any) -> HeteroData:
    """The small graph with arrays of papers; those of citations begin with ``cites_``."""
    data = small()
    del data["author"].train_mask
    for name, array in arrays.items():
        data[CITES if name.startswith("cites_") else "paper"][name.removeprefix("cites_")] = array
    return data


def check_sentences(said: str) -> None:
    """One sentence, or a line for each mistake below one that ends in a colon."""
    first, *others = said.split("\n")
    assert first.endswith(":" if others else (".", "...", "?"))
    assert all(line.endswith((".", "...", "?")) for line in others)
