"""What ranks must have alike before they train: the graph, its arrays and the parts; and whether processors are."""

from __future__ import annotations

import zlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from lightning.pytorch import Trainer

from lightning_gnn_dist.rounds.lightning_internals import datamodule_of
from lightning_gnn_dist.wire import collectives

_ACCURACY = 1e-4  # to which ranks compare sums of features
_RUN_ONCE_PER_RANK = (
    "Lightning runs the script once per rank, so what is drawn without a seed (a split, a graph, features) differs "
    "from rank to rank: call lightning.seed_everything(0) first, or save the graph once and give its path."
)


class Premises(NamedTuple):
    """What ranks must have alike, each as an integer of 48 bits; 0 where the data module does not say."""

    graph: int
    arrays: int
    parts: int
    value: int
    other_value: int


def premises_of(trainer: Trainer) -> Premises:
    """Return this rank's premises."""
    data = datamodule_of(trainer)
    digests = getattr(data, "digests", {})
    said = getattr(data, "fingerprint", "0"), digests.get("arrays", "0"), digests.get("parts", "0")
    graph, arrays, parts = (int(digest[:12], 16) for digest in said)
    first, second = (round(value / _ACCURACY) for value in digests.get("values", (0.0, 0.0)))
    return Premises(graph, arrays, parts, first, second)


def check_ranks(trainer: Trainer, device: torch.device) -> bool:
    """Refuse ranks with different data; return whether their processors are of different kinds. Collective."""
    rows = collectives.gather_numbers([*premises_of(trainer), processor_of(device)], device)
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
