"""With a precision that ends in "-true" batches come in the type that the model computes in, and its layers run."""

import warnings
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.homes.run import warn_of_slow_bfloat16
from lightning_gnn_dist.sampling.base import Sampler
from tests.data_fitting import trainer
from tests.sage import SAGE

GRAPH = lgd.communities(300, 3, num_features=8)


class Watched(SAGE):
    """Says what types its batches have."""

    def __init__(self, **options: Any) -> None:
        super().__init__(8, 3, **options)
        self.types: set[torch.dtype] = set()

    def forward(self, batch: Any) -> Tensor:
        adj = batch.blocks[0].adj
        self.types |= {batch.x.dtype, batch.edge_weight.dtype, adj.dtype, batch.blocks[-1].weighted_adj.dtype}
        assert batch.y.dtype == torch.int64
        return super().forward(batch)


def trained(
    precision: Any, sampler: Sampler, *, dtype: torch.dtype = torch.float32, blocks: bool = True, widen: Any = "auto"
) -> Watched:
    weights = {"edge_weight": torch.ones(GRAPH.num_edges)}
    x = GRAPH.node_arrays["x"].to(dtype)
    graph = lgd.Graph(GRAPH.indptr, GRAPH.indices, {**GRAPH.node_arrays, "x": x}, weights)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=50, loading=lgd.Loading(widen=widen))
    pl.seed_everything(0, verbose=False)
    model = Watched(blocks=blocks)
    fit = trainer(1, precision=precision)
    fit.fit(model, data)
    fit.predict(model, data)
    with fit.precision_plugin.forward_context():
        for batch in data.correction_batches(0, stop=1):
            model(batch)
    return model


@pytest.mark.parametrize("sampler", [lgd.NeighborSampler([4, 3]), lgd.WholePartSampler(2)], ids=repr)
@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("64-true", torch.float64), ("bf16-true", torch.bfloat16)]
)
def test_batches_have_the_type_of_the_precision(precision: str, dtype: torch.dtype, sampler: Sampler) -> None:
    assert trained(precision, sampler, blocks=dtype != torch.bfloat16).types == {dtype}


NARROW = {"bf16": torch.bfloat16, "16": torch.float16}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("widen", ["auto", True, False])
def test_what_a_step_computes_in_is_not_widened(precision: Any, widen: Any, stored: torch.dtype) -> None:
    graph = stored_as(stored)
    data = lgd.PartitionedDataModule(
        graph, sampler=lgd.NeighborSampler([4, 3]), batch_size=50, loading=lgd.Loading(widen=widen)
    )
    data.trainer = trainer(1, precision=precision)
    of_step = NARROW.get(precision.split("-")[0])
    stays = widen is False or (widen == "auto" and stored == of_step)
    of_model = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision)
    loaders: list[Any] = [data.train_dataloader(), data.predict_dataloader(), data.correction_batches(0)]
    for loader in loaders:
        batch = next(iter(loader))
        assert batch.x.dtype == of_model or (stored if stays else torch.float32)
        assert batch.blocks[0].adj.dtype == batch.x.dtype
        assert batch.x.equal(graph.node_arrays["x"][batch.n_id].to(batch.x.dtype))
        assert batch.target.dtype == batch.x.dtype
        quantized = batch.bytes.dtype, "bytes_scale" in batch
        assert quantized == ((torch.int8, True) if widen is False else (of_model or torch.float32, False))
        assert batch.y.dtype == (of_model or (stored if widen is False else torch.float32)), "labels are widened"
    data.teardown("fit")


def stored_as(dtype: torch.dtype) -> lgd.Graph:
    """Features, labels and another array of a narrow type, and an array of bytes with scales."""
    rows, scale = quantize_rows(GRAPH.node_arrays["x"])
    x, y = GRAPH.node_arrays["x"].to(dtype), GRAPH.node_arrays["y"].to(dtype)
    arrays = {**GRAPH.node_arrays, "x": x, "y": y, "target": x[:, :2], "bytes": rows, "bytes_scale": scale}
    return lgd.Graph(GRAPH.indptr, GRAPH.indices, arrays)


def test_kept_features_train_like_widened_ones_in_mixed_precision() -> None:
    options: dict[str, Any] = {"dtype": torch.bfloat16}
    kept, widened = (trained("bf16-mixed", lgd.NeighborSampler([4, 3]), widen=w, **options) for w in ("auto", True))
    assert kept.types == {torch.bfloat16, torch.float32} and widened.types == {torch.float32}  # weights of edges
    for one, other in zip(kept.parameters(), widened.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)


def test_a_processor_without_bfloat16_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = SimpleNamespace(strategy=SimpleNamespace())
    for precision, device, features, warned in (
        ("bf16-mixed", "cpu", {"avx2": True, "avx512bf16": False, "amx-bf16": False}, True),
        ("bf16-true", "cpu", {"avx2": True}, True),
        ("bf16-mixed", "cpu", {"avx2": True, "avx512bf16": True}, False),
        ("bf16-mixed", "cpu", {"amx-bf16": True}, False),
        ("bf16-true", "cpu", {"neon": True, "bf16": True}, False),
        ("bf16-mixed", "cpu", {}, False),  # not known
        ("32-true", "cpu", {"avx2": True}, False),
        ("64-true", "cpu", {"avx2": True}, False),
        ("bf16-mixed", "cuda", {"avx2": True}, False),
        ("bf16-mixed", "mps", {"avx2": True}, False),
    ):
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda features=features: features)
        known.precision, known.strategy.root_device = precision, torch.device(device)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warn_of_slow_bfloat16(known)
        assert len(given) == warned
        assert all(f'precision="{precision}" is slower than "32-true"' in str(each.message) for each in given)


def test_a_fit_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True})
    with pytest.warns(UserWarning, match='Use precision="32-true", and keep the features alone in bfloat16'):
        trained("bf16-mixed", lgd.NeighborSampler([4, 3]))
