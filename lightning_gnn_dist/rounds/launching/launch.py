"""How ranks are started on a host without torchrun or SLURM.

A script is run again for each rank. Where there is none to run again, as in a notebook, all ranks are fresh processes
that get the model, the data module and the callbacks by value, and give back what rank 0 has at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from lightning_gnn_dist.checks import check_choice, check_durations, shown
from lightning_gnn_dist.wire import collectives

StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True)
class Launch:
    """How ranks are started, how they exchange, and how long they wait for each other.

    Args:
        timeout: How long a collective may take before the ranks give up.
        start_timeout: How long the ranks wait for each other at the start. After it, the ranks that are there end and
            name those that are missing.
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch. Default: the one that fits the device.
        start_method: How ranks are started when no launcher (torchrun, SLURM) did. ``"popen"`` runs the script again
            for each. ``"forkserver"`` and ``"spawn"`` start fresh processes that get the model, the data module and the
            callbacks by value (the first imports the package once for all fits); ``"fork"`` copies this process.
            Default: ``"popen"`` for a script; in a notebook, at a prompt, and for ``python -c`` ``"forkserver"``, but
            on GPUs and on macOS ``"spawn"``. Ranks on GPUs are never forked.
    """

    timeout: timedelta = timedelta(minutes=30)
    start_timeout: timedelta = timedelta(minutes=10)
    backend: str | None = None
    start_method: StartMethod | None = None

    def __post_init__(self) -> None:
        check_durations(timeout=self.timeout, start_timeout=self.start_timeout)
        if self.start_method is not None:
            check_choice("start_method", self.start_method, StartMethod)
        name = self.backend
        if name is not None and not (isinstance(name, str) and name and collectives.has_backend(name)):
            raise ValueError(
                'backend must be "gloo", "nccl" or another that this torch was built with, or None for what fits the '
                f"device, got {shown(name)}."
            )
