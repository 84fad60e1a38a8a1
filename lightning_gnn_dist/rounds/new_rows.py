"""Learned rows of nodes that are newer than a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_gnn_dist.checks import check_file, check_instance, check_path
from lightning_gnn_dist.graph.storage.files import flush, unused_name
from lightning_gnn_dist.rounds.replica_state import KEY
from lightning_gnn_dist.tables.table import KINDS

_STATES = ("state_dict", "current_model_state", "optimizer_states", KEY)  # of a checkpoint; weights, moments, ranks
_LASTING = {"ids", "rows", "starts"}  # moments beside the ids of their rows, of which there may be any number


def extend_checkpoint(path: str | Path, out: str | Path, module: nn.Module) -> dict[str, int]:
    """Write a checkpoint that a larger model goes on from, and return how many rows each of its tables has got.

        extend_checkpoint("last.ckpt", "larger.ckpt", model)
        trainer.fit(model, data.on(later), ckpt_path="larger.ckpt")

    A new row is the mean of the rows of its table, which are those of its type where each type has a table; optimizers
    have zeros for it, as at the start of a fit. All else stays as it is.

    Args:
        path: The checkpoint.
        out: The file to write, which appears when it is complete.
        module: The model, with tables (``nn.Embedding``, ``nn.EmbeddingBag``, ``OwnedEmbedding``) of more rows.
    """
    path, out = check_file("path", path), check_path("out", out)
    check_instance("module", module, nn.Module, "the model, with a row for each node of the larger graph")
    if out.is_dir():
        raise ValueError(f"out must be a file to write, and {out} is a folder.")
    checkpoint = torch.load(path, map_location="cpu", mmap=True)
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("state_dict"), Mapping):
        raise ValueError(f"path must be a checkpoint of Lightning's, and {path} has no state_dict.")
    larger = _Larger(module, checkpoint["state_dict"])
    draft = unused_name(out)
    try:
        torch.save({name: larger.of(value) if name in _STATES else value for name, value in checkpoint.items()}, draft)
        flush(draft)
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    return larger.more


def check_rows(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Refuse weights of tables with fewer rows than those of the module."""
    for name, (found, needed) in _sizes(module, state).items():
        if found < needed:
            raise ValueError(
                f"{name} has {found:,} rows in the checkpoint and {needed:,} in the model: nodes that are newer have "
                "none. Give each the mean of the others, and go on from that file: extend_checkpoint(path, "
                '"larger.ckpt", model) of lightning_gnn_dist.rounds.new_rows.'
            )


class _Larger:
    """Tables of a checkpoint that get more rows, and what has a row for each of theirs.

    Args:
        module: The model, with more rows.
        state: The weights in the checkpoint.

    Attributes:
        more: How many rows each table gets, by the name of its weight.
    """

    def __init__(self, module: nn.Module, state: Mapping[str, Any]) -> None:
        sizes = _sizes(module, state)
        if fewer := [name for name, (found, needed) in sizes.items() if found > needed]:
            found, needed = sizes[fewer[0]]
            raise ValueError(
                f"module has {needed:,} rows of {fewer[0]}, and the checkpoint {found:,}: make it with a row for each "
                "node of the larger graph."
            )
        self.more = {name: needed - found for name, (found, needed) in sizes.items() if needed > found}
        if not self.more:
            raise ValueError("module has no table with more rows than the checkpoint: go on from that as it is.")
        self._shapes = {tuple(state[name].shape): count for name, count in self.more.items()}
        for name, each in state.items():  # moments are known by their shapes
            if isinstance(each, Tensor) and self._shapes.get(tuple(each.shape), 0) != self.more.get(name, 0):
                raise ValueError(
                    f"module has a table of the shape {tuple(each.shape)} that gets rows, and {name} of the same shape "
                    "gets others, so that an optimizer's moments of them cannot be told apart: load the weights alone."
                )

    def of(self, value: Any, name: str = "") -> Any:
        """Return what a checkpoint has under a name, with more rows where it is of one of the tables."""
        if isinstance(value, Mapping):
            return value if value.keys() >= _LASTING else {key: self.of(each, str(key)) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.of(each) for each in value)
        if not isinstance(value, Tensor) or tuple(value.shape) not in self._shapes:
            return value
        new = value.new_zeros(self._shapes[tuple(value.shape)], *value.shape[1:])
        return torch.cat([value, new + value.mean(0, dtype=torch.float64).to(value) if name in self.more else new])


def _sizes(module: nn.Module, state: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return how many rows each table has in a checkpoint and in a module, by the name of its weight."""
    tables = {
        f"{name}.weight" if name else "weight": child.num_embeddings
        for name, child in module.named_modules(remove_duplicate=False)
        if isinstance(child, KINDS)
    }
    return {name: (len(state[name]), count) for name, count in tables.items() if isinstance(state.get(name), Tensor)}
