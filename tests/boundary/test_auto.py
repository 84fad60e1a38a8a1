"""What boundary="auto" chooses, the same on all ranks."""

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary import boundary as auto
from lightning_gnn_dist.boundary.boundary import Boundary, EdgesInto, Pass, choose, short_name
from lightning_gnn_dist.homes.parts import Parts, around
from lightning_gnn_dist.homes.residency import Plan
from lightning_gnn_dist.layers.choice import Neighbourhoods
from tests.boundary.models import Weights, model, weighted_data, weights_of
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, every_strategy
from tests.graph.parted import small_graph
from tests.layers.models import graph_of
from tests.placing import batches_of
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


# ``Halo(seed_hops=...)``: a rank learns from training nodes of its halo too, as many a pass as its part has.


RANKS, ROUNDS, STEPS = 3, 3, 2
AROUND = lgd.Halo(2, seed_hops=1)
SETTINGS: dict[str, Any] = {"sampler": lgd.NeighborSampler([-1]), "batch_size": 9, "seed": 2, "boundary": AROUND}


def unequal(num_nodes: int) -> lgd.Partition:
    """Three parts, of about a half, a third and a sixth of the nodes."""
    kind = torch.randint(6, (num_nodes,), generator=torch.Generator().manual_seed(5))
    return lgd.Partition(torch.tensor([0, 0, 0, 1, 1, 2])[kind].int(), RANKS)


def seeds_by_hand(graph: lgd.Graph, owner: Tensor, rank: int, hops: int) -> tuple[set[int], set[int]]:
    """The training nodes of a part, and those around it, by their ids in the whole graph."""
    own = set((owner == rank).nonzero().view(-1).tolist())
    found = set(own)
    for _ in range(hops):
        for node in sorted(found):
            found |= set(graph.indices[graph.indptr[node] : graph.indptr[node + 1]].tolist())
    train = set(graph.node_arrays["train_mask"].nonzero().view(-1).tolist())
    return own & train, (found - own) & train


def sparse_graph() -> lgd.Graph:
    graph = small_graph(300, 500)
    del graph.node_arrays["n_id"]
    return graph


def loader_of(graph: lgd.Graph, rank: int, boundary: Boundary, num_batches: int, **options: Any) -> Any:
    data = lgd.PartitionedDataModule(graph, partitioner=unequal(300), boundary=boundary, seed=1, **options)
    return batches_of(data, data.part(rank, RANKS), num_batches, 1, rank, RANKS)


@pytest.mark.parametrize(("rank", "hops"), [(0, 1), (2, 2)])
def test_a_pass_draws_as_many_seeds_as_the_part_has(rank: int, hops: int) -> None:
    graph = sparse_graph()
    own, around = seeds_by_hand(graph, unequal(300).assignment, rank, hops)
    assert own and around
    loader = loader_of(graph, rank, lgd.Halo(3, seed_hops=hops), 4)
    times = Counter[int]()
    for _ in range(200):
        seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in loader])
        assert len(seeds) == len(seeds.unique()) == loader.num_seeds == len(own)
        times.update(seeds.tolist())
    assert set(times) == own | around
    share = len(own) / len(own | around)
    chi_square = sum((n - 200 * share) ** 2 / (200 * share * (1 - share)) for n in times.values())
    assert chi_square < len(times) + 5 * (2 * len(times)) ** 0.5


def test_seeds_have_labels_numbers_and_all_their_neighbours() -> None:
    graph, train = sparse_graph(), sparse_graph().split("train")
    for batch in loader_of(graph, 2, AROUND, 3, sampler=lgd.NeighborSampler([-1])):
        seeds = batch.n_id[: batch.batch_size]
        assert batch.y.equal(graph.node_arrays["y"][seeds])
        assert train[batch.input_id].equal(seeds)
        assert torch.bincount(batch.edge_index[1], minlength=len(seeds)).equal(graph.degrees()[seeds])


def test_a_part_without_a_halo_has_its_own_seeds() -> None:
    graph = sparse_graph()
    ends = torch.stack([graph.indices.long(), torch.arange(300).repeat_interleave(graph.degrees())])
    inside = ends[:, unequal(300).assignment[ends[0]] == unequal(300).assignment[ends[1]]]
    apart = lgd.Graph.from_edge_index(inside, 300, graph.node_arrays)
    plain, more = (loader_of(apart, 1, boundary, 4) for boundary in (lgd.Halo(2), AROUND))
    for a, b in zip(plain, more, strict=True):
        assert a.n_id.equal(b.n_id)


def test_samplers_that_order_seeds_draw_them_too() -> None:
    graph = sparse_graph()
    graph.node_arrays["chunk"] = torch.arange(300) % 7
    own, around = seeds_by_hand(graph, unequal(300).assignment, 1, 1)
    loader = loader_of(graph, 1, AROUND, 3, sampler=lgd.ClusterSampler(2, "chunk"))
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in loader]).tolist()
    assert len(seeds) == len(set(seeds)) == len(own) and set(seeds) <= own | around


