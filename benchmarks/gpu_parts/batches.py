"""What a batch costs by each way to the device, in time and in bytes over the bus."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_parts.common import (
    DEVICE,
    IN_RAM,
    IS_PRETENDED,
    Scale,
    attached,
    data_of,
    least_seconds,
    made_graph,
    on_device,
    peak_since_last,
    places,
    seconds_a_batch,
)
from gpu_parts.rows import Rows
from torch.profiler import ProfilerActivity, profile

from lightning_gnn_dist import Graph, Loading

PLAIN = "made in RAM, then batch.to() from plain memory"


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    graph = made_graph(scale, scale.pass_batches)
    with rows.guarded("gathering"):
        gathering(rows, scale, graph)
    for name, loading in places().items():
        with rows.guarded(name):
            of_way(rows, scale, graph, name, loading)
    with rows.guarded(PLAIN):
        of_way(rows, scale, graph, PLAIN, IN_RAM, accelerator="cpu")


def gathering(rows: Rows, scale: Scale, graph: Graph) -> None:
    """As many rows as a batch has, gathered on the device."""
    number = min(graph.num_nodes, 400_000)
    x, ids = graph.node_arrays["x"].to(DEVICE), torch.randperm(graph.num_nodes, device=DEVICE)[:number]
    seconds = least_seconds(lambda: x.index_select(0, ids), scale.repeats)
    moved = 2 * number * x[0].nbytes / seconds / 1e9
    rows.add(f"gathering {number:,} rows on the device", 1e3 * seconds, "ms", note=f"{moved:,.0f} GB/s")


def of_way(rows: Rows, scale: Scale, graph: Graph, name: str, loading: Loading, accelerator: str = "gpu") -> None:
    data = data_of(graph, scale, loading)
    loader = attached(data, accelerator)
    seconds_a_batch(on_device(loader), id, scale.seconds)
    seconds = min(seconds_a_batch(on_device(loader), id, scale.seconds) for _ in range(scale.repeats))
    rows.add(name, 1e3 * seconds, "ms a batch", note=peak_since_last())
    taken = 0

    def count(_: object) -> None:
        nonlocal taken
        taken += 1

    moved = bytes_to_device(lambda: seconds_a_batch(on_device(loader), count, scale.seconds))
    rate = moved / taken / seconds / 1e9
    rows.add(f"{name}, over the bus", moved / taken / 1e6, "MB a batch", note=f"{rate:.2f} GB/s")
    data.teardown("fit")


def bytes_to_device(run: Callable[[], object]) -> int:
    """Bytes that are copied from RAM to the device meanwhile, by any thread."""
    if IS_PRETENDED:
        from pretend import lib

        before = lib.counts(False).get("H2D bytes", 0)
        run()
        moved: int = lib.counts(False).get("H2D bytes", 0) - before
        return moved
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        run()
    with tempfile.TemporaryDirectory() as folder:
        watched.export_chrome_trace(str(Path(folder) / "trace.json"))
        events = json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if "HtoD" in event.get("name", "") and "bytes" in event.get("args", {})]
    return sum(int(event["args"]["bytes"]) for event in copies)
