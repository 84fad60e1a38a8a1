"""How a saved split tells of labels and times: in arrays, as all that lies beside a graph does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_gnn_dist.graph.storage import store

_NAMES, _HIDE = ("labels", "time"), "hide"


def names_to_save(
    names: Mapping[str, str | None], held: Mapping[str, Mapping[str, Tensor]], *, hide: bool
) -> dict[str, Tensor]:
    """The arrays that :func:`saved_names` reads: none for a split that names no array."""
    named = {key: name for key, name in names.items() if name is not None}
    arrays = {f"links/{split}/{array}": rows for split, of in held.items() for array, rows in of.items()}
    arrays |= {f"links/{key}": torch.tensor(list(name.encode()), dtype=torch.uint8) for key, name in named.items()}
    return arrays | ({f"links/{_HIDE}": torch.tensor([hide])} if named else {})


def saved_names(links: dict[str, Tensor], splits: Iterable[str], path: Path) -> dict[str, Any]:
    """Take out of a saved split's arrays what a ``LinkSplit`` is told of labels and times; nothing without these."""
    named = {key: links.pop(key) for key in _NAMES if key in links}
    if not named:
        return {}
    hide = links.pop(_HIDE, torch.empty(0))
    if any(name.dtype != torch.uint8 for name in named.values()) or hide.dtype != torch.bool or hide.numel() != 1:
        raise ValueError(f"{path} is damaged (links/{min(named)} or links/hide cannot be read). Copy or save it again.")
    held: dict[str, dict[str, Tensor]] = {split: {} for split in splits}
    for key in list(links):
        split, slash, array = key.partition("/")
        if slash and split in held:
            held[split][array] = links.pop(key)
    words = {key: bytes(name.tolist()).decode(errors="replace") for key, name in named.items()}
    return {**words, "held_arrays": held, "hide": bool(hide)}


def holds_split(path: Path) -> bool:
    """Whether a saved graph has held edges beside it."""
    return "links/undirected" in store.read_meta(path)["arrays"]
