"""Layers computed on a device, block by block, give the rows of one forward of the whole graph on a CPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.passes import layer_pass
from lightning_gnn_dist.extensions.passes.layer_pass import FarPass, FileNodes
from lightning_gnn_dist.layers.layer_pass import Work
from lightning_gnn_dist.wire.channel import open_channel
from tests.data_fitting import trainer
from tests.extensions.passes.test_prediction import at_most
from tests.layers.models import MODELS, Sage, graph_of, model, uneven_data, whole_rows
from tests.layers.typed_model import ByLayers, some_data
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu
DATA, TYPED = uneven_data(), some_data()
CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-9}
ALL = torch.arange(90)
MUCH = 1 << 30
# Bytes of RAM and of the device, and so where the rows of a layer lie.
PLACES = {"device": (MUCH, MUCH), "RAM": (MUCH, 2_000), "file": (2_000, 2_000)}


def work_of(module: Any, in_ram: int, there: int, folder: Path | None = None, data: Any = DATA) -> FarPass:
    nodes = FileNodes(graph_of(data), None, module.layers(), 1, in_ram)
    work = Work(torch.device("cuda", 0), torch.float64, True, in_ram, there)
    return FarPass(nodes, open_channel(1), work, folder=folder)


def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a budget be as small as it is asked for."""
    monkeypatch.setattr("lightning_gnn_dist.homes.run.LEAST_BYTES", 1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["SAGE", "APPNP", "GAT"])
def test_rows_are_those_of_a_cpu(name: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch)
    monkeypatch.setattr(layer_pass, "bytes_foreseen", at_most(7))
    module = model(name, 3)
    expected, seeds = whole_rows(module, DATA), DATA.test_mask.nonzero().view(-1)
    work = work_of(module.cuda(), *PLACES[place], tmp_path).plan_for(seeds, 3)
    with torch.no_grad():
        tables = list(work.tables(module.layers()))
    for table in (table for found in tables for table in found.of_types):
        assert table is not None
        assert (table.is_there, table.is_file) == (place == "device", place == "file")
    (found,) = tables[-1].take([seeds])
    assert found is not None and found.is_cuda == (place == "device")
    torch.testing.assert_close(found.cpu(), expected[seeds], **CLOSE)
    assert list(tmp_path.iterdir()) == []


def evaluated(rank: int, world_size: int, names: list[str]) -> list[dict[int, Tensor]]:
    found = []
    for name in names:
        data = lgd.PartitionedDataModule(graph_of(DATA), sampler=lgd.NeighborSampler([3, 3]), batch_size=7)
        module = model(name, 2)
        trainer(world_size, accelerator="gpu", precision="64-true").test(module, data, verbose=False)
        found.append({node: row.cpu() for node, row in module.rows.items()})
    return found


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_evaluation_is_that_of_a_cpu(num_ranks: int) -> None:
    enough(num_ranks)
    found = run_ranks(evaluated, num_ranks, MODELS)
    for at, name in enumerate(MODELS):
        expected, rows = whole_rows(model(name, 2), DATA), dict[int, Tensor]()
        for of_rank in found:
            rows |= of_rank[at]
        assert sorted(rows) == DATA.test_mask.nonzero().view(-1).tolist()
        torch.testing.assert_close(torch.stack([rows[node] for node in sorted(rows)]), expected[sorted(rows)], **CLOSE)


def predicted(rank: int, world_size: int, where: Any, folder: Path, budget_bytes: int | None) -> list[str]:
    kinds, devices = ("paper", "word"), list[str]()
    for kind in kinds:
        run, module = trainer(world_size, accelerator="gpu", precision="64-true"), ByLayers(TYPED.edge_types, 3).eval()
        lgd.predict_by_layer(
            run,
            module,
            where,
            folder / f"{kind}.npy",
            on_rows=lambda _, rows: devices.append(rows.device.type),
            budget_bytes=budget_bytes,
            seed_type=kind,
        )
    return devices


@pytest.mark.parametrize(("num_ranks", "place"), [(1, "RAM"), (2, "RAM"), (2, "shards")])
@pytest.mark.parametrize("budget_bytes", [None, 16 << 20])
def test_a_typed_graph_is_predicted(num_ranks: int, place: str, budget_bytes: int | None, tmp_path: Path) -> None:
    enough(num_ranks)
    where: Any = lgd.Graph.from_pyg(TYPED)
    if place == "shards":
        lgd.save_shards(where, lgd.RandomPartitioner()(where, 2, seed=0), tmp_path / "shards")
        where = tmp_path / "shards"
    for devices in run_ranks(predicted, num_ranks, where, tmp_path, budget_bytes):
        assert {*devices} == {"cuda"}
    for kind, rows in ByLayers(TYPED.edge_types, 3).eval().whole(TYPED).items():
        if kind in ("paper", "word"):
            found = torch.from_numpy(np.load(tmp_path / f"{kind}.npy"))
            torch.testing.assert_close(found, rows, **CLOSE)


@pytest.mark.parametrize("place", ["device", "RAM"])
def test_the_host_waits_as_often_for_many_blocks_as_for_few(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("pretend") is None:
        pytest.skip("only pretended devices count how often the host waits")
    from pretend import notes

    given(monkeypatch)
    place_of_rows = "lightning_gnn_dist.extensions.passes.layer_pass.FOR_A_TABLE"
    monkeypatch.setattr(place_of_rows, 0.2 if place == "device" else 1e-9)
    module = Sage(3).double().eval().cuda()
    found = list[int]()
    for size in (30, 3):
        monkeypatch.setattr(layer_pass, "bytes_foreseen", at_most(size))
        work = work_of(module, MUCH, MUCH).plan_for(ALL, 3)
        notes.clear()
        with torch.no_grad():
            work.rows(module.layers()).take([ALL])
        found.append(sum(times for (kind, _, _), times in notes.items() if kind == "sync"))
    assert found[0] == found[1] <= (3 if place == "RAM" else 0)


def test_blocks_keep_to_the_bytes_of_the_device() -> None:
    data = uneven_data(20_000)
    module = Sage(2).double().eval()
    expected = whole_rows(module, data)
    sizes, module = list[int](), module.cuda()
    layers = [lambda batch, layer=layer: sizes.append(batch.batch_size) or layer(batch) for layer in module.layers()]
    there = 16 << 20
    work = work_of(module, MUCH, there, data=data).plan_for(torch.arange(20_000), 2)
    before = torch.cuda.memory_allocated(0)
    with torch.no_grad():
        table = work.rows(layers)
    assert torch.cuda.max_memory_allocated(0) - before <= there
    assert len(sizes) > 2
    (found,) = table.take([torch.arange(20_000)])
    assert found is not None
    torch.testing.assert_close(found.cpu(), expected, **CLOSE)


def enough(num_ranks: int) -> None:
    if num_ranks > torch.cuda.device_count():
        pytest.skip(f"fewer than {num_ranks} CUDA devices")
