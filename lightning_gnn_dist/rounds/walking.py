"""All modules, parameters and buffers of a module: what torch's own walks give, in their order, several times as fast.

Ranks ask at every meeting and at some steps. In between a user may freeze, replace or add parts, so nothing is kept but
the modules of a module while it is :func:`unchanged`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from torch import Tensor, nn

Kind = TypeVar("Kind", bound=Tensor)
_known: dict[int, list[nn.Module]] = {}  # of modules that are unchanged


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """Walk through the module once for the whole block, in which nobody gives it other children."""
    _known[id(module)] = modules_of(module)
    try:
        yield
    finally:
        _known.pop(id(module), None)


def modules_of(module: nn.Module) -> list[nn.Module]:
    """Return what ``module.modules()`` yields."""
    if id(module) in _known:
        return [*_known[id(module)]]
    found: dict[int, nn.Module] = {}
    left = [module]
    while left:
        each = left.pop()
        if id(each) in found:
            continue
        if type(each).named_modules is nn.Module.named_modules:
            found[id(each)] = each
            left += [child for child in reversed(each._modules.values()) if child is not None]
        else:  # a class of its own says which they are
            found.update((id(child), child) for child in each.modules() if id(child) not in found)
    return list(found.values())


def parameters_of(module: nn.Module) -> list[nn.Parameter]:
    """Return what ``module.parameters()`` yields."""
    own = type(module)
    if own.parameters is not nn.Module.parameters or own.named_parameters is not nn.Module.named_parameters:
        return list(module.parameters())
    return _each_once(child._parameters for child in modules_of(module))


def trained_parameters(module: nn.Module, but: Container[int] = ()) -> list[nn.Parameter]:
    """Return the parameters that require gradients, but for those of some ``id()``, in the same order on every rank."""
    return [each for each in parameters_of(module) if each.requires_grad and id(each) not in but]


def has_tables(module: nn.Module) -> bool:
    """Return whether a module may have learned rows of nodes: embeddings with ``sparse=True``."""
    return any(
        getattr(child, "sparse", False) is True and "weight" in child._parameters for child in modules_of(module)
    )


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Return what ``module.buffers()`` yields."""
    own = type(module)
    if own.buffers is not nn.Module.buffers or own.named_buffers is not nn.Module.named_buffers:
        return list(module.buffers())
    return _each_once(child._buffers for child in modules_of(module))


def _each_once(groups: Iterable[Mapping[str, Kind | None]]) -> list[Kind]:
    return list({id(each): each for group in groups for each in group.values() if each is not None}.values())
