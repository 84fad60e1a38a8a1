"""Runs to draw."""

from __future__ import annotations

from lightning_gnn_dist.callbacks.record import Measured, PartsRecord, RankRound, RunRecord


def record(num_ranks: int = 3, num_rounds: int = 6, *, counted: bool = True, num_classes: int = 4) -> RunRecord:
    """Ranks of unequal speed, of which the last comes one round late."""
    rounds = range(1, num_rounds + 1)
    ranks = [
        [
            RankRound(at, 10 + rank, 2.0, 0.5, 0.1, 0.2 if counted else None, 1e6 if counted else None)
            for at in rounds
            if at > (rank == num_ranks - 1)
        ]
        for rank in range(num_ranks)
    ]
    edges = [[90 if row == column else 5 for column in range(num_ranks)] for row in range(num_ranks)]
    labels = [[1 + (rank + label) % 3 for label in range(num_classes)] for rank in range(num_ranks)]
    return RunRecord(
        strategy="TMAStrategy with EverySeconds(seconds=2)",
        partitioner="RandomPartitioner()",
        num_ranks=num_ranks,
        finished=True,
        monitor="accuracy",
        ranks=ranks,
        rounds=[Measured(at, 2.5 * at, {"accuracy": 1 - 0.5**at, "val_loss": 0.5**at}) for at in rounds],
        parts=PartsRecord([100] * num_ranks, edges, list(range(num_classes)), labels),
        coverage=[0.9] * num_ranks,
    )
