"""Who brings what ranks do not have alike, and how the rest of torch and Lightning is told of it.

A module of the model that has a method ``replica_state(module)`` brings a :class:`~.meeting_hook.ReplicaState`, one of
a class for all that the LightningModule has of it. An embedding of torch with ``sparse=True`` brings that of its rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import nn

from lightning_gnn_dist.names import extension
from lightning_gnn_dist.rounds.meeting_hook import ReplicaState

_IGNORED = "_ddp_params_and_buffers_to_ignore"
_asks_nobody = [False]


def states_of(module: nn.Module) -> list[ReplicaState]:
    """Return what ranks do not have alike of a module, in the same order on every rank."""
    found: dict[type, ReplicaState] = {}
    for child in module.modules():
        bring = getattr(child, "replica_state", None)
        if bring is None and getattr(child, "sparse", False) is True and "weight" in child._parameters:
            bring = extension("sparse rows")
        if bring is not None:
            state = bring(module)
            found.setdefault(type(state), state)
    return [*found.values()]


@contextmanager
def asking_nobody() -> Iterator[None]:
    """In the block, ``state_dict()`` has what lies here: modules ask no rank, and make nothing."""
    _asks_nobody.append(True)
    try:
        yield
    finally:
        _asks_nobody.pop()


def asks_nobody() -> bool:
    """Return whether such a block runs."""
    return _asks_nobody[-1]


def hide_from_ddp(module: nn.Module, names: Collection[str]) -> None:
    """Let DDP, and Lightning where it makes replicas equal, ignore parameters and buffers, by any name of theirs."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    hidden = {id(each) for name, each in named if name in names}
    ignored = [name for name, each in named if id(each) in hidden]
    show_to_ddp(module)
    if ignored:
        vars(module)[_IGNORED] = ignored


def show_to_ddp(module: nn.Module) -> None:
    """Undo :func:`hide_from_ddp`."""
    vars(module).pop(_IGNORED, None)
