"""A small fit in rounds, to hold laws of local SGD against."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

from lightning_gnn_dist.rounds.launchers import Launch
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from tests.strategies.fitting import Net

PATIENCE = {"launch": Launch(timeout=timedelta(seconds=30))}


def local_sgd(clock: Any = None, **options: Any) -> LocalSGDStrategy:
    return LocalSGDStrategy(clock, **PATIENCE, **options)


def same_start(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)
