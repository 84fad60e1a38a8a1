"""What is under way to a device and back: in order, waited for only where it takes too many bytes."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.extensions.passes import layer_pass
from lightning_gnn_dist.extensions.passes.layer_pass import FarPass, FileNodes, Forecast, Memory, bytes_there
from lightning_gnn_dist.homes.settings import LEAST_BYTES
from lightning_gnn_dist.layers.layer_pass import Work
from lightning_gnn_dist.wire.channel import open_channel
from tests.layers.models import Sage, graph_of, uneven_data, whole_rows
from tests.layers.test_parts import check_small_batches

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("free", "wanted", "expected"),
    [
        (80 << 30, None, 40 << 30),
        (80 << 30, 1 << 30, 1 << 30),
        (80 << 30, 64 << 30, 32 << 30),
        (2 << 30, 8 << 30, 1 << 30),
        (1, None, LEAST_BYTES),
        (1 << 30, LEAST_BYTES, LEAST_BYTES),
    ],
)
def test_bytes_of_a_device(free: int, wanted: int | None, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_pass, "free_on", lambda device: free)
    assert bytes_there(wanted, CUDA) == expected
    assert bytes_there(wanted, torch.device("cpu")) == bytes_there(wanted, torch.device("mps", 0)) == 0


def test_rows_in_tables_are_no_part_of_a_batch() -> None:
    most = 60_000_000
    forecast = Forecast(100e6, Memory(lambda: 0, lambda: most, lambda: True))
    forecast.begin()
    forecast.end(10e6, 0)
    assert forecast.allowed == pytest.approx(100e6 / 6), "six times what was foreseen"
    most = 45_000_000  # of which tables have 40 MB
    forecast.begin()
    forecast.end(10e6, 40_000_000)
    assert forecast.allowed == pytest.approx(100e6 / 3), "at most half as much as before"
    forecast.was_too_much(10e6)
    assert forecast.allowed <= 10e6 / 2


# The parts of a pass whose rows may lie in files, each against the plainest thing that does the same.


CPU = torch.device("cpu")
DATA = uneven_data()
GRAPH = graph_of(DATA)


def rows_of(layers: Any, seeds: Tensor, budget_bytes: int, folder: Path | None = None) -> Tensor:
    nodes = FileNodes(GRAPH, seeds, layers, 1, budget_bytes)
    work = FarPass(nodes, open_channel(1), Work(CPU, None, True, budget_bytes), folder=folder)
    with torch.no_grad():
        return work.plan_for(seeds, len(layers)).rows(layers).take([seeds])[0]


@pytest.mark.parametrize("budget_bytes", [1, 3_000, 20_000, 1 << 30])
def test_many_small_batches_make_the_rows_of_one(budget_bytes, tmp_path):
    check_small_batches(partial(rows_of, folder=tmp_path), budget_bytes)
    assert list(tmp_path.rglob("*")) == []


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA"), MemoryError(), RuntimeError("can't allocate memory:")]
)
def test_a_batch_that_finds_no_memory_is_halved(error):
    module, sizes = Sage(2).double(), []
    expected, (first, last) = whole_rows(module, DATA), module.layers()

    def short(batch: Any) -> Tensor:
        sizes.append(batch.batch_size)
        if batch.batch_size > 20:
            raise error
        return first(batch)

    seeds = DATA.test_mask.nonzero().view(-1)
    assert torch.allclose(rows_of([short, last], seeds, 1 << 30), expected[seeds], rtol=0, atol=1e-12)
    assert len(sizes) > 3 and sizes[0] > 20
    with pytest.raises(type(error)):
        rows_of([short, lambda batch: (_ for _ in ()).throw(error)], seeds, 1 << 30)


def test_what_was_kept_of_large_batches_is_no_part_of_small_ones():
    held = 0
    forecast = Forecast(100e6, Memory(lambda: held, lambda: held, lambda: True))

    def next_after(foreseen: float, taken: int) -> float:
        nonlocal held
        forecast.begin()
        held = max(held, taken)  # an allocator that gives nothing back
        forecast.end(foreseen, 0)
        return forecast.allowed

    assert forecast.allowed == 25e6
    assert next_after(25e6, 50_000_000) == 50e6, "it took twice what was foreseen"
    assert next_after(50e6, 100_000_000) == 50e6
    assert next_after(5e6, 10_000_000) == 50e6, "the rest of a layer"
    fitting = next_after(50e6, 150_000_000)
    assert fitting == pytest.approx(100e6 / 3), "a layer that takes three times what is foreseen"
    assert next_after(fitting, 100_000_000) == fitting
    assert next_after(5e6, 15_000_000) == fitting
