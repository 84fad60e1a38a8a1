"""Batches are the same wherever edges and rows lie: with rows in fewer bytes, edge arrays, types, and from files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Graph,
    NeighborSampler,
    RandomWalkSampler,
    ShadowSampler,
    TemporalSampler,
    WholePartSampler,
    communities,
)
from lightning_gnn_dist.batches.source import Crossing, GraphSource
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.memory_plan import MemoryPlan
from lightning_gnn_dist.extensions.larger_than_memory.placement import Placement, release
from lightning_gnn_dist.extensions.larger_than_memory.sources import PlacedSource
from lightning_gnn_dist.graph.convert import quantize_rows
from tests.batch_contents import check_same, contents
from tests.typed_sage import typed_graph_of_papers

CPU = torch.device("cpu")
SAMPLER = NeighborSampler([4, 3])


def graph_with(x: Tensor, **more: Tensor) -> Graph:
    plain = communities(300, 4, num_features=1, mean_degree=8.0, train_share=0.3, seed=3)
    generator = torch.Generator().manual_seed(1)
    edges = {
        "edge_weight": torch.rand(plain.num_edges, generator=generator) + 0.1,
        "edge_attr": torch.randn(plain.num_edges, 9, generator=generator),
    }
    nodes = {name: array for name, array in plain.node_arrays.items() if name != "x"}
    return Graph(plain.indptr, plain.indices, {"x": x, **nodes, **more}, edges)


def arrays() -> dict[str, dict[str, Tensor]]:
    wide = torch.randn(300, 34, generator=torch.Generator().manual_seed(0))
    quantised, scale = quantize_rows(wide)
    return {
        "float32": {"x": wide},
        "float16": {"x": wide.half(), "y": torch.randn(300, 20).half()},
        "bfloat16": {"x": wide.bfloat16(), "extra": wide.double()},
        "int8": {"x": quantised, "x_scale": scale},
        "narrow": {"x": wide[:, :3].clone()},
    }


def made(graph: Graph, plan: Any, sampler: Any = SAMPLER, *, spare: bool = False, **options: Any) -> list[Any]:
    """Batches of two bulks, by a plan; None is that of RAM."""
    if plan is None:
        source = GraphSource(graph, sampler, **options)
    else:
        source = PlacedSource(graph, sampler, placement=Placement(CPU, "device"), **options)
    source.keep_buffers(9)
    if spare:
        source.spare_memory()
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


@pytest.mark.parametrize(
    "sampler", [ShadowSampler([3], 2), RandomWalkSampler(2, visits=2), WholePartSampler(2)], ids=repr
)
def test_samplers_that_draw_in_ram(sampler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with(**arrays()["bfloat16"])
    expected = made(graph, None, sampler)
    for draws in (True, False):
        check_same(made(graph, plan_with(0.3, monkeypatch, draws=draws), sampler), expected)


@pytest.mark.parametrize("share", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("sampler", [NeighborSampler([3, 2]), TemporalSampler([3, 2], time="time")], ids=repr)
def test_types(sampler: Any, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = typed_graph_of_papers(200)
    expected = made(graph, None, sampler)
    assert len({len(batch) for batch in expected}) == 1
    check_same(made(graph, plan_with(share, monkeypatch, draws=False), sampler), expected)


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("draws", [True, False])
def test_rows_from_files(draws: bool, spare: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = graph_with(**arrays()["int8"])
    graph.save(tmp_path / "graph")
    expected = made(graph, None)
    monkeypatch.setattr("lightning_gnn_dist.extensions.larger_than_memory.placement.WINDOW_BYTES", 100)
    for share in (0.4, 1.0):
        plan = plan_with(share, monkeypatch, draws=draws)
        check_same(made(Graph.open(tmp_path / "graph"), plan, spare=spare), expected)


def test_what_is_read_most_is_held_and_the_rest_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan_with(0.25, monkeypatch, draws=True)
    graph, crossing = graph_with(**arrays()["float32"]), Crossing()
    placement = Placement(CPU, "device", samplers=(SAMPLER,), batch_size=20, crossing=crossing)
    place = placement.of(graph, SAMPLER)
    assert place.rows is not None and "x" not in place.graph.node_arrays
    (held,) = place.rows.of_types
    assert held.held["x"].shape == (75, 34)
    source = PlacedSource(graph, SAMPLER, placement=placement)
    seeds, keys = list(graph.split("train").split(20)), [BatchKey(0, 0, i) for i in range(5)]
    (ids,) = [torch.cat([batch.n_id for batch in source.make(seeds[:3], keys[:3])])]
    is_held = torch.isin(ids, held.split(torch.arange(300))[1], invert=True)
    figures = {"data/cache_asked": len(ids), "data/cache_hits": int(is_held.sum())}
    assert crossing.figures == figures | {"data/cache_hit_rate": figures["data/cache_hits"] / len(ids)}
    assert 0.35 < crossing.figures["data/cache_hit_rate"] < 0.8  # of a quarter of the rows
