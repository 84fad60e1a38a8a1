"""All that a batch holds, to compare batches that are made in different ways."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, HeteroData


def contents(batch: Any) -> dict[str, Any]:
    """By names that say where it is."""
    if not isinstance(batch, HeteroData):
        blocks = {f"block {i}": (b.indptr, b.indices, b.num_dst) for i, b in enumerate(batch.blocks)}
        return {"edge_index": batch.edge_index} | batch.to_dict() | blocks
    found = {"seed_type": batch.seed_type, "batch_size": batch.batch_size}
    for kind in batch.node_types:
        found |= {f"{kind} {name}": value for name, value in batch[kind].to_dict().items()}
    for kind in batch.edge_types:
        found |= {f"{kind} {name}": value for name, value in batch[kind].to_dict().items()}
        for layer, blocks in enumerate(batch.blocks):
            found |= {
                f"{kind} {layer} {name}": getattr(blocks[kind], name) for name in ("indptr", "indices", "num_dst")
            }
    return found


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        same = left.dtype == right.dtype and left.shape == right.shape
        return same and torch.equal(left.nan_to_num(7e7), right.nan_to_num(7e7))
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, Data):
        return list(left.keys()) == list(right.keys()) and is_same(left.to_dict(), right.to_dict())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(is_same, left, right))
    return bool(left == right)


def check_same(found: Iterable[dict[str, Any]], expected: Iterable[dict[str, Any]]) -> None:
    """Batches have the same names, and the same values under them."""
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        assert not [(number, name) for name, value in theirs.items() if not is_same(ours[name], value)]
