"""Plans say in bytes what lies on a device, and rows that are read most come first."""

import math

import pytest
import torch

from lightning_gnn_dist import Graph, LadiesSampler, Loading, NeighborSampler, communities
from lightning_gnn_dist.engine.rng import permutation
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.memory_plan import (
    MemoryPlan,
    PlanFigures,
    Reads,
    Sizes,
    expected_reads,
    most_read,
)
from tests.typed_sage import typed_graph_of_papers

SIZES = Sizes(edges=1000, widths=(40,), counts=(50,))  # 2,000 bytes of rows


@pytest.mark.parametrize(
    ("room", "draws", "draws_there", "row_bytes"),
    [
        (3000, True, True, 2000),
        (4000, True, True, 2000),
        (2999, True, True, 1999),
        (1000, True, True, 0),
        (999, True, False, 999),
        (39, True, False, 39),
        (0, True, False, 0),
        (-5, True, False, 0),
        (3000, False, False, 2000),
    ],
)
def test_edges_come_first_then_rows(room: int, draws: bool, draws_there: bool, row_bytes: int) -> None:
    plan = MemoryPlan.within(room, SIZES, draws=draws)
    assert (plan.draws_there, plan.row_bytes) == (draws_there, row_bytes)
    assert plan.holds_all_rows == (row_bytes == 2000)
    assert plan.is_all_there == (draws_there and row_bytes == 2000)
    assert plan.is_all_in_ram == (not draws_there and row_bytes < 40)
    assert plan.num_bytes == row_bytes + 1000 * draws_there <= max(room, 0)


def test_sizes_of_a_graph() -> None:
    nodes = {
        "x": torch.zeros(6, 40, dtype=torch.int8),  # wide, with its scales
        "x_scale": torch.ones(6),
        "y": torch.zeros(6, 9),  # labels of any width go with the edges
        "n_id": torch.arange(6),
    }
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 6, nodes, {"edge_attr": torch.zeros(3, 16)})
    rest = 7 * 8 + 3 * 4 + 3 * 64 + 6 * 36 + 6 * 8
    assert Sizes.of(graph, table_bytes=5) == Sizes(rest + 5, (44,), (6,))
    assert graph.num_bytes == rest + 6 * 44


def reads_by_hand(graph: Graph, seeds: list[int], sizes: list[int], num_batches: int) -> list[float]:
    def batches_with(drawn: float) -> float:
        return num_batches * (1 - math.exp(-drawn / num_batches))

    held = [float(v in seeds) for v in range(graph.num_nodes)]
    total = list(held)
    for size in sizes:
        drawn = [0.0] * graph.num_nodes
        for v in range(graph.num_nodes):
            senders = graph.indices[int(graph.indptr[v]) : int(graph.indptr[v + 1])].tolist()
            for u in senders:
                drawn[u] += held[v] * (1 if size < 0 else min(1, size / len(senders)))
        held = [batches_with(of) for of in drawn]
        total = [a + b for a, b in zip(total, drawn, strict=True)]
    return [batches_with(of) for of in total]


