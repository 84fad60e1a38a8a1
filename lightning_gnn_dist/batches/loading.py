"""How batches are made and held, and what the precision of a trainer asks of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from llvmlite import binding

from lightning_gnn_dist.batches.pool import Widen
from lightning_gnn_dist.batches.source import device_of
from lightning_gnn_dist.rules import Natural, check_fields, whole

SampleOn: TypeAlias = Literal["auto", "cpu", "device"]
MAX_THREADS = 1024
MAX_BULK = 1 << 20  # batches that are made together

_OF_MODEL = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_OF_PRODUCTS = {"bf16-mixed": torch.bfloat16}
_MULTIPLIES_BFLOAT16 = ("avx512bf16", "amx-bf16", "avxneconvert", "bf16")  # the last one on ARM


@dataclass(frozen=True)
class Loading:
    """How batches are made, and what of the arrays they hold. What is drawn does not depend on it.

    Args:
        bulk_size: Batches sampled together. Of shards, rows for them are sent together.
        num_threads: Background threads that sample and gather while the model trains. 0: none. Other ranks are asked
            by one thread, if there is any.
        widen: Arrays of float16, bfloat16, and of int8 with scales (:func:`quantize_rows`) come as float32. ``"auto"``:
            but for those of the type that the trainer's precision computes in, bfloat16 with ``"bf16-mixed"`` and
            ``"bf16-true"``, float16 with ``"16-true"``, unless they are labels. False: as they are stored.
        sample_on: Where batches are sampled and gathered: ``"cpu"``, or ``"device"``, on the device that trains, which
            then holds a copy of the part, and of the whole graph for evaluation and corrections. ``"auto"``: if it is a
            GPU, it holds as much of these as ``device_bytes`` allow, the part's before the whole graph's: edges, from
            which a ``NeighborSampler``, ``LadiesSampler`` or ``FastGCNSampler`` draws there, then the rows of features
            that training batches read most. Others are gathered in RAM. Of graphs with types, rows alone. False
            receivers of links are drawn in RAM. Of shards: ``"cpu"``.
        device_bytes: Memory of a GPU that all of it may take with ``sample_on="auto"``; with 0 batches come from RAM.
            Default: half of the memory that is free without it.
        all_labels: Batches hold in ``y`` the labels of all their nodes, as label propagation needs them. False: those
            of the seeds alone, so that no loss takes in validation or test nodes, nor some nodes more often.
        ahead_bytes: Memory for batches that are made before they are due, where these need rows of other ranks or of
            files (``cache_bytes``), beside those of the running bulk: as many bulks as fit, at least one. 0: every bulk
            is asked for when it is due.
        cache_bytes: Memory on each rank for rows of a graph in files, or of other shards, of which those stay that
            coming batches need soonest, of all node types together. 0: none stays. Rows of files are read in the
            background by one thread, near ones in one request, where the arrays are larger than this memory. Default:
            64 MiB for shards; rows of files are read through the system's memory map, but for an evaluation of a graph
            that is larger than what is free, whose cache takes an eighth of that.
        check_values: Refuse NaN and infinity in ``x`` and in the edges' ``edge_weight`` and ``edge_attr``, in one pass
            over what the rank trains on, and labels of marked nodes that are infinite, NaN in all columns, or, as
            classes, negative.
    """

    bulk_size: Annotated[int, whole(1, MAX_BULK)] = 4
    num_threads: Annotated[int, whole(0, MAX_THREADS)] = 1
    widen: bool | Literal["auto"] = "auto"
    sample_on: SampleOn = "cpu"
    device_bytes: Natural | None = None
    all_labels: bool = False
    ahead_bytes: Natural = 1 << 29
    cache_bytes: Natural | None = None
    check_values: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.device_bytes is not None and self.sample_on != "auto":
            raise ValueError(
                f'device_bytes ({self.device_bytes}) is what a graph may take of a GPU with sample_on="auto", and '
                f'sample_on is "{self.sample_on}": give sample_on="auto", or leave device_bytes out.'
            )

    @property
    def elsewhere(self) -> str | None:
        """What makes batches of rows that do not lie in RAM, by its name among extensions; None: all lie there."""
        if self.cache_bytes is not None:
            return "rows in files"
        return None if self.sample_on == "cpu" else "rows on devices"


def widening(loading: Loading, stays: torch.dtype | None) -> Widen:
    """Return which types are widened, where a step computes in a type narrower than float32, or None."""
    return loading.widen if isinstance(loading.widen, bool) else stays or True


def type_of_model(trainer: Trainer | None) -> torch.dtype | None:
    """The type that the whole model computes in, which Lightning does not give to what it takes for data."""
    return None if trainer is None else _OF_MODEL.get(trainer.precision)


def type_that_stays(trainer: Trainer | None) -> torch.dtype | None:
    """The type narrower than float32 that a step computes in, so that features of it need not be widened."""
    if trainer is None:
        return None
    dtype = _OF_PRODUCTS.get(trainer.precision) or type_of_model(trainer)
    return dtype if dtype in (torch.bfloat16, torch.float16) else None


def warn_of_slow_bfloat16(trainer: Trainer | None) -> None:
    """Warn if the model computes in bfloat16 on a processor that is faster in float32."""
    if trainer is None or type_that_stays(trainer) != torch.bfloat16 or device_of(trainer).type != "cpu":
        return
    if not multiplies_bfloat16():
        rank_zero_warn(
            f'precision="{trainer.precision}" is slower than "32-true" on this processor, which has no instructions '
            "for bfloat16: a step takes 1.1 to 1.3 times as long with AVX-512, and 5 times with AVX2. Use "
            'precision="32-true", and keep the features alone in bfloat16, data.x = data.x.bfloat16(): they take half '
            "the memory, and batches hold them as float32."
        )


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16; True if it does not say what it has."""
    features = binding.get_host_cpu_features()
    return not features or any(features.get(name, False) for name in _MULTIPLIES_BFLOAT16)
