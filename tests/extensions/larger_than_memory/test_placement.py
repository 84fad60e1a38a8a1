"""Where batches are made never changes them."""

import gc
import weakref
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.source import GraphSource, stream_to
from lightning_gnn_dist.data.datamodule import GraphDataModule
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory import placement
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import DeviceSampler
from lightning_gnn_dist.extensions.larger_than_memory.placement import (
    MemoryPlan,
    Place,
    PlacedSource,
    Placement,
    Sizes,
    release,
)
from lightning_gnn_dist.extensions.larger_than_memory.rows_on_device import Crossing
from lightning_gnn_dist.graph.memo import memory_of, of_all_graphs
from tests.batch_contents import check_same, contents
from tests.placing import placed
from tests.sampling.reference import random_graph
from tests.typed_sage import typed_graph_of_papers

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SAMPLER = lgd.NeighborSampler([2])


def test_a_cpu_keeps_the_compiled_sampler_and_needs_no_stream():
    graph = random_graph()
    for sample_on in ("auto", "cpu"):
        assert Placement(CPU, sample_on).of(graph, SAMPLER) == (graph, SAMPLER, None)
    assert stream_to(CPU) is None


@pytest.mark.usefixtures("pretended")
def test_a_graph_that_does_not_fit_stays_in_ram(informed):
    graph = random_graph()
    found = Placement(CUDA, "auto", 0).of(graph, SAMPLER)
    assert found == (graph, SAMPLER, None)
    said = "Batches come from RAM: edges take 0.0 MB, rows 0.0 MB, and they may take 0.0 MB on cuda:0."
    assert any(said in line for line in informed)