@pytest.mark.parametrize(
    ("sampler", "sizes"),
    [(NeighborSampler([3, 2]), [3, 2]), (NeighborSampler([-1, 4, 1]), [-1, 4, 1]), (LadiesSampler([9, 9]), [1, 1])],
    ids=repr,
)
def test_expected_reads_are_those_by_hand(sampler: object, sizes: list[int]) -> None:
    graph = communities(70, 3, num_features=3, train_share=0.4, seed=2)
    seeds = graph.split("train").tolist()
    found = expected_reads(graph, sampler, 6)  # type: ignore[arg-type]
    assert found.num_batches == math.ceil(len(seeds) / 6)
    expected = reads_by_hand(graph, seeds, sizes, found.num_batches)
    assert torch.allclose(found.of_nodes, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_without_training_nodes_all_nodes_count() -> None:
    graph = Graph.from_edge_index(torch.tensor([[0, 1, 2], [3, 3, 3]]), 4)
    assert expected_reads(graph, NeighborSampler([1]), 4).of_nodes.tolist() == pytest.approx(
        reads_by_hand(graph, [0, 1, 2, 3], [1], 1)
    )


def test_rows_that_are_read_most_are_those_that_batches_hold() -> None:
    graph = communities(3000, 5, num_features=8, mean_degree=12.0, train_share=0.2, seed=1)
    sampler, seeds = NeighborSampler([6, 4]), graph.split("train")
    reads = expected_reads(graph, sampler, 60)
    (held,) = most_read(reads.of_nodes, graph.types, (32,), 32 * 600)
    drawn = torch.zeros(3000)
    for epoch in range(6):
        asked = seeds[permutation(len(seeds), 0, epoch)].split(60)
        keys = [BatchKey(0, epoch, i) for i in range(len(asked))]
        for sample in sampler.sample_bulk(graph, asked, keys):
            drawn[sample.nodes] += 1
    figures = PlanFigures.of(MemoryPlan.within(32 * 600, SIZES, draws=False), graph.types, [held], reads)
    hit_rate = float(drawn[held].sum() / drawn.sum())
    assert figures.hit_rate == pytest.approx(hit_rate, abs=0.02)
    best = float(drawn.sort(descending=True).values[:600].sum() / drawn.sum())
    assert best - 0.05 < hit_rate < best


def test_rows_of_several_types_fit_together() -> None:
    types = typed_graph_of_papers(200).types
    reads = torch.arange(types.offsets[-1], dtype=torch.float64)
    widths = tuple(0 if i == 0 else 10 * i for i in range(len(types.node_types)))
    found = most_read(reads, types, widths, 1500)
    assert not len(found[0])
    used, expected = 0, [list[int]() for _ in widths]
    for node in reversed(range(types.offsets[-1])):
        kind = int(types.type_of(torch.tensor([node])))
        if widths[kind] and (used := used + widths[kind]) <= 1500:
            expected[kind].insert(0, node - types.offsets[kind])
    assert [ids.tolist() for ids in found] == expected


def test_ties_go_to_the_smaller_id() -> None:
    types = communities(20, 2, num_features=8).types
    assert most_read(torch.ones(20), types, (32,), 100)[0].tolist() == [0, 1, 2]
    assert most_read(torch.ones(20), types, (32,), 31)[0].tolist() == []


def test_figures_say_what_is_read_where() -> None:
    types = communities(50, 2, num_features=10).types
    reads = Reads(torch.tensor([5.0] * 10 + [1.0] * 40), num_batches=4)
    found = PlanFigures.of(MemoryPlan.within(1400, SIZES, draws=True), types, [torch.arange(10)], reads)
    assert (found.num_rows, found.hit_rate, found.bus_bytes) == (10, 50 / 90, 40 * 40 / 4)
    rest = "0.00 MB a batch, are gathered in RAM and cross the bus from page-locked memory"
    assert str(found) == (
        "edges and narrow arrays (0.00 MB) and 10 of 50 rows of features (0.00 MB) lie there; training batches find "
        f"55.6% of their rows there, and the others, {rest}"
    )
    for room, said in ((900, "edges and narrow arrays (0.00 MB) in RAM; training"), (3000, "all rows of"), (0, rest)):
        plan = MemoryPlan.within(room, SIZES, draws=True)
        assert said in str(PlanFigures.of(plan, types, [torch.arange(9)], reads))


def test_bytes_of_a_device_need_somebody_who_places() -> None:
    with pytest.raises(ValueError, match=r'device_bytes \(5\) .* sample_on is "cpu": give sample_on="auto"'):
        Loading(device_bytes=5)
    with pytest.raises(ValueError, match='sample_on is "device"'):
        Loading(sample_on="device", device_bytes=5)
    with pytest.raises(ValueError, match="device_bytes"):
        Loading(sample_on="auto", device_bytes=-1)
    assert Loading(sample_on="auto", device_bytes=0).device_bytes == 0
