"""What benchmarks share: the machine that they ran on, runs in a file, memory as Linux counts it, a model by layers."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import through_layers


def machine() -> str:
    """The processor, its cores, the memory, and how busy all of it is: the first line that a benchmark prints."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")] or [platform.machine()]
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return f"{model[0]}, {os.cpu_count()} cores, {gigabytes:.0f} GB; load {os.getloadavg()[0]:.1f}"


def keep(file: Path | None, run: dict[str, Any]) -> None:
    """Append a run to the file of ``--out``, if there is one, as a line of JSON."""
    if file is not None:
        with file.open("a") as lines:
            lines.write(json.dumps(run) + "\n")


def held(kind: str) -> int:
    """Bytes of a kind of /proc/self/status: RssAnon (without files), VmRSS, VmHWM (its peak), VmData, VmSize."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[kind].split()[0]) * 1024


class Peak:
    """The most memory of a kind that this process held, beyond what it had when it began to look."""

    def __init__(self, kind: str) -> None:
        self._kind, self._before, self._most = kind, held(kind), 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(0.01):
            self._most = max(self._most, held(self._kind) - self._before)

    def stop(self) -> int:
        """Bytes."""
        self._stopped.set()
        self._thread.join()
        return self._most


class LayeredSAGE(pl.LightningModule):
    """GraphSAGE as a list of layers, of which one follows the other.

    Args:
        widths: Numbers in a row before the first layer, and behind each.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.convs = nn.ModuleList(SAGEConv(before, behind) for before, behind in pairwise(widths))

    def layers(self) -> list[Any]:
        return [lambda batch, conv=conv: self.layer(conv, batch) for conv in self.convs]

    def layer(self, conv: nn.Module, batch: Any) -> Tensor:
        (block,) = batch.blocks
        rows: Tensor = conv((batch.x, batch.x[: block.num_dst]), block.adj)
        return rows if conv is self.convs[-1] else rows.relu()

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(through_layers(self, batch), batch.y[: batch.batch_size])
