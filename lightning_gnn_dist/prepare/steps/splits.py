"""Deals the labelled nodes of a type to splits, where the source does not say whom to train on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isclose

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_between, check_seed, shown
from lightning_gnn_dist.prepare.files.names import SPLITS

NO_LABELS = "--split deals labelled nodes, and no node type has a label (a column or array y, or label)."


def check_split(split: Sequence[float] | None) -> None:
    """Refuse anything but None or three numbers in [0, 1], of at most 1 in all."""
    if split is None:
        return
    if isinstance(split, str | bytes) or not isinstance(split, Sequence) or len(split) != len(SPLITS):
        raise ValueError(f"split must be three shares, such as (0.6, 0.2, 0.2), got {shown(split)}.")
    for share in split:
        check_between(0, 1, **{"split: a share": share})
    if not (sum(split) < 1 or isclose(sum(split), 1)):
        raise ValueError(f"split must be three shares of at most 1 in all, got {list(split)}.")


def dealt(arrays: Mapping[str, Tensor], num_nodes: int, shares: Sequence[float], seed: int) -> dict[str, Tensor]:
    """Masks with random ``shares`` of the labelled nodes to train, validate and test; of all nodes without labels."""
    if present := sorted(name for name in arrays if name.endswith("_mask")):
        raise ValueError(f"The source has {present} already: leave the split out, or drop these arrays.")
    check_seed(seed)
    nodes = np.random.Generator(np.random.Philox(key=seed)).permutation(_labelled(arrays.get("y"), num_nodes))
    ends = [round(sum(shares[:at]) * len(nodes)) for at in range(len(SPLITS) + 1)]
    masks: dict[str, Tensor] = {}
    for split, share, start, end in zip(SPLITS, shares, ends, ends[1:], strict=False):
        if share and start == end:
            raise ValueError(f"The share {share} for {split} of {len(nodes)} labelled nodes is none: give more, or 0.")
        mask = torch.zeros(num_nodes, dtype=torch.bool)
        mask[torch.from_numpy(nodes[start:end])] = True
        masks[f"{split}_mask"] = mask
    return masks


def _labelled(y: Tensor | None, num_nodes: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if y is None or y.is_floating_point() or y.dim() != 1:
        return np.arange(num_nodes)
    return (y >= 0).nonzero().view(-1).numpy()
