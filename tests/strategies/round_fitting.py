"""A small fit in rounds, to hold laws of local SGD against."""

from __future__ import annotations

from typing import Any

import torch

from lightning_gnn_dist import LocalSGDStrategy
from tests.every_strategy import PATIENCE
from tests.strategies.fitting import Net


def local_sgd(clock: Any = None, **options: Any) -> LocalSGDStrategy:
    return LocalSGDStrategy(clock, **PATIENCE, **options)


def same_start(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)