@pytest.mark.usefixtures("pretended")
def test_a_sampler_that_does_not_draw_there_takes_rows_from_there():
    graph, sampler = random_graph(), lgd.ShadowSampler([2], num_hops=1)
    found = Placement(CUDA, "auto", free_bytes=lambda _: 1 << 40).of(graph, sampler)
    assert found[:2] == (graph, sampler)
    assert found.rows is not None and found.rows.num_bytes == graph.node_arrays["x"].nbytes


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that has no memory of its own."""
    monkeypatch.setattr(placement, "_brought", lambda array, _, __, ids=None: array if ids is None else array[ids])
    monkeypatch.setattr(placement, "stream_to", lambda _: None)


def on_device(graph: lgd.Graph) -> int:
    """Bytes that the graph has on the device."""
    (placed,) = (of[CUDA] for of in of_all_graphs(placement.COPIES) if CUDA in of and of is known(graph))
    return int(placed.num_bytes)


def known(graph: lgd.Graph) -> Any:
    with memory_of(graph) as found:
        return found.get(placement.COPIES)


@pytest.mark.usefixtures("pretended")
@pytest.mark.parametrize("spare", [0, -1])
def test_all_graphs_together_take_half_of_what_is_free_without_them(spare):
    part, whole = random_graph(40, 100), random_graph(90, 300)
    total, held = 2 * (part.num_bytes + whole.num_bytes) + 2 * spare, list[int]()
    placing = Placement(CUDA, "auto", free_bytes=lambda _: total - sum(held))
    assert placing.of(part, SAMPLER)[1:] == (DeviceSampler(SAMPLER), None)
    held += [on_device(part)]
    assert held == [part.num_bytes]
    found = placing.of(whole, SAMPLER)
    assert found.sampler == DeviceSampler(SAMPLER)  # its edges are there, and its rows, but for one
    assert (found.rows is None) == (spare == 0)
    assert on_device(whole) == whole.num_bytes + (32 if spare else 0) * (-1)
    placing.of(part, SAMPLER)
    assert on_device(part) == part.num_bytes


@pytest.mark.usefixtures("pretended")
def test_room_is_kept_for_a_part_that_comes_later():
    part, whole = random_graph(40, 100), random_graph(90, 300)
    expects = Placement(CUDA, "auto", whole.num_bytes + 31, expected_bytes=whole.num_bytes)
    assert expects.of(whole, SAMPLER) == (whole, SAMPLER, None)
    assert Placement(CUDA, "auto", whole.num_bytes).of(part, SAMPLER)[0] is not part
    release(part)
    release(whole)
    enough = Placement(CUDA, "auto", 2 * whole.num_bytes, expected_bytes=whole.num_bytes)
    assert enough.of(whole, SAMPLER)[0] is not whole


# Data modules: whatever they make.

GRAPH = lgd.communities(400, 4, num_features=9, train_share=0.3, seed=3)
SPLIT = lgd.split_edges(lgd.communities(240, 4, num_features=9, mean_degree=8.0, seed=3), 0.1, 0.1, negatives=6)
Batches = Iterable[SampledData]
ASKED: dict[str, Callable[[Any], Batches]] = {
    "train": lambda data: data.train_dataloader(),
    "validate": lambda data: data.val_dataloader(),
    "test": lambda data: data.test_dataloader(),
    "predict": lambda data: data.predict_dataloader(),
    "correct": lambda data: data.correction_batches(3, stop=4),
    "correct a whole": lambda data: data.correction_batches(3, sliced=False, start=1, stop=3),
    "anchor": lambda data: data.anchor_batches(2),
    "anchor to all": lambda data: islice(data.anchor_batches(2, of="graph"), 3),
}


PLACES: dict[str, Callable[[Sizes], MemoryPlan]] = {
    "all": lambda sizes: MemoryPlan(sizes, draws_there=True, row_bytes=sizes.rows),
    "edges, some rows": lambda sizes: MemoryPlan(sizes, draws_there=True, row_bytes=sizes.rows // 3),
    "edges": lambda sizes: MemoryPlan(sizes, draws_there=True, row_bytes=0),
    "rows": lambda sizes: MemoryPlan(sizes, draws_there=False, row_bytes=sizes.rows),
    "some rows": lambda sizes: MemoryPlan(sizes, draws_there=False, row_bytes=sizes.rows // 3),
    "nothing": lambda sizes: MemoryPlan(sizes, draws_there=False, row_bytes=0),
}


def figures_of(place: str, found: dict[str, float]) -> dict[str, float]:
    """What is logged of rows: nothing where they are not placed apart from the edges."""
    if place in ("all", "nothing"):
        return {}
    low, high = {"edges": (0, 0), "rows": (1, 1)}.get(place, (0.33, 0.99))
    assert low <= found["data/cache_hit_rate"] <= high
    assert found["data/cache_hits"] == found["data/cache_hit_rate"] * found["data/cache_asked"]
    return {name: found[name] for name in ("data/cache_asked", "data/cache_hits", "data/cache_hit_rate")}


def module_of(sample_on: Any, **options: Any) -> lgd.PartitionedDataModule:
    defaults: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 30}
    return lgd.PartitionedDataModule(GRAPH, **(defaults | {"loading": lgd.Loading(sample_on=sample_on)} | options))


def links_of(sample_on: Any, **options: Any) -> lgd.LinkDataModule:
    defaults: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 50, "num_negatives": 2}
    return lgd.LinkDataModule(SPLIT, loading=lgd.Loading(sample_on=sample_on), **(defaults | options))


def assert_same(batches: Batches, others: Batches) -> None:
    check_same(map(contents, others), map(contents, batches))


CASES = [(make, what, place) for make, place in zip((module_of, links_of), PLACES, strict=False) for what in ASKED]
CASES += [(module_of, what, place) for what in ("train", "validate") for place in list(PLACES)[1:]]


@pytest.mark.parametrize(("make", "what", "place"), CASES)
def test_every_batch_is_the_same(make, what, place, monkeypatch):
    monkeypatch.setattr(MemoryPlan, "of_all", PLACES[place])
    made: list[int] = []
    draw = DeviceSampler.sample_bulk
    monkeypatch.setattr(DeviceSampler, "sample_bulk", lambda *args: made.append(len(args[2])) or draw(*args))
    plain, other = make("cpu"), make("device")
    assert_same(ASKED[what](plain), ASKED[what](other))
    assert bool(made) == (place not in ("rows", "some rows", "nothing"))
    assert other._home.figures == figures_of(place, other._home.figures)
    if made and what in ("validate", "test", "predict"):
        assert set(made) == {1}  # full neighbourhoods are large
    for data in (plain, other):
        data.teardown("fit")


@pytest.mark.parametrize("make", [module_of, links_of])
def test_all_batches_come_from_one_copy_which_goes_with_the_fit(make, monkeypatch):
    copies: list[weakref.ref[lgd.Graph]] = []
    move = placement._moved

    def watched(*args: Any, **how: Any) -> lgd.Graph:
        copy = move(*args, **how)
        copies.append(weakref.ref(copy))
        return copy

    monkeypatch.setattr(placement, "_moved", watched)
    data: GraphDataModule = make("device")
    release(data.graph)
    for _ in range(2):
        loaders = [data.train_dataloader(), data.val_dataloader(), data.predict_dataloader()]  # a trainer keeps them
        for batches in (*loaders, data.correction_batches(0), data.anchor_batches(0)):
            next(iter(batches))
        del batches
        assert [copy() is None for copy in copies] == [False]
        data.teardown("fit")
        gc.collect()
        assert [copy() is None for copy in copies] == [True]
        copies.clear()
        assert len(next(iter(loaders[1])).n_id)  # copied anew
        loaders[1].close()
        release(data.graph)
        copies.clear()


@pytest.mark.parametrize("num_threads", [0, 1])
def test_the_copy_of_a_part_goes_with_the_part(num_threads):
    loading = lgd.Loading(num_threads=num_threads, sample_on="device")
    redealt: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "holding": lgd.Holding(lgd.Redeal(12), every=1)}
    data = module_of("device", loading=loading, **redealt)
    loader = placed(data, 0, 2).train_dataloader()
    stream = loader.stream(0)
    next(stream)
    next(iter(data.anchor_batches(0)))
    part = weakref.ref(data._home.parts.current())
    copy = weakref.ref(known(data._home.shown(part()))[CPU])
    for _ in range(len(loader)):
        next(stream)
    gc.collect()
    assert (part(), copy()) == (None, None)
    stream.close()
    data.teardown("fit")


def test_what_cannot_be_made_there_is_refused():
    with pytest.raises(ValueError, match=r"draws there \(NeighborSampler.*got ShadowSampler"):
        module_of("device", global_batching=lgd.GlobalBatching(sampler=lgd.ShadowSampler([2], num_hops=2)))
    with pytest.raises(ValueError, match=r"draws there .*got WholePartSampler"):
        links_of("device", sampler=lgd.WholePartSampler(2))


def test_nothing_of_cuda_is_asked_of_another_device() -> None:
    device, graph, sampler = torch.device("mps", 0), lgd.communities(50, 2), lgd.NeighborSampler([2])
    assert Placement(device, "auto").of(graph, sampler) == Place(graph, sampler)
    with pytest.raises(ValueError, match='sample_on="device" draws on CUDA devices, and this trainer computes on mps'):
        Placement(device, "device").of(graph, sampler)


# Batches are the same wherever edges and rows lie: with rows in fewer bytes, edge arrays, types, and from files.


OF_TWO_HOPS = lgd.NeighborSampler([4, 3])


def graph_with(x: Tensor, **more: Tensor) -> lgd.Graph:
    plain = lgd.communities(300, 4, num_features=1, mean_degree=8.0, train_share=0.3, seed=3)
    generator = torch.Generator().manual_seed(1)
    edges = {"edge_weight": torch.rand(plain.num_edges, generator=generator) + 0.1}
    edges["edge_attr"] = torch.randn(plain.num_edges, 9, generator=generator)
    nodes = {name: array for name, array in plain.node_arrays.items() if name != "x"}
    return lgd.Graph(plain.indptr, plain.indices, {"x": x, **nodes, **more}, edges)


def arrays() -> dict[str, dict[str, Tensor]]:
    wide = torch.randn(300, 34, generator=torch.Generator().manual_seed(0))
    return {
        "float32": {"x": wide},
        "float16": {"x": wide.half(), "y": torch.randn(300, 20).half()},
        "bfloat16": {"x": wide.bfloat16(), "extra": wide.double()},
        "int8": {"x": (wide * 30).to(torch.int8)},
        "narrow": {"x": wide[:, :3].clone()},
    }


def made(graph: lgd.Graph, plan: Any, sampler: Any = OF_TWO_HOPS, **options: Any) -> list[Any]:
    """Batches of two bulks, by a plan; None is that of RAM."""
    if plan is None:
        source = GraphSource(graph, sampler, **options)
    else:
        source = PlacedSource(graph, sampler, placement=Placement(CPU, "device"), **options)
    source.keep_buffers(9)
    seeds = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(2)).split(20)[:4]
    if graph.types.node_types != ("",):
        seeds = torch.arange(graph.types.nodes_of("paper").start, graph.types.nodes_of("paper").stop).split(20)[:4]
    keys = [BatchKey(3, 0, i) for i in range(4)]
    batches = [contents(batch) for i in (0, 2) for batch in source.make(seeds[i : i + 2], keys[i : i + 2])]
    release(graph)
    return batches


def plan_with(share: float, monkeypatch: pytest.MonkeyPatch, *, draws: bool) -> str:
    def plan(sizes: Any) -> MemoryPlan:
        return MemoryPlan(sizes, draws_there=draws, row_bytes=int(share * sizes.rows))

    monkeypatch.setattr(MemoryPlan, "of_all", plan)
    return "plan"


@pytest.mark.parametrize("widen", [True, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", arrays())
@pytest.mark.parametrize("draws", [True, False])
def test_rows_in_fewer_bytes(name: str, draws: bool, widen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with(**arrays()[name])
    how = {"widen": widen, "all_labels": widen is True}
    expected = made(graph, None, **how)
    for share in (0.4, 0.0 if draws else 1.0):
        check_same(made(graph, plan_with(share, monkeypatch, draws=draws), **how), expected)


IN_RAM = [("plain", sampler) for sampler in (lgd.ShadowSampler([3], 2), lgd.RandomWalkSampler(2, visits=2))]
IN_RAM += [("plain", lgd.WholePartSampler(2)), ("typed", lgd.NeighborSampler([3, 2]))]
IN_RAM += [("typed", lgd.TemporalSampler([3, 2], time="time"))]


@pytest.mark.parametrize(("kind", "sampler"), IN_RAM, ids=repr)
def test_samplers_that_draw_in_ram(kind: str, sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with(**arrays()["bfloat16"]) if kind == "plain" else typed_graph_of_papers(200)
    expected = made(graph, None, sampler)
    for draws, share in ((kind == "plain", 0.3), (False, 0.0), (False, 0.2), (False, 1.0)):
        check_same(made(graph, plan_with(share, monkeypatch, draws=draws), sampler), expected)


@pytest.mark.parametrize("draws", [True, False])
def test_rows_from_files(draws: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with(**arrays()["int8"])
    graph.save(tmp_path / "graph")
    expected = made(graph, None)
    monkeypatch.setattr("lightning_gnn_dist.extensions.larger_than_memory.placement.WINDOW_BYTES", 100)
    for share in (0.4, 1.0):
        plan = plan_with(share, monkeypatch, draws=draws)
        check_same(made(lgd.Graph.open(tmp_path / "graph"), plan), expected)


def test_what_is_read_most_is_held_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_with(0.25, monkeypatch, draws=True)
    graph, crossing = graph_with(**arrays()["float32"]), Crossing()
    placement = Placement(CPU, "device", samplers=(OF_TWO_HOPS,), batch_size=20, crossing=crossing)
    place = placement.of(graph, OF_TWO_HOPS)
    assert place.rows is not None and "x" not in place.graph.node_arrays
    (held,) = place.rows.of_types
    assert held.held["x"].shape == (75, 34)
    source = PlacedSource(graph, OF_TWO_HOPS, placement=placement)
    seeds, keys = list(graph.split("train").split(20)), [BatchKey(0, 0, i) for i in range(5)]
    (ids,) = [torch.cat([batch.n_id for batch in source.make(seeds[:3], keys[:3])])]
    is_held = torch.isin(ids, held.split(torch.arange(300))[1], invert=True)
    figures = {"data/cache_asked": len(ids), "data/cache_hits": int(is_held.sum())}
    assert crossing.figures == figures | {"data/cache_hit_rate": figures["data/cache_hits"] / len(ids)}
    assert 0.35 < crossing.figures["data/cache_hit_rate"] < 0.8  # of a quarter of the rows
