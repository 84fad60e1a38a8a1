"""What a call of a module may change in it, and how it is set back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def bytes_of_state(module: nn.Module) -> int:
    """The bytes of all tensors of a module but its parameters."""
    return sum(tensor.nbytes for tensor in _tensors(module))


@contextmanager
def untouched(module: nn.Module) -> Iterator[None]:
    """Set buffers, attributes, and what lists and dicts among these hold, back to what they were."""
    attributes = [(vars(child), dict(vars(child))) for child in module.modules()]
    holders = [held for _, values in attributes for held in values.values() if isinstance(held, list | dict | set)]
    contents = [copy.copy(holder) for holder in holders]
    values = [(tensor, tensor.clone()) for tensor in _tensors(module)]
    try:
        yield
    finally:
        for holder, content in [*attributes, *zip(holders, contents, strict=True)]:
            _set_back(holder, content)
        for tensor, value in values:
            if not tensor.equal(value):
                tensor.copy_(value)


def _set_back(holder: Any, content: Any) -> None:
    holder.clear()
    (holder.extend if isinstance(holder, list) else holder.update)(content)


def _tensors(module: nn.Module) -> list[Tensor]:
    own = [value for child in module.modules() for value in vars(child).values() if isinstance(value, Tensor)]
    return [*module.buffers(), *own]
