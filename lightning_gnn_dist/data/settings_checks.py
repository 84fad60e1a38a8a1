"""What data modules may be given, before anything is read; and what their features are where a model fails on them."""

from __future__ import annotations

import re
import traceback

import torch
from torch import Tensor

from lightning_gnn_dist.checks import (
    check_at_least,
    check_at_least_if_given,
    check_instance,
    check_seed,
    check_true_or_false,
    shown,
    takes,
)
from lightning_gnn_dist.data.coverage import Coverage
from lightning_gnn_dist.data.residency import Fixed, Residency
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.sampling.base import Sampler

MAX_THREADS = 1024
MAX_BULK = 1 << 20  # batches that are made together


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
    check_at_least(1, batch_size=batch_size)
    check_at_least(1, most=MAX_BULK, bulk_size=bulk_size)
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


def explain_features(exception: BaseException, x: Tensor | None) -> None:
    """Say what is wrong with the features where a layer has failed on them: torch speaks of two matrices.

    Before that nobody knows what the model makes of them, as a table of embeddings takes integers.
    """
    if x is None:
        return
    text, places = str(exception), [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    is_theirs = bool(places) and places[-1].f_globals.get("__name__", "").startswith(("torch.", "torch_geometric."))
    if reason := _of_type(x, text) or _of_width(x, text) or (_of_shape(x) if is_theirs else None):
        exception.args = (f"{reason} ({' '.join(text.split())})",)


def _of_type(x: Tensor, text: str) -> str | None:
    if x.dtype == torch.float32 or not re.search(
        "same dtype|can't be cast|not supported for|not implemented for", text
    ):
        return None
    return (
        f"x holds {x.dtype}, and the model computes with another type: data.x = data.x.float() before "
        "Graph.from_pyg(data), or turn batch.x into what the model takes."
    )


def _of_width(x: Tensor, text: str) -> str | None:
    found = re.search(r"cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)", text)
    if not found or x.dim() != 2 or int(found[1]) != x.shape[1]:
        return None
    return f"x has {found[1]} features, and a layer of the model takes {found[2]}: build it with {found[1]}."


def _of_shape(x: Tensor) -> str | None:
    if x.dim() == 2:
        return None
    way_out = "view(-1, 1)" if x.dim() == 1 else "flatten(1)"
    return (
        f"x has the shape {tuple(x.shape)}, and a layer takes a row of features for each node: "
        f"data.x = data.x.{way_out} before Graph.from_pyg(data), or give batch.x that shape."
    )
