"""Ranks of a command that is no training meet, where torchrun has started them."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from lightning_gnn_dist.wire.addresses import kept_on_host
from lightning_gnn_dist.wire.channel import note_host
from lightning_gnn_dist.wire.collectives import is_joined
from lightning_gnn_dist.wire.launching.roll_call import Roll

_START = timedelta(minutes=10)
_PATIENCE = timedelta(days=1)  # ranks that sort their own wait for nobody, and may take hours longer than others


def join_torchrun() -> bool:
    """Make the group of all ranks that torchrun has started, and return whether these are several. Collective."""
    if not dist.is_torchelastic_launched() or os.environ["WORLD_SIZE"] == "1":
        return False
    if not is_joined():
        rank, num_ranks, num_hosts = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "GROUP_WORLD_SIZE"))
        roll = Roll(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, num_ranks, _START, num_hosts)
        store = roll.call()
        with kept_on_host(roll.on_one_host):
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_PATIENCE)
        note_host()
    return True
