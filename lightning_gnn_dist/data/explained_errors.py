"""Errors of a model that fails on its features, told in terms of the features."""

from __future__ import annotations

import re
import traceback

import torch
from torch import Tensor


def explain_features(exception: BaseException, x: Tensor | None) -> None:
    """Put what is wrong with the features ``x`` into the error of a layer: torch speaks of two matrices only.

    This cannot be checked before the model runs: a table of embeddings, for instance, takes integers.
    """
    if x is None:
        return
    text, places = str(exception), [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    is_theirs = bool(places) and places[-1].f_globals.get("__name__", "").startswith(("torch.", "torch_geometric."))
    if reason := _of_type(x, text) or _of_width(x, text) or (_of_shape(x) if is_theirs else None):
        exception.args = (f"{reason} ({' '.join(text.split())})",)


def _of_type(x: Tensor, text: str) -> str | None:
    if x.dtype == torch.float32 or not re.search(
        "same dtype|can't be cast|not supported for|not implemented for", text
    ):
        return None
    return (
        f"x holds {x.dtype}, and the model computes with another type: data.x = data.x.float() before "
        "Graph.from_pyg(data), or turn batch.x into what the model takes."
    )


def _of_width(x: Tensor, text: str) -> str | None:
    found = re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", text)
    if not found or x.dim() != 2 or int(found[1]) != x.shape[1]:
        return None
    return f"x has {found[1]} features, and a layer of the model takes {found[2]}: build it with {found[1]}."


def _of_shape(x: Tensor) -> str | None:
    if x.dim() == 2:
        return None
    way_out = "view(-1, 1)" if x.dim() == 1 else "flatten(1)"
    return (
        f"x has the shape {tuple(x.shape)}, and a layer takes a row of features for each node: "
        f"data.x = data.x.{way_out} before Graph.from_pyg(data), or give batch.x that shape."
    )
