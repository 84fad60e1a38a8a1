"""Whether ranks train the same model in the same way: they compare weights, and the settings of optimizers.

A hook that acts on one rank, or a search that draws a learning rate on each rank by itself, makes replicas part.
Without an error such a fit ends well, and with a model that nobody asked for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.collectives import checksum

_MOST_NAMES = 3  # that an error lists
_WAY_OUT = (
    "Ranks train one model together: change weights and learning rates on all ranks alike, and let rank 0 choose what "
    "is drawn (trainer.strategy.broadcast(value) gives the others its choice). Lightning runs a script once per rank, "
    "so a search of settings in it draws other trials on other ranks: let ranks begin inside each fit, with "
    'launch=Launch(start_method="forkserver"), or run each trial as a script of its own.'
)


@dataclass(frozen=True)
class Replica:
    """What this rank trains.

    Attributes:
        tensors: Weights, and buffers if all ranks have the same, by name.
        optimizers: The optimizers, in the same order on every rank.
    """

    tensors: Mapping[str, Tensor]
    optimizers: Sequence[Optimizer]

    def check(self, device: torch.device) -> None:
        """Refuse ranks that differ, and name what does. Collective."""
        if collectives.world_size() > 1:
            self.compare([number for (number,) in collectives.gather_numbers([self.checksum()], device)])

    def checksum(self) -> int:
        """Return a number that differs where replicas do, for an exchange that is there anyway; 0 on a rank alone."""
        if collectives.world_size() == 1:
            return 0
        settings = zlib.crc32(json.dumps([*_settings(self.optimizers)]).encode())
        return (checksum(self.tensors.values()) * 31 + settings) % (1 << 62)

    def compare(self, checksums: Sequence[int]) -> None:
        """Refuse ranks whose checksums differ, given those of all. Collective then: all ranks see the same numbers."""
        if len({*checksums}) == 1:
            return
        own = {(name, at): value for name, at, value in _settings(self.optimizers)}
        own |= {(name, ""): checksum([tensor]) for name, tensor in self.tensors.items()}
        ranks = collectives.gather_objects(own, everywhere=True) or []
        told = [_difference(rank, each, ranks[0]) for rank, each in enumerate(ranks)]
        raise RuntimeError(" ".join([*filter(None, told), _WAY_OUT]))


def _difference(rank: int, own: Mapping[tuple[str, str], Any], first: Mapping[tuple[str, str], Any]) -> str:
    """Return a sentence that says how a rank differs from rank 0, empty if it does not."""
    differing = [key for key in {**first, **own} if own.get(key) != first.get(key)]
    settings = [(key[0], key[1], own.get(key), first.get(key)) for key in differing if key[1]]
    if settings:
        told = (f"{name}={here} in {at}, rank 0 has {there}" for name, at, here, there in settings[:_MOST_NAMES])
        return f"Rank {rank} has {'; '.join(told)}."
    more = f" and {len(differing) - _MOST_NAMES} more" if len(differing) > _MOST_NAMES else ""
    names = ", ".join(name for name, _ in differing[:_MOST_NAMES])
    return f"Rank {rank}'s weights of {names}{more} differ from rank 0's." if differing else ""


def _settings(optimizers: Sequence[Optimizer]) -> Iterator[list[Any]]:
    """Yield the name, the place and the value of each setting of the optimizers, the learning rate first."""
    for number, optimizer in enumerate(optimizers):
        yield ["class", f"optimizer {number}", type(optimizer).__name__]
        for place, group in enumerate(optimizer.param_groups):
            at = f"optimizer {number}" + (f", group {place}" if len(optimizer.param_groups) > 1 else "")
            for name in sorted(group.keys() - {"params"}, key=lambda name: (name != "lr", name)):
                yield [name, at, _plain(group[name])]


def _plain(value: Any) -> str:
    """Return a text that is the same on all ranks for values that are."""
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, list | tuple):
        return str([_plain(each) for each in value])
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__name__
