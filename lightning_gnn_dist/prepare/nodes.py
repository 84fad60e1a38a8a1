"""The nodes of one type: dealt to splits if so asked, and those that are prepared copied."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isclose
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lightning_gnn_dist.checks import check_between, check_seed, shown
from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.storage.files import flush
from lightning_gnn_dist.graph.storage.npy import Column, save, write_at, write_header
from lightning_gnn_dist.graph.storage.store import as_numpy
from lightning_gnn_dist.prepare.arrays import SPLITS, Progress, RowFiles
from lightning_gnn_dist.prepare.plan import PYG, NodeFiles

MAX_BYTES_AT_ONCE = 1 << 26
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


@dataclass(frozen=True, eq=False)
class Part:
    """The nodes of a type that are prepared: all, with their own numbers. Those of a shard are fewer.

    Args:
        num_all: How many nodes the type has.
        number: The new number of each node, or None if it is the old one.
    """

    num_all: int
    number: Column | None = None

    @property
    def size(self) -> int:
        """How many nodes are prepared."""
        return self.num_all

    def renumbered(self, nodes: Column) -> Column:
        """The new numbers of some nodes."""
        return nodes if self.number is None else self.number[nodes]


@dataclass(frozen=True, kw_only=True)
class NodesOfType:
    """The nodes of one type that are prepared, and their arrays.

    Args:
        files: The arrays of all nodes of the type.
        part: Which of the nodes are prepared.
        split: Shares of the labelled nodes to train on, validate and test.
        seed: Decides the split.
        float_labels: Accept a floating point ``y`` with one value per node.
        memory_bytes: Bytes that copying may take, beside arrays of one number per node.
    """

    files: NodeFiles
    part: Part
    split: Sequence[float] | None
    seed: int
    float_labels: bool
    memory_bytes: int

    @property
    def names(self) -> list[str]:
        """The arrays that are written, in the order of their files."""
        names = [convert.SPLITS.get(name, name) for name in self.files.arrays]
        names += [f"{split}_mask" for split in SPLITS] if self.split else []
        return [*dict.fromkeys(names)]

    def copy(self, folder: Path, target: Path, progress: Progress) -> None:
        """Copy all arrays to ``target``, which is there when all are."""
        draft = folder / "graph"
        draft.mkdir(exist_ok=True)
        for name, tensor in self.own(self.small).items():
            save(draft / f"{name}.npy", as_numpy(tensor))
        for name, rows in self.files.arrays.items():
            if not _is_small(name, rows):
                self._copy(name, rows, draft / f"{name}.npy", progress)
        target.parent.mkdir(exist_ok=True)
        os.rename(draft, target)

    def times(self, time: str | None) -> Column | None:
        """The times of all nodes of the type, checked; None if they have none."""
        if time is None or time not in self.files.arrays:
            return None
        convert.check_time({time: self.small[time]}, time, "node")
        return as_numpy(self.small[time])

    @cached_property
    def small(self) -> dict[str, Tensor]:
        """All arrays with one number per node, such as labels and masks, checked, of all nodes of the type."""
        small = {name: rows for name, rows in self.files.arrays.items() if _is_small(name, rows)}
        found = {name: self._loaded(rows) for name, rows in small.items()}
        if "y" in found and found["y"].dim() == 2 and self.files.source.suffix not in PYG:
            found["y"] = found["y"][:, 0]
        arrays = convert.with_masks(found, self.part.num_all)
        wide = {name: rows.without_content for name, rows in self.files.arrays.items() if not _is_small(name, rows)}
        convert.check_rows("node", arrays | wide, self.part.num_all)
        if self.split:
            arrays |= dealt(arrays, self.part.num_all, self.split, self.seed)
        how = {"check_features": True, "float_labels": self.float_labels}
        return convert.learnable(arrays, str(self.files.source), **how, without=self._without_label(arrays))

    def _loaded(self, rows: RowFiles) -> Tensor:
        return rows.as_tensor(rows.read(0, rows.shape[0]))

    def own(self, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        """The rows of the nodes that are prepared, of arrays of all nodes."""
        return arrays

    def _without_label(self, arrays: dict[str, Tensor]) -> Tensor | None:
        """Which nodes have NaN for a label, if ``y`` is not in memory and may have any."""
        if "y" in arrays or not has_fractions(self.files):
            return None
        y = self.files.arrays["y"]
        found = [convert.is_unlabelled(y.as_tensor(piece)) for _, piece in self.pieces("y", y)]
        return torch.cat([torch.empty(0, dtype=torch.bool), *found])

    def pieces(self, name: str, rows: RowFiles) -> Iterator[tuple[int, Column]]:
        """Yield the rows of an array, checked, and the node of the first of each piece."""
        first = 0
        for piece in rows.pieces(first, min(self.memory_bytes // 4, MAX_BYTES_AT_ONCE)):
            if name == "x":
                convert.check_finite(rows.as_tensor(piece), first)
            yield first, piece
            first += len(piece)

    def own_rows(self, name: str, rows: RowFiles, progress: Progress) -> Iterator[tuple[int, Column]]:
        """Yield the rows of an array that are prepared, and the number of the first node of each piece."""
        for first, piece in self.pieces(name, rows):
            yield first, piece
            progress((first + len(piece)) / max(rows.shape[0], 1))

    def _copy(self, name: str, rows: RowFiles, target: Path, progress: Progress) -> None:
        """Write the own rows of an array to their places."""
        start = write_header(target, rows.files[0].dtype, (self.part.size, *rows.shape[1:]))
        for first, own in self.own_rows(name, rows, progress):
            write_at(target, start + first * rows.bytes_per_row, own)
        flush(target)


def _is_small(name: str, rows: RowFiles) -> bool:
    return name in convert.SPLITS or rows.is_one_number_per_row


def has_fractions(files: NodeFiles) -> bool:
    """Whether the labels are numbers with fractions."""
    y = files.arrays.get("y")
    return y is not None and y.files[0].type.is_floating_point
