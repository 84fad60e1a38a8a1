"""What data modules may be given, before anything is read."""

from __future__ import annotations

from lightning_gnn_dist.checks import (
    check_at_least,
    check_at_least_if_given,
    check_instance,
    check_seed,
    check_true_or_false,
    shown,
    takes,
)
from lightning_gnn_dist.coverage import Coverage
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.residency import Fixed, Residency
from lightning_gnn_dist.sampling.base import Sampler

MAX_THREADS = 1024


def check_settings(
    *,
    seed: int,
    batch_size: int,
    eval_batch_size: int | None,
    bulk_size: int,
    num_threads: int,
    widen_features: bool,
    correction_batch_size: int | None,
) -> None:
    """Numbers and flags of all data modules."""
    check_seed(seed)
    check_at_least(0, most=MAX_THREADS, num_threads=num_threads)
    check_at_least(1, batch_size=batch_size, bulk_size=bulk_size)
    check_true_or_false(widen_features=widen_features)
    check_at_least_if_given(1, eval_batch_size=eval_batch_size, correction_batch_size=correction_batch_size)


def check_objects(coverage: object, **samplers: object) -> None:
    """Weights and samplers, of which each may be None."""
    if coverage is not None:
        check_instance("coverage", coverage, Coverage, 'an object such as Coverage() or Coverage("batch"), or None')
    for name, sampler in samplers.items():
        if sampler is not None:
            check_instance(name, sampler, Sampler, "an object such as NeighborSampler([15, 10])")


def check_cut(partitioner: object, residency: object, repartition_every: int | None) -> None:
    """How a graph is cut, and when that changes."""
    known = partitioner is None or isinstance(partitioner, Partition)
    if not known and (isinstance(partitioner, type) or not takes(partitioner, "graph", 2, 0)):
        raise TypeError(
            f"partitioner must be an object such as MetisPartitioner(), or a Partition, got {shown(partitioner)}."
        )
    check_instance("residency", residency, Residency, "an object such as Fixed(), Rotate() or Redeal(1000)")
    check_at_least_if_given(1, repartition_every=repartition_every)
    if repartition_every is not None and isinstance(residency, Fixed):
        raise ValueError(
            f"repartition_every={repartition_every} says how often parts change, and with Fixed() they never do: use "
            "Rotate() or Redeal(1000), or leave it out."
        )
