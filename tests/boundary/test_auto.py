"""What boundary="auto" chooses, the same on all ranks."""

import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary import boundary as auto
from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Pass, choose, short_name
from lightning_gnn_dist.homes.parts import Parts, around
from lightning_gnn_dist.homes.residency import Plan
from lightning_gnn_dist.layers.choice import Neighbourhoods
from tests.boundary.models import model, weighted_data
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, every_strategy
from tests.layers.models import graph_of
from tests.ranks import run_ranks
from tests.strategies.fitting import hear


def data_of(graph: lgd.Graph, **options: Any) -> lgd.PartitionedDataModule:
    defaults: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "sampler": lgd.WholePartSampler(2)}
    return lgd.PartitionedDataModule(graph, **(defaults | options))


def quick(world_size: int, strategy: Any, max_epochs: int = 1) -> Any:
    return trainer(world_size, strategy, max_epochs=max_epochs, limit_val_batches=0, precision="64-true")


CHOICES = [
    ([10, 20, 30], [1, 1, 1], 9, lgd.Isolated()),
    ([10, 20, 30], [1, 1, 1], 30, lgd.Halo(3)),
    ([10, 20, 30], [1, 1, 1], 29, lgd.Halo(2)),
    ([10, 20, 20], [1, 1, 1], 30, lgd.Halo(2)),  # nothing is three hops away
    ([10, 20, 20], [1, 1, 1], 19, lgd.Halo(1)),
    ([10, 20, 30], [1.2, 2.0, 2.1], 30, lgd.Halo(2)),
    ([10, 20, 30], [2.5, 3, 4], 30, lgd.Isolated()),
]


@pytest.mark.parametrize(("held", "times", "allowed", "boundary"), CHOICES)
def test_the_most_exact_that_costs_no_more_than_allowed_is_chosen(held, times, allowed, boundary, monkeypatch) -> None:
    graph, steps = cut_graph()[0], Pass(lgd.WholePartSampler(len(held)), 1000, [1], False)
    of_one = len(held) * (graph.num_edges + 8 * graph.num_nodes)
    of_rank = [*held, *(round(each * of_one) for each in times)]
    monkeypatch.setattr(auto, "SMALL", 0)
    found, said = choose(graph, [of_rank], steps, allowed)
    assert found == boundary and said.startswith(f'boundary="auto" is {short_name(boundary)}')
    if held[-1] <= allowed:
        monkeypatch.setattr(auto, "SMALL", max(of_rank))  # a quick batch may be computed many times
        assert isinstance(choose(graph, [of_rank], steps, allowed)[0], lgd.Halo)


