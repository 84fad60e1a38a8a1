"""How a saved split tells of labels: in arrays, as all that lies beside a graph does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAME, _HIDE = "labels", "hide"


def labels_to_save(name: str, held: Mapping[str, Mapping[str, Tensor]], *, hide: bool) -> dict[str, Tensor]:
    """The arrays that :func:`saved_labels` reads."""
    arrays = {f"links/{split}/{array}": rows for split, of in held.items() for array, rows in of.items()}
    arrays[f"links/{_NAME}"] = torch.tensor(list(name.encode()), dtype=torch.uint8)
    return arrays | {f"links/{_HIDE}": torch.tensor([hide])}


def saved_labels(links: dict[str, Tensor], splits: Iterable[str], path: Path) -> dict[str, Any]:
    """Take out of a saved split's arrays what a ``LinkSplit`` is told of labels; nothing where it has none."""
    if _NAME not in links:
        return {}
    name, hide = links.pop(_NAME), links.pop(_HIDE, torch.empty(0))
    if name.dtype != torch.uint8 or hide.dtype != torch.bool or hide.numel() != 1:
        raise ValueError(f"{path} is damaged (links/{_NAME} or links/{_HIDE} cannot be read). Copy or save it again.")
    held: dict[str, dict[str, Tensor]] = {split: {} for split in splits}
    for key in list(links):
        split, slash, array = key.partition("/")
        if slash and split in held:
            held[split][array] = links.pop(key)
    return {"labels": bytes(name.tolist()).decode(errors="replace"), "held_arrays": held, "hide": bool(hide)}
