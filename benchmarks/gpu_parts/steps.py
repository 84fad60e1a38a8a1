"""A training step alone, on a batch that is on the device: GraphSAGE of three layers, in several precisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_parts.common import (
    IN_RAM,
    IS_PRETENDED,
    Net,
    Scale,
    Training,
    TrimmedNet,
    attached,
    data_of,
    least_seconds,
    made_graph,
)
from gpu_parts.rows import Rows
from torch.profiler import ProfilerActivity, profile

STEPS = 10
NETS: dict[str, Any] = {
    "block.adj": Net,
    "block.edge_index": partial(Net, form="edge_index"),
    "edge_index, trimmed": TrimmedNet,
}
PRECISIONS = {"float32": None, "float32 in tf32": None, "bfloat16": torch.bfloat16}


def measure(rows: Rows, scale: Scale, out: Path) -> None:
    data = data_of(made_graph(scale, 2), scale, IN_RAM)
    batch = next(iter(attached(data)))
    rows.add("the batch", f"{batch.num_nodes:,} nodes, {batch.num_edges:,} edges")
    for form, make in NETS.items():
        for name, dtype in PRECISIONS.items():
            with rows.guarded(f"{form}, {name}"), tensor_cores(name.endswith("tf32")):
                training = Training(make(scale), dtype)
                seconds = least_seconds(lambda training=training: several(training, batch), scale.repeats) / STEPS
                note = f"loss {float(training.step(batch)):.4f} after as many steps"
                rows.add(f"{form}, {name}", 1e3 * seconds, "ms a step", note=note)
                with (out / "profile.txt").open("a") as file:
                    file.write(f"{form}, {name}\n{kernels(training, batch)}\n\n")


def several(training: Training, batch: Any) -> None:
    for _ in range(STEPS):
        training.step(batch)


@contextmanager
def tensor_cores(is_on: bool) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if is_on else "highest")
    yield
    torch.set_float32_matmul_precision(before)


def kernels(training: Training, batch: Any) -> str:
    """The operators that take longest."""
    more = [] if IS_PRETENDED else [ProfilerActivity.CUDA]
    with profile(activities=[ProfilerActivity.CPU, *more]) as watched:
        several(training, batch)
    order = "self_cpu_time_total" if IS_PRETENDED else "self_device_time_total"
    return str(watched.key_averages().table(sort_by=order, row_limit=15, max_name_column_width=60))
