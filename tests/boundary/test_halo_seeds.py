"""``Halo(seed_hops=...)``: a rank learns from training nodes of its halo too, as many a pass as its part has."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import lightning_gnn_dist as lgd
from lightning_gnn_dist.boundary.boundary import Boundary
from tests.boundary.models import Weights, model, weighted_data, weights_of
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.graph.parted import small_graph
from tests.layers.models import graph_of
from tests.placing import batches_of
from tests.ranks import run_ranks

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
            functional.cross_entropy(replica.whole(data)[seeds[step]], data.y[seeds[step]]).backward()
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


def quick(strategy: Any, rounds: int = ROUNDS, world_size: int = RANKS) -> Any:
    return trainer(world_size, strategy, max_epochs=rounds, limit_val_batches=0, precision="64-true")


def parts(**options: Any) -> lgd.PartitionedDataModule:
    data = weighted_data()
    return lgd.PartitionedDataModule(graph_of(data), partitioner=unequal(data.num_nodes), **(SETTINGS | options))


def fit(rank: int, world_size: int, folder: Path) -> tuple[list[Tensor], list[Weights]]:
    """The seeds of a fit, its weights, and those of one that stopped after a round and was resumed."""
    found = []
    for rounds, path in ((ROUNDS, None), (1, None), (ROUNDS, folder / "stopped.ckpt")):
        module, running = model("SAGE", 1), quick(local_sgd(), rounds)
        seen = recorded(module)
        running.fit(module, parts(), ckpt_path=path)
        if rounds == 1:
            running.save_checkpoint(folder / "stopped.ckpt")
        found.append((seen, weights_of(module)))
    return found[0][0], [found[0][1], found[2][1]]


def test_local_steps_on_these_seeds_are_those_by_hand_also_if_resumed(tmp_path: Path) -> None:
    of_ranks = run_ranks(fit, RANKS, tmp_path)
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
        quick(lgd.GrappaStrategy(**PATIENCE), world_size=world_size).fit(model("SAGE", 1), parts())
    except ValueError as error:
        return str(error)
    return ""


def test_strategies_that_exchange_gradients_refuse_such_seeds() -> None:
    for said in run_ranks(refused, RANKS):
        assert "With GrappaStrategy they do not, and such nodes would count several times: leave seed_hops out" in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"seed_hops": 1}, r"seed_hops \(1\) must be below hops \(1\), .*Halo\(2, seed_hops=1\) has one hop more"),
        ({"hops": 2, "seed_hops": 2}, r"Halo\(3, seed_hops=2\) has one hop more"),
    ],
)
def test_hops_that_cannot_be_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        lgd.Halo(**wrong)


def test_parts_that_change_refuse_such_seeds() -> None:
    with pytest.raises(ValueError, match=r"is for parts for good, without .* nodes: leave seed_hops out, or holding"):
        parts(holding=lgd.Holding(lgd.Rotate()))


def test_one_process_has_no_halo() -> None:
    data = parts()
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in data.train_dataloader()])
    assert seeds.sort().values.equal(weighted_data().train_mask.nonzero().view(-1))
    data.teardown("fit")
