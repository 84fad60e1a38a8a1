"""What the figures were measured on, and how fast its memory and its bus are."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from typing import Any

import torch
from gpu_parts.common import (
    DEVICE,
    IN_RAM,
    IS_PRETENDED,
    SCALES,
    Scale,
    attached,
    data_of,
    least_seconds,
    made_graph,
)
from gpu_parts.rows import Rows
from harness import machine

BYTES = 1 << 30
BYTES_SMALL = 1 << 20


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    properties = torch.cuda.get_device_properties(DEVICE)
    memory = f"{properties.total_memory / 1e9:.0f} GB, {torch.cuda.device_count()} of them"
    rows.add("device", properties.name, note=f"{memory}{', pretended' if IS_PRETENDED else ''}")
    rows.add("torch", torch.__version__, note=f"CUDA {torch.version.cuda}, driver {driver()}")
    rows.add("host", machine(), note=f"this process may use {len(os.sched_getaffinity(0))} cores")
    start = time.perf_counter()
    next(iter(attached(data_of(made_graph(SCALES["small"], 1), SCALES["small"], IN_RAM))))
    rows.add("the first batch of all", time.perf_counter() - start, "s", note="with loops compiled, if they were not")
    num_bytes = BYTES if scale == Scale() else BYTES_SMALL
    source = torch.ones(num_bytes // 4, device=DEVICE)
    target = torch.empty_like(source)
    seconds = least_seconds(lambda: target.copy_(source), scale.repeats)
    rows.add("a copy within the device, read and written", 2 * num_bytes / seconds / 1e9, "GB/s")
    for name, is_pinned in (("page-locked", True), ("plain", False)):
        host = torch.ones(num_bytes // 4, pin_memory=is_pinned)
        seconds = least_seconds(lambda host=host: target.copy_(host, non_blocking=True), scale.repeats)
        rows.add(f"a copy to the device from {name} memory", num_bytes / seconds / 1e9, "GB/s")


def driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown, as there is no nvidia-smi"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return said.stdout.strip().split("\n")[0] or "unknown"
