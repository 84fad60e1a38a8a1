"""Ranks that take themselves for those of several hosts, all on this one: a launcher's variables say who shares one."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl

from tests.data_fitting import trainer


def trainer_on_hosts(rank: int, world_size: int, hosts: int, strategy: Any, **options: Any) -> pl.Trainer:
    """A Trainer of so many hosts, on the rank of `run_ranks` that calls it."""
    devices = world_size // hosts
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = map(str, divmod(rank, devices))
    return trainer(devices, strategy, num_nodes=hosts, **options)
