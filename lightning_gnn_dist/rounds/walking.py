"""What of a module trains, and whether it may have learned rows of nodes."""

from __future__ import annotations

from collections.abc import Container

from torch import nn


def trained_parameters(module: nn.Module, but: Container[int] = ()) -> list[nn.Parameter]:
    """Return the parameters that require gradients, but for those of some ``id()``, in the same order on every rank."""
    return [each for each in module.parameters() if each.requires_grad and id(each) not in but]


def has_tables(module: nn.Module) -> bool:
    """Return whether a module may have learned rows of nodes: embeddings with ``sparse=True``."""
    return any(getattr(child, "sparse", False) is True and "weight" in child._parameters for child in module.modules())
