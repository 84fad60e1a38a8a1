"""Where batches are made: in RAM, or on the device that trains."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from lightning.pytorch import Trainer
from torch import Tensor

from lightning_gnn_dist.batches.device_memory import free_bytes
from lightning_gnn_dist.batches.device_stream import DeviceStream
from lightning_gnn_dist.checks import check_choice
from lightning_gnn_dist.graph.graph import Graph, checked_graph
from lightning_gnn_dist.graph.memo import memory_of, of_all_graphs, remembered
from lightning_gnn_dist.graph.storage.mapped import WINDOW_BYTES, Map, MappedRows, all_maps
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.device import KINDS, bytes_of_tables, drawn_there, draws_anywhere

log = logging.getLogger(__name__)

SampleOn: TypeAlias = Literal["auto", "cpu", "device"]
MOST_OF_FREE = 0.5  # share of the memory free without them that all copies on a device may take

COPIES = "copies on devices"  # remembered for the graph in RAM, so they are freed together with it


def check_sample_on(sample_on: SampleOn, *samplers: Sampler | None) -> None:
    """Refuse an unknown ``sample_on``, and samplers that cannot draw on a device if they have to. None is skipped."""
    check_choice("sample_on", sample_on, SampleOn)
    for sampler in samplers:
        if sample_on == "device" and sampler is not None and not draws_anywhere(sampler):
            kinds = ", ".join(kind.__name__ for kind in KINDS)
            raise ValueError(
                f'sample_on="device" needs a sampler that draws there ({kinds}), got {sampler!r}: choose one, or '
                'sample_on="auto".'
            )


def device_of(trainer: Trainer | None) -> torch.device:
    """The device that trains; the CPU without a trainer."""
    return trainer.strategy.root_device if trainer is not None else torch.device("cpu")


def stream_to(device: torch.device) -> DeviceStream | None:
    """A stream that brings batches to a CUDA device; None for another device, which needs none."""
    if device.type != "cuda":
        return None
    return DeviceStream(device if device.index is not None else torch.device("cuda", torch.cuda.current_device()))


@dataclass(frozen=True)
class Placement:
    """Decides where the batches of a graph are sampled and gathered.

    Args:
        device: The device that trains.
        sample_on: ``"device"`` for that device, ``"cpu"`` for RAM; ``"auto"`` for the device if it is a GPU, the
            sampler can draw there and all graphs there take at most half of the memory that is free without them.
        free_bytes: Returns how many bytes of a device are free.
        expected_bytes: Bytes of that half that are left for graphs still to come.
    """

    device: torch.device
    sample_on: SampleOn
    free_bytes: Callable[[torch.device], int] = free_bytes
    expected_bytes: int = 0

    def of(self, graph: Graph, sampler: Sampler) -> tuple[Graph, Sampler]:
        """The graph or its copy on the device, and a sampler that draws the same batches from it."""
        if self.sample_on == "device" and self.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f'sample_on="device" draws on CUDA devices, and this trainer computes on {self.device.type}: leave it '
                'out, or give sample_on="cpu".'
            )
        if self.sample_on == "cpu" or (self.sample_on == "auto" and not self._is_better(graph, sampler)):
            return graph, sampler
        return self._copy(graph), drawn_there(sampler, graph)

    def _is_better(self, graph: Graph, sampler: Sampler) -> bool:
        if self.device.type != "cuda" or not draws_anywhere(sampler):
            return False
        if self.device in _copies_of(graph):
            return True
        held: int = sum(copies[self.device].num_bytes for copies in of_all_graphs(COPIES) if self.device in copies)
        free = self.free_bytes(self.device) + held
        others = max(held, self.expected_bytes)
        needed = graph.num_bytes + bytes_of_tables(sampler, graph)
        fits = needed + others <= MOST_OF_FREE * free
        if not fits:
            log.info(
                "Batches are sampled in RAM: the graph takes %.1f GB, others have %.1f GB, and of the %.1f GB that are "
                "free on %s without them they may take %.0f %%.",
                needed / 1e9,
                others / 1e9,
                free / 1e9,
                self.device,
                100 * MOST_OF_FREE,
            )
        return fits

    def _copy(self, graph: Graph) -> Graph:
        copies = _copies_of(graph)
        if self.device not in copies:
            stream = stream_to(self.device)
            with nullcontext() if stream is None else stream.open():  # the stream that will read the copy
                copies[self.device] = _moved(graph, self.device)
            log.info("Batches are sampled on %s, from a copy of %.1f MB.", self.device, graph.num_bytes / 1e6)
        return copies[self.device]


def release(graph: Graph) -> None:
    """Drop the copies of a graph on devices; the graph in RAM stays."""
    with memory_of(graph) as known:
        known.pop(COPIES, None)


def _copies_of(graph: Graph) -> dict[torch.device, Graph]:
    return remembered(graph, COPIES, dict)


def _moved(graph: Graph, device: torch.device) -> Graph:
    maps = all_maps()
    indptr, indices = (_brought(array, device, maps) for array in (graph.indptr, graph.indices))
    nodes = {name: _brought(array, device, maps) for name, array in graph.node_arrays.items()}
    edges = {name: _brought(array, device, maps) for name, array in graph.edge_arrays.items()}
    return checked_graph(indptr, indices, nodes, edges)  # a copy is never asked for its fingerprint


def _brought(array: Tensor, device: torch.device, maps: list[Map]) -> Tensor:
    """The array on the device. Of a mapped array, no more than a window is in RAM at a time."""
    source = MappedRows(array, maps)
    if not source.is_read_from_file:
        return array.to(device)
    out = torch.empty_like(array, device=device)
    rows_at_once = max(1, WINDOW_BYTES // max(1, array[:1].nbytes))
    for to, piece in zip(out.split(rows_at_once), array.split(rows_at_once), strict=True):
        to.copy_(piece)
        source.release()
    return out
