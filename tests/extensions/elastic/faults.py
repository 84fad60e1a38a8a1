"""Faults of ranks that may die, which the others train on without."""

from typing import Any

from lightning_gnn_dist import Elastic, EverySteps, TMAStrategy

METHOD, RANK = "elastic", "LIGHTNING_GNN_DIST_RANK"
FAULTS = ("kill", "stop", "SIGTERM", "SIGKILL")
LAUNCH = ["-m", "lightning_gnn_dist", "elastic", "--ranks", "2", "--heartbeat", "2", "--grace", "4", "--"]


def strategy(seconds: int) -> Any:
    return TMAStrategy(EverySteps(4), peers=Elastic(patience=seconds, timeout=seconds, attempts=2))
