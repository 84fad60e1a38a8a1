"""What the precision of a trainer asks of batches, and of the processor."""

from __future__ import annotations

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_warn
from llvmlite import binding

from lightning_gnn_dist.batches.placement import device_of

_OF_MODEL = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_OF_PRODUCTS = {"bf16-mixed": torch.bfloat16}
_MULTIPLIES_BFLOAT16 = ("avx512bf16", "amx-bf16", "avxneconvert", "bf16")  # the last one on ARM


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
            'precision="32-true".'
        )


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for products in bfloat16; True if it does not say what it has."""
    features = binding.get_host_cpu_features()
    return not features or any(features.get(name, False) for name in _MULTIPLIES_BFLOAT16)
