"""Rows of a table that lie elsewhere than its parameter, whose gradient is that of the parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


class _LookedUp(torch.autograd.Function):
    """An embedding with sparse gradients."""

    @staticmethod
    def forward(ctx: Any, parameter: nn.Parameter, rows: Tensor, places: Tensor, ids: Tensor) -> Tensor:
        ctx.shape = parameter.shape
        ctx.save_for_backward(ids)
        return functional.embedding(places, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        values = gradient.reshape(-1, ctx.shape[1])  # as torch's own: a row for each id, though some may be there twice
        indices = ids.long().reshape(1, -1)
        return torch.sparse_coo_tensor(indices, values, ctx.shape, check_invariants=False), None, None, None


def looked_up(parameter: nn.Parameter, rows: Tensor, places: Tensor, ids: Tensor) -> Tensor:
    """Return ``rows[places]``, which are the rows of ``ids`` in the table that ``parameter`` stands for."""
    found: Tensor = _LookedUp.apply(parameter, rows, places, ids)  # type: ignore[no-untyped-call]
    return found