def works(sampler: Any, batch_size: int, *, has_layers: bool) -> list[float]:
    """By hand: what all ranks compute in a pass with halos of 1 and 2 hops, in times of one process."""
    graph, partition = cut_graph()
    rows = [graph.indices[a:b].tolist() for a, b in pairwise(graph.indptr.tolist())]
    trains, everything = set(graph.split("train").tolist()), set(range(len(rows)))

    def around(nodes: set[int]) -> set[int]:
        return nodes | {sender for node in nodes for sender in rows[node]}

    def into(nodes: set[int]) -> int:
        return sum(len(rows[node]) for node in nodes)

    def batch(seeds: set[int], held: set[int], receivers: set[int]) -> float:
        if isinstance(sampler, lgd.WholePartSampler) and has_layers:
            layers = [seeds, around(seeds)]
            return sum(min(into(each), into(receivers)) + 8 * min(len(each), len(held)) for each in layers)
        whole = 2.0 * (into(receivers) + 8 * len(held))
        if isinstance(sampler, lgd.WholePartSampler):
            return whole
        first, second = (math.inf if limit < 0 else limit for limit in sampler.num_neighbors)
        size, one, two = batch_size, batch_size * first, batch_size * first * second
        return min(whole, 2 * (one + 8 * size) + two + 8 * one)

    parts = [{node for node, owner in enumerate(partition.assignment.tolist()) if owner == p} for p in range(PARTS)]
    of_one = -(-len(trains) // batch_size) * batch(trains, everything, everything)
    most, found = max(len(part & trains) for part in parts), [0.0, 0.0]
    for part in parts:
        near = around(part)
        found[0] += -(-most // batch_size) * batch(part & trains, near, part) / of_one
        found[1] += -(-most // batch_size) * batch(part & trains, around(near), near) / of_one
    return found


@pytest.mark.parametrize(
    ("sampler", "batch_size", "has_layers"),
    [
        (lgd.WholePartSampler(2), 1000, False),
        (lgd.WholePartSampler(2), 1000, True),
        (lgd.WholePartSampler(2), 8, False),
        (lgd.NeighborSampler([2, 2]), 4, True),
        (lgd.NeighborSampler([9, 9]), 50, False),
        (lgd.NeighborSampler([-1, 2]), 4, False),
    ],
)
def test_work_is_counted_in_times_of_one_process(sampler: Any, batch_size: int, has_layers: bool) -> None:
    graph, partition = cut_graph()
    plan = Plan(graph, partition, lgd.Holding(), PARTS, 0)
    steps = Pass(sampler, batch_size, plan.learned_by_ranks(), has_layers)
    counted = [auto._measured(graph, plan.first_parts(rank), steps) for rank in range(PARTS)]
    sizes = torch.tensor(graph.num_nodes), torch.tensor(graph.num_edges)
    of_one = int(steps.work(Neighbourhoods(graph, 2), graph.split("train"), *sizes))
    found = [steps.times([of_rank[2 + hop] for of_rank in counted], of_one) for hop in range(2)]
    expected = works(sampler, batch_size, has_layers=has_layers)
    assert found == pytest.approx(expected) and found[1] > 1


def test_samplers_of_a_bounded_size_compute_the_same_in_each_part() -> None:
    graph, partition = cut_graph()
    plan = Plan(graph, partition, lgd.Holding(), PARTS, 0)
    steps = Pass(lgd.LadiesSampler([4, 4]), 8, [8, 8, 14], True)
    assert auto._measured(graph, plan.first_parts(0), steps)[2:] == [0, 0] and steps.times([0, 0, 0], 0) == 1


def chosen_by_work(rank: int, world_size: int) -> list[Any]:
    """What a fit on whole parts takes, where each step is long, by what it may cost."""
    auto.SMALL = 0
    graph, partition = cut_graph()
    lines, found = hear(), []
    for times in (1.4, 1.05, math.inf, 2.0):
        auto.TIMES = times
        data = data_of(graph, partitioner=partition, boundary="auto")
        quick(world_size, lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE)).fit(model("SAGE", 2), data)
        found.append(data.boundary)
    return [found, [line for line in lines if line.startswith("boundary=")]]


def test_a_fit_does_not_multiply_the_work() -> None:
    (found, lines), *others = run_ranks(chosen_by_work, PARTS)
    one, two = works(lgd.WholePartSampler(2), 1000, has_layers=True)
    assert 1.05 < one < 1.4 < two < 2
    assert found == [lgd.Halo(1), lgd.Isolated(), lgd.Halo(2), lgd.Halo(2)]
    assert all(other[0] == found for other in others)
    assert f"and {one:.1f} times the work of one process" in lines[0] and f"and {two:.1f} times the work;" in lines[0]
    assert lines[1].endswith(auto.LOST) and "SuperNode" not in lines[0]


def bytes_of_parts(hops: int) -> int:
    """The bytes of the largest part with a halo, as it is read."""
    graph, partition = cut_graph()
    plan = Plan(graph, partition, lgd.Holding(), PARTS, 0)
    readers = [Parts(plan, rank, lgd.Halo(hops), lgd.Coverage()) for rank in range(PARTS)]
    return max(reader.read(0).graph.num_bytes for reader in readers)


STRATEGIES = every_strategy(2)
NEIGHBORS = {"sampler": lgd.NeighborSampler([4, 4])}


REDEALT = {"holding": lgd.Holding(lgd.Redeal(6)), "partitioner": lgd.RandomPartitioner()}
ROTATED = {"holding": lgd.Holding(lgd.Rotate()), "partitioner": lgd.RandomPartitioner()}
# By the room: so many bytes more than the largest part takes with a halo of so many hops.
CASES: list[tuple[tuple[int, int] | None, str, dict[str, Any], Boundary]] = [
    ((1, -1), "grappa", {}, lgd.Isolated()),
    ((2, 0), "local_sgd", {}, lgd.Halo(2)),
    ((2, -1), "grappa", NEIGHBORS, lgd.Halo(1)),
    ((2, 10**6), "grappa", NEIGHBORS | ROTATED, lgd.Halo(2)),
    ((1, 10**6), "grappa", REDEALT, lgd.Halo(2)),
    (None, "grappa", {}, lgd.Halo(2)),  # a fit that sends rows in every step must be asked for
]


def chosen_by(rank: int, world_size: int) -> list[Any]:
    """What each fit has chosen, and its line in the log."""
    graph, partition = cut_graph()
    lines, found = hear(), []
    for bytes_of, strategy, options, _ in CASES:
        lines.clear()
        boundary = "auto" if bytes_of is None else lgd.Auto(bytes_of_parts(bytes_of[0]) + bytes_of[1])
        data = data_of(graph, **({"partitioner": partition, "boundary": boundary} | options))
        quick(world_size, STRATEGIES[strategy]()).fit(model("SAGE", 2), data)
        said = [line for line in lines if line.startswith("boundary=")]
        found.append((data.boundary, said))
    return found


def test_a_fit_takes_what_fits_the_largest_part() -> None:
    for rank, found in enumerate(run_ranks(chosen_by, PARTS)):
        for (taken, lines), (*_, boundary) in zip(found, CASES, strict=True):
            assert taken == boundary
            assert len(lines) == (rank == 0)
            assert all(line.startswith(f'boundary="auto" is {short_name(boundary)}') for line in lines)


def with_a_poor_rank(rank: int, world_size: int, poor: int) -> Any:
    """What is chosen where a rank has little memory."""
    auto.free_bytes = lambda: 2 * world_size * (poor if rank == 1 else 10**9)
    graph, partition = cut_graph()
    data = data_of(graph, partitioner=partition, boundary="auto")
    quick(world_size, STRATEGIES["local_sgd"]()).fit(model("SAGE", 2), data)
    return data.boundary


def test_the_rank_with_least_memory_decides_for_all() -> None:
    assert run_ranks(with_a_poor_rank, PARTS, bytes_of_parts(1)) == [lgd.Halo(1)] * PARTS


def resumed(rank: int, world_size: int, folder: Path) -> Any:
    """What a fit takes, one gone on with that has memory for less, a new one, and one with another sampler."""
    graph, taken = graph_of(weighted_data()), []
    for epochs, room, path in ((1, 10**6, None), (2, 1, folder / "half.ckpt"), (1, 1, None)):
        data = data_of(graph, boundary=lgd.Auto(room))
        running = quick(world_size, STRATEGIES["local_sgd"](), epochs)
        running.fit(model("SAGE", 2), data, ckpt_path=path)
        running.save_checkpoint(folder / f"{'half' if room > 1 else 'other'}.ckpt")
        taken.append(data.boundary)
    try:
        other = data_of(graph, boundary="auto", sampler=lgd.WholePartSampler(1))
        running.fit(model("SAGE", 2), other, ckpt_path=folder / "half.ckpt")
    except ValueError as error:
        return taken, str(error)


def test_a_resumed_fit_keeps_what_was_chosen_and_another_chooses_for_itself(tmp_path: Path) -> None:
    for taken, said in run_ranks(resumed, 2, tmp_path):
        assert taken == [lgd.Halo(2), lgd.Halo(2), lgd.Isolated()]
        assert said.startswith('boundary="auto" was Halo(2) in the fit of the checkpoint, and can be Halo(1), Isolated')


def test_one_rank_has_nothing_to_choose() -> None:
    data = data_of(graph_of(weighted_data()), boundary="auto")
    quick(1, "auto").fit(model("SAGE", 2), data)
    assert data.boundary == lgd.Auto()


def test_a_part_can_be_looked_at_before_a_fit() -> None:
    graph, partition = cut_graph()
    room = bytes_of_parts(1)
    data = data_of(graph, partitioner=partition, boundary=lgd.Auto(room))
    expected = data_of(graph, partitioner=partition, boundary=lgd.Halo(1))
    for rank in range(PARTS):
        assert data.part(rank, PARTS).num_nodes == expected.part(rank, PARTS).num_nodes


PARTS = 3


def cut_graph() -> tuple[lgd.Graph, lgd.Partition]:
    graph = graph_of(weighted_data())
    owner = torch.randint(PARTS, (graph.num_nodes,), generator=torch.Generator().manual_seed(2), dtype=torch.int32)
    owner[:40] = 0
    return graph, lgd.Partition(owner, PARTS)


# A boundary of a user's own: what it brings along is in the part, and what is wrong with it is said by its name.


# 3 -> 0, 4 -> 1, 5 -> 3; a part of the nodes 0 and 1.
GRAPH = lgd.Graph.from_edge_index(torch.tensor([[3, 4, 5], [0, 1, 3]]), 6)
RESIDENTS = torch.tensor([0, 1])


@dataclass(frozen=True)
class Given(Boundary):
    """Brings along what it is given."""

    hops: Any

    def around(self, graph: lgd.Graph, residents: Tensor, edges_into: EdgesInto, seed: int) -> list[Tensor]:
        found: list[Tensor] = self.hops
        return found


class Rows:
    """The graph as rows of a part."""

    sizes = GRAPH

    def edges_into(self, nodes: Tensor) -> Any:
        raise AssertionError("nobody asks")

    def among(self, nodes: Tensor, hops: list[Tensor]) -> lgd.Graph:
        self.asked = nodes.tolist(), [hop.tolist() for hop in hops]
        return GRAPH


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def test_hops_are_taken_as_they_are() -> None:
    rows = Rows()
    _, nodes, is_own = around(rows, RESIDENTS, ids(1), Given([ids(3, 4), ids(5)]), 0)
    assert nodes.tolist() == [0, 1, 3, 4, 5] and is_own.tolist() == [False, True, False, False, False]
    assert rows.asked == ([0, 1, 3, 4, 5], [[0, 1], [3, 4]])


@pytest.mark.parametrize(
    ("hops", "error", "reason"),
    [
        (None, TypeError, "must return a list of vectors of int64, the ids of each hop, got None"),
        (ids(3), TypeError, "got a tensor of torch.int64 and shape (1,)"),
        ([[3, 4]], TypeError, "got a list of [3, 4]"),
        ([ids(3).int()], TypeError, "got a list of a tensor of torch.int32 and shape (1,)"),
        ([ids(3), ids(6)], ValueError, "ids of the 6 nodes of the graph, and those of its hop 2 go from 6 to 6"),
        ([ids(-1, 3)], ValueError, "and those of its hop 1 go from -1 to 3"),
        ([ids(3, 3)], ValueError, "each outside node once, in the first hop that reaches it, and no node of the part"),
        ([ids(3), ids(1)], ValueError, "got node 1 again"),
    ],
)
def test_what_is_wrong_is_said_by_name(hops: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error) as refused:
        around(Rows(), RESIDENTS, RESIDENTS, Given(hops), 0)
    assert str(refused.value).startswith("Given.around() must return ") and reason in str(refused.value)
