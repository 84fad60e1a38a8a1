"""A fit that averages alone over parts which cannot be averaged says so, once, and what to do."""

from typing import Any

import pytest

from lightning_gnn_dist import (
    Drift,
    EverySteps,
    Halo,
    Holding,
    Isolated,
    LLCGStrategy,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    SuperNodePartitioner,
    TMAStrategy,
    communities,
)
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import hear
from tests.strategies.graph_fitting import fit, model

UNLIKE = {"homophily": 1.0, "mean_degree": 20.0}  # METIS gives every part classes of its own
SPARSE = {"homophily": 0.5, "mean_degree": 2.0}
ONE_STEP = EverySteps(1)
AVERAGES: dict[str, Any] = {"clock": ONE_STEP, **PATIENCE}
CASES: list[tuple[dict[str, float], dict[str, Any], Any, str]] = [
    (UNLIKE, {"partitioner": MetisPartitioner()}, LocalSGDStrategy(**AVERAGES), "different labels"),
    (UNLIKE, {"partitioner": MetisPartitioner(), "boundary": Halo()}, TMAStrategy(**AVERAGES), "different labels"),
    (UNLIKE, {"partitioner": MetisPartitioner()}, LocalSGDStrategy(**AVERAGES, drift=Drift()), ""),
    (UNLIKE, {"partitioner": MetisPartitioner()}, LLCGStrategy(**AVERAGES), ""),
    (UNLIKE, {"partitioner": MetisPartitioner(), "holding": Holding(Redeal(8))}, LocalSGDStrategy(**AVERAGES), ""),
    (UNLIKE, {"partitioner": SuperNodePartitioner(100)}, LocalSGDStrategy(**AVERAGES), ""),
    (SPARSE, {"partitioner": RandomPartitioner()}, LocalSGDStrategy(**AVERAGES), "lost all their neighbours"),
    (SPARSE, {"partitioner": RandomPartitioner(), "boundary": Halo()}, LocalSGDStrategy(**AVERAGES), ""),
]


def said(rank: int, world_size: int) -> list[list[str]]:
    """What every fit says of averaging."""
    lines, found = hear(), []
    for shape, options, strategy, _ in CASES:
        graph = communities(600, 4, num_features=12, train_share=0.3, seed=3, **shape)  # type: ignore[arg-type]
        settings = {"sampler": NeighborSampler([4, 4]), "boundary": Isolated()} | options
        data = PartitionedDataModule(graph, **settings)  # type: ignore[arg-type]
        lines.clear()
        fit(strategy, model(), data, world_size, max_epochs=1, limit_val_batches=0)
        found.append([line for line in lines if "veraging alone" in line])
    return found


@pytest.mark.slow
def test_a_fit_that_averages_unlike_parts_says_so() -> None:
    of_rank_0, of_rank_1 = run_ranks(said, 2)
    for lines, (_, options, strategy, reason) in zip(of_rank_0, CASES, strict=True):
        assert len(lines) == bool(reason) and all(reason in line for line in lines), (options, type(strategy), lines)
    assert "SuperNodePartitioner()" in of_rank_0[0][0]
    assert not any(of_rank_1)
