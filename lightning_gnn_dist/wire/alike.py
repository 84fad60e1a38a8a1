"""What all ranks must have alike: the graph and its parts before they train; weights and optimizers while they do.

A hook that acts on one rank, or a search that draws a learning rate on each rank by itself, makes replicas part.
Without an error such a fit ends well, and with a model that nobody asked for.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.collectives import checksum

_ACCURACY = 1e-4  # to which ranks compare sums of features
_RUN_ONCE_PER_RANK = (
    "Lightning runs the script once per rank, so what is drawn without a seed (a split, a graph, features) differs "
    "from rank to rank: call lightning.seed_everything(0) first, or save the graph once and give its path."
)
_MOST_NAMES = 3  # that an error lists
_WAY_OUT = (
    "Ranks train one model together: change weights and learning rates on all ranks alike, and let rank 0 choose what "
    "is drawn (trainer.strategy.broadcast(value) gives the others its choice). Lightning runs a script once per rank, "
    "so a search of settings in it draws other trials on other ranks: let ranks begin inside each fit, with "
    'launch=Launch(start_method="fork"), or run each trial as a script of its own.'
)


class Premises(NamedTuple):
    """What ranks must have alike, each as an integer of 48 bits; 0 where the data module does not say."""

    graph: int
    arrays: int
    parts: int
    value: int
    other_value: int


def premises_of(data: object) -> Premises:
    """Return this rank's premises, as its data module says them."""
    digests: Mapping[str, Any] = getattr(data, "digests", {})
    said = getattr(data, "fingerprint", "0"), digests.get("arrays", "0"), digests.get("parts", "0")
    graph, arrays, parts = (int(digest[:12], 16) for digest in said)
    first, second = (round(value / _ACCURACY) for value in digests.get("values", (0.0, 0.0)))
    return Premises(graph, arrays, parts, first, second)


def check_ranks(data: object, device: torch.device) -> bool:
    """Refuse ranks with different data; return whether their processors are of different kinds. Collective."""
    rows = collectives.gather_numbers([*premises_of(data), processor_of(device)], device)
    check_same_premises([Premises(*row[:-1]) for row in rows])
    return len({row[-1] for row in rows}) > 1


def check_same_premises(ranks: list[Premises]) -> None:
    """Refuse ranks whose data differ. All ranks see the same numbers, so all of them raise or none."""
    if odd := odd_ones([rank.graph for rank in ranks]):
        raise ValueError(
            f"Ranks {odd} have another graph than rank 0: other edges, or other masks. {_RUN_ONCE_PER_RANK}"
        )
    others = odd_ones([rank.arrays for rank in ranks])
    first = ranks[0]
    for place, rank in enumerate(ranks):  # features that differ by more than the last digits
        if place not in others and max(abs(rank.value - first.value), abs(rank.other_value - first.other_value)) > 1:
            others.append(place)
    if others:
        raise ValueError(
            f"Ranks {sorted(others)} have other features, labels or further arrays than rank 0. {_RUN_ONCE_PER_RANK}"
        )
    if odd := odd_ones([rank.parts for rank in ranks]):
        raise ValueError(
            f"Ranks {odd} deal out the nodes otherwise than rank 0, so that some would be nobody's and others those of "
            "two: by another Partition, another result of the partitioner, another residency or another seed of the "
            "data module. Give all ranks the same. Make a Partition once and load it on all ranks, or call "
            "lightning.seed_everything(0) before it is drawn; a partitioner may depend on its fields, the graph, the "
            "number of parts and the seed alone."
        )


def odd_ones(numbers: list[int]) -> list[int]:
    """Return the ranks whose number differs from rank 0's."""
    return [rank for rank, number in enumerate(numbers) if number != numbers[0]]


def processor_of(device: torch.device) -> int:
    """Return a checksum of processor, threads and torch: with equal ones, results are equal in all digits."""
    found = [torch.__version__, torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()]
    with suppress(OSError):
        found += [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")][:1]
    if device.type == "cuda":
        found.append(torch.cuda.get_device_name(device))
    return zlib.crc32(repr(found).encode())


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
