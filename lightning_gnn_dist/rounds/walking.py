"""What of a module trains."""

from __future__ import annotations

from collections.abc import Container

from torch import nn


def trained_parameters(module: nn.Module, but: Container[int] = ()) -> list[nn.Parameter]:
    """Return the parameters that require gradients, but for those of some ``id()``, in the same order on every rank."""
    return [each for each in module.parameters() if each.requires_grad and id(each) not in but]
