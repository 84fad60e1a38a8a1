"""Where training batches are made: in RAM, or on the device that trains."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.device import KINDS, DeviceSampler, draws_anywhere
from lightning_gnn_dist.sampling.lane import Lane

log = logging.getLogger(__name__)

SampleOn: TypeAlias = Literal["auto", "cpu", "device"]
MOST_OF_FREE = 0.5  # of a device's free memory; the rest is for the model and its batches

# By the graph in RAM: when nobody holds that any more, its copy goes too.
_COPIES: weakref.WeakKeyDictionary[Graph, dict[torch.device, Graph]] = weakref.WeakKeyDictionary()


def check_sample_on(sample_on: SampleOn, sampler: Sampler) -> None:
    if sample_on not in get_args(SampleOn):
        raise ValueError(f"sample_on must be one of {list(get_args(SampleOn))}, got {sample_on!r}.")
    if sample_on == "device" and not draws_anywhere(sampler):
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise ValueError(
            f'sample_on="device" needs a sampler that draws there ({kinds}), got {sampler!r}: choose one, or '
            'sample_on="auto".'
        )


def lane_to(device: torch.device) -> Lane | None:
    """The way of batches to a device. None: nothing is gained by one."""
    if device.type != "cuda":
        return None
    return Lane(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))


def free_bytes(device: torch.device) -> int:
    """Memory of a CUDA device that nobody uses, with what torch keeps there for later."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


@dataclass(frozen=True)
class Placement:
    """Decides where the batches of a graph are sampled and gathered.

    Args:
        device: The device that trains.
        sample_on: ``"device"`` there, ``"cpu"`` in RAM; ``"auto"`` there if it is a GPU, the sampler draws there and
            the graph takes at most half of its free memory.
        free_bytes: How much of that there is.
    """

    device: torch.device
    sample_on: SampleOn
    free_bytes: Callable[[torch.device], int] = free_bytes

    def of(self, graph: Graph, sampler: Sampler) -> tuple[Graph, Sampler]:
        """The graph where it is to be sampled, and the sampler that draws the same batches there."""
        if self.sample_on == "cpu" or (self.sample_on == "auto" and not self._is_better(graph, sampler)):
            return graph, sampler
        return self._copy(graph), DeviceSampler(sampler)  # type: ignore[arg-type]  # it looks itself

    def _is_better(self, graph: Graph, sampler: Sampler) -> bool:
        if self.device.type != "cuda" or not draws_anywhere(sampler):
            return False
        if self.device in _COPIES.get(graph, {}):
            return True
        free = self.free_bytes(self.device)
        fits = graph.num_bytes <= MOST_OF_FREE * free
        if not fits:
            log.info(
                "Batches are sampled in RAM: the graph has %.1f GB, and of the %.1f GB that are free on %s it may take "
                "%.0f %%.",
                graph.num_bytes / 1e9,
                free / 1e9,
                self.device,
                100 * MOST_OF_FREE,
            )
        return fits

    def _copy(self, graph: Graph) -> Graph:
        copies = _COPIES.setdefault(graph, {})
        if self.device not in copies:
            lane = lane_to(self.device)
            with nullcontext() if lane is None else lane.open():  # the stream that will read it
                copies[self.device] = _moved(graph, self.device)
            log.info("Batches are sampled on %s, from a copy of %.1f MB.", self.device, graph.num_bytes / 1e6)
        return copies[self.device]


def release(graph: Graph) -> None:
    """Forget the copies of a graph that stays in RAM."""
    _COPIES.pop(graph, None)


def _moved(graph: Graph, device: torch.device) -> Graph:
    def moved(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: array.to(device) for name, array in arrays.items()}

    return Graph(graph.indptr.to(device), graph.indices.to(device), moved(graph.node_arrays), moved(graph.edge_arrays))