# By hand: one layer, so that a seed sees in its rank's part what it sees in the whole graph.


def learned_by_hand(of_ranks: list[list[Tensor]]) -> Weights:
    """Local SGD on the whole graph, of ranks that take these seeds in their steps."""
    data = weighted_data()
    owner = unequal(data.num_nodes).assignment
    counts = torch.bincount(owner[data.train_mask], minlength=RANKS).double()
    replicas = [model("SAGE", 1) for _ in range(RANKS)]
    optimizers = [replica.configure_optimizers() for replica in replicas]
    for step in range(ROUNDS * STEPS):
        for replica, optimizer, seeds in zip(replicas, optimizers, of_ranks, strict=True):
            optimizer.zero_grad()
            rows = replica.whole(data.x, data.edge_index)
            functional.cross_entropy(rows[seeds[step]], data.y[seeds[step]]).backward()
            optimizer.step()
        if step % STEPS == STEPS - 1:
            with torch.no_grad():
                for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
                    mean = sum(w * p for w, p in zip(counts / counts.sum(), parameters, strict=True))
                    for parameter in parameters:
                        parameter.copy_(mean)
    return weights_of(replicas[0])


def recorded(module: Any) -> list[Tensor]:
    """The seeds of every step that a module takes from now on."""
    seen: list[Tensor] = []
    step = module.training_step
    module.training_step = lambda batch: (seen.append(batch.n_id[: batch.batch_size].clone()), step(batch))[1]
    return seen


def local_sgd() -> lgd.LocalSGDStrategy:
    return lgd.LocalSGDStrategy(lgd.EverySteps(STEPS), weights="nodes", **PATIENCE)


def parts(**options: Any) -> lgd.PartitionedDataModule:
    data = weighted_data()
    return lgd.PartitionedDataModule(graph_of(data), partitioner=unequal(data.num_nodes), **(SETTINGS | options))


def fit_and_resume(rank: int, world_size: int, folder: Path) -> tuple[list[Tensor], list[Weights]]:
    """The seeds of a fit, its weights, and those of one that stopped after a round and was resumed."""
    found = []
    for rounds, path in ((ROUNDS, None), (1, None), (ROUNDS, folder / "stopped.ckpt")):
        module, running = model("SAGE", 1), quick(world_size, local_sgd(), rounds)
        seen = recorded(module)
        running.fit(module, parts(), ckpt_path=path)
        if rounds == 1:
            running.save_checkpoint(folder / "stopped.ckpt")
        found.append((seen, weights_of(module)))
    return found[0][0], [found[0][1], found[2][1]]


def test_local_steps_on_these_seeds_are_those_by_hand_also_if_resumed(tmp_path: Path) -> None:
    of_ranks = run_ranks(fit_and_resume, RANKS, tmp_path)
    expected = learned_by_hand([seeds for seeds, _ in of_ranks])
    owner, strangers = unequal(weighted_data().num_nodes).assignment, 0
    for rank, (seeds, (whole, resumed)) in enumerate(of_ranks):
        strangers += int((owner[torch.cat(seeds)] != rank).sum())
        for key, value in expected.items():
            assert torch.allclose(whole[key], value, rtol=0, atol=1e-12), key
            assert torch.equal(resumed[key], whole[key]), key
    assert strangers


# What cannot be meant.


def refused(rank: int, world_size: int) -> str:
    try:
        quick(world_size, lgd.GrappaStrategy(**PATIENCE)).fit(model("SAGE", 1), parts())
    except ValueError as error:
        return str(error)
    return ""


def test_strategies_that_exchange_gradients_refuse_such_seeds() -> None:
    for said in run_ranks(refused, RANKS):
        assert "With GrappaStrategy they do not, and such nodes would count several times: leave seed_hops out" in said


USELESS: list[tuple[Any, str]] = [
    (lambda: lgd.Halo(seed_hops=1), r"\(1\) must be below hops \(1\), .*Halo\(2, seed_hops=1\) has one hop more"),
    (lambda: lgd.Halo(2, seed_hops=2), r"Halo\(3, seed_hops=2\) has one hop more"),
    (lambda: parts(holding=lgd.Holding(lgd.Rotate())), "is for parts for good, .*: leave seed_hops out, or holding"),
]


@pytest.mark.parametrize(("make", "message"), USELESS)
def test_seeds_of_a_halo_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_one_process_has_no_halo() -> None:
    data = parts()
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in data.train_dataloader()])
    assert seeds.sort().values.equal(weighted_data().train_mask.nonzero().view(-1))
    data.teardown("fit")
