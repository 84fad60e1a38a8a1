"""The one model of PyG in a module that does not say what its layers are: it answers with rows that are ready."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist.batches.seed_batch import Neighbourhood, Promise
from lightning_gnn_dist.extensions.ready_made.layers import layers_of
from lightning_gnn_dist.layers.model_layers import ModelLayers, is_compiled, is_watched


class FoundLayers(ModelLayers):
    """The layers of such a model. The module may give it other rows than the graph's."""

    is_found: ClassVar[bool] = True

    @classmethod
    def of(cls, module: nn.Module) -> FoundLayers | None:
        """Return those in a module; None if it has several models, or one that is compiled, watched or lazy."""
        found = [child for child in module.modules() if isinstance(child, BasicGNN)]
        if len(found) != 1 or any(map(is_compiled, module.modules())):
            return None
        if any(is_watched(child) for child in found[0].modules() if child is not found[0]):
            return None
        if any(map(is_lazy, found[0].parameters())):  # the first rows that it sees decide on its shape
            return None
        return cls(found[0], layers_of(found[0]), None)

    def let_answer(self) -> Callable[[], None]:
        """Let the model answer with ready rows where it is called with a promised batch. Return what undoes it.

        The answer is a method, so that a copy of the model, or a pickled one, computes for itself.
        """
        owner = self.owner
        own = owner.__dict__.get("forward")
        before = None if getattr(own, "is_answer", False) else own  # of an evaluation that was left, or runs beside

        def forward(self: BasicGNN, *args: Any, **kwargs: Any) -> Tensor:
            run = partial(type(self).forward, self) if before is None else before
            neighbourhood = _neighbourhood_of(*args, **kwargs)
            rows = None if neighbourhood is None else neighbourhood.rows_of(self)
            if neighbourhood is None or rows is None:
                result: Tensor = run(*args, **kwargs)
                return result
            return Promise(lambda: run(*args, **kwargs), lambda: rows()[0], neighbourhood.num_seeds[None])

        forward.is_answer = True  # type: ignore[attr-defined]
        answer = MethodType(forward, owner)
        owner.forward = answer

        def undo() -> None:
            if owner.__dict__.get("forward") is answer:
                del owner.forward
                if before is not None:
                    owner.forward = before

        return undo


def _neighbourhood_of(*args: Any, **kwargs: Any) -> Neighbourhood | None:
    """Return the neighbourhood that a model is called with, if it is called with its promises and nothing else."""
    given = [*args, *kwargs.values()]
    if len(given) != 2 or not all(isinstance(item, Promise) and isinstance(item.origin, tuple) for item in given):
        return None
    (first, x), (second, edges) = (item.origin for item in given)
    is_asked = (x, edges) == ("x", "edge_index") and first is second and {*kwargs} <= {"x", "edge_index"}
    return first if is_asked else None
