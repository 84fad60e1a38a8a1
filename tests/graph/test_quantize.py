"""Quantised rows come back nearly as they were."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.graph import convert
from lightning_gnn_dist.graph.convert import quantize_rows, scale_of


@pytest.mark.parametrize("shape", [(50, 16), (50, 3, 5)])
@pytest.mark.parametrize("at_once", [7, 1 << 16])
def test_rows_come_back_within_half_a_step(shape, at_once, monkeypatch):
    monkeypatch.setattr(convert, "ROWS_AT_ONCE", at_once)
    x = torch.randn(shape) * torch.logspace(-6, 6, 50).view(-1, *[1] * (len(shape) - 1))
    x[3] = 0
    small, scale = quantize_rows(x)
    assert small.dtype == torch.int8
    assert scale.shape == (50,)
    per_row = scale.view(-1, *[1] * (len(shape) - 1))
    assert ((small * per_row - x).abs() <= 0.501 * per_row).all()
    assert small.flatten(1).abs().amax(1).unique().tolist() == [0, 127]


def test_only_int8_has_scales():
    arrays = {"x": torch.zeros(4, 2, dtype=torch.int8), "x_scale": torch.ones(4)}
    assert scale_of("x", arrays) is arrays["x_scale"]
    assert scale_of("x_scale", arrays) is None
    assert scale_of("x", arrays | {"x": torch.zeros(4, 2)}) is None
    assert scale_of("x", arrays | {"x_scale": torch.ones(4, 2)}) is None
    assert scale_of("x", arrays | {"x_scale": torch.ones(4).long()}) is None
    assert scale_of("x", {"x": arrays["x"]}) is None


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(4), "x must be rows of floating point"),
        (torch.zeros(4, 2, dtype=torch.int64), "x must be rows of floating point"),
        (torch.ones(2, 0), "others have nothing to quantise"),
        (torch.tensor([[1.0], [1e300]], dtype=torch.float64), "x holds NaN or infinite values .the first at node 1"),
    ],
)
def test_what_no_scale_fits_is_refused(x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_rows(x)
