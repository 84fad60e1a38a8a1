"""What boundary=Exchange(sums=True) sends, computes and refuses."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Exchange, Graph, PartitionedDataModule, RandomPartitioner, WholePartSampler, save_shards
from lightning_gnn_dist.boundary.cover import smallest_cover
from lightning_gnn_dist.boundary.prices import prices
from tests.boundary.models import Model, Weights, check_learned, learned_by_hand, model, weighted_data, weights_of
from tests.boundary.test_exchange import data_of, quick, rows_moved, sent_by
from tests.boundary.test_whole_graph import DATA, exchanges, fit, odd
from tests.layers.models import graph_of
from tests.ranks import run_ranks

SUMS = Exchange(sums=True)


def plain_data() -> Data:
    """The graph of the other tests, whose edges count alike."""
    data = weighted_data()
    del data.edge_weight
    return data


# The smallest cover.


def largest_matching(edges: set[tuple[int, int]]) -> int:
    """By trying a path from each left end in turn."""
    partner = dict[int, int]()

    def finds(left: int, tried: set[int]) -> bool:
        for right in {r for e, r in edges if e == left} - tried:
            tried.add(right)
            if right not in partner or finds(partner[right], tried):
                partner[right] = left
                return True
        return False

    return sum(finds(left, set()) for left in {left for left, _ in edges})


@pytest.mark.parametrize("num_edges", [0, 1, 12, 40, 90])
def test_a_cover_is_as_large_as_a_matching(num_edges: int) -> None:
    for seed in range(10):
        chance = torch.Generator().manual_seed(seed)
        left, right = torch.randint(5, 25, (2, num_edges), generator=chance)
        lefts, rights = smallest_cover(left, right)
        assert bool((torch.isin(left, lefts) | torch.isin(right, rights)).all())
        edges = set(zip(left.tolist(), right.tolist(), strict=True))
        assert len(lefts) + len(rights) == largest_matching(edges)


# What is learned.


CASES = {True: [("GCN", 3), ("GCN", 2)], False: [("SAGE", 3), ("GIN", 3), ("JK", 3), ("PyG GCN", 3), ("SAGE", 1)]}


def with_sums(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    return {**exchanges(num_layers, data, world_size), "boundary": SUMS}


@pytest.mark.parametrize("is_weighted", [True, False])
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5))])
def test_sums_in_the_place_of_rows_lose_nothing(world_size: int, is_weighted: bool) -> None:
    data, cases = weighted_data() if is_weighted else plain_data(), CASES[is_weighted]
    check_learned(cases, run_ranks(fit, world_size, data, cases, {"data": with_sums}), 3)


def test_weights_that_are_not_positive_are_no_divisors() -> None:
    data = weighted_data()
    data.edge_weight[::3] *= -1
    data.edge_weight[::7] = 0
    hand = model("GCN", 3)
    optimizer = hand.configure_optimizers()
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(hand.whole(data)[data.train_mask], data.y[data.train_mask]).backward()
        optimizer.step()
    for (found,) in run_ranks(fit, 2, data, [("GCN", 3)], {"data": with_sums}):
        for key, value in weights_of(hand).items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12)


def resumed(rank: int, world_size: int, folder: Path, exchange: Exchange) -> Weights:
    """In shards, stopped half-way."""
    for epochs, path in ((2, None), (4, folder / "half.ckpt")):
        module, running = model("SAGE", 3), quick(world_size, max_epochs=epochs)
        parts = PartitionedDataModule(folder / "shards", sampler=WholePartSampler(3), boundary=exchange)
        running.fit(module, parts, ckpt_path=path)
        running.save_checkpoint(folder / "half.ckpt")
    return weights_of(module)


@pytest.mark.parametrize("exchange", [SUMS, Exchange(sums=True, bits=16, share=0.5)], ids=repr)
def test_a_resumed_fit_in_shards_is_one_process(exchange: Exchange, tmp_path: Path) -> None:
    data = plain_data()
    save_shards(graph_of(data), odd(data, 3), tmp_path / "shards")
    expected, of_ranks = learned_by_hand("SAGE", 3, data, 4), run_ranks(resumed, 3, tmp_path, exchange)
    for key, value in expected.items():
        assert torch.allclose(of_ranks[0][key], value, rtol=0, atol=1e-12 if exchange == SUMS else 0.1), key
        assert all(torch.equal(found[key], of_ranks[0][key]) for found in of_ranks)


def on_devices(rank: int, world_size: int) -> Weights:
    module = model("GCN", 3)
    quick(world_size, max_epochs=3, accelerator="gpu").fit(module, data_of(graph_of(weighted_data()), 3, boundary=SUMS))
    return {name: value.cpu() for name, value in weights_of(module).items()}


@pytest.mark.gpu
def test_devices_learn_what_one_process_does() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("fewer than 2 CUDA devices")
    expected = learned_by_hand("GCN", 3, weighted_data(), 3)
    for found in run_ranks(on_devices, 2):
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=1e-9)


# What is sent.


def moved(data: Data, owner: list[int], num_layers: int, num_ranks: int) -> list[int]:
    """The rows and sums, and gradients of these, that each rank sends in a step, edge by edge."""
    edges = list(zip(*data.edge_index.tolist(), strict=True))
    computed, found = set(data.train_mask.nonzero().view(-1).tolist()), [0] * num_ranks
    for _ in range(num_layers - 1):  # behind the last but one, and on to the first
        read = [(u, v) for u, v in edges if v in computed]
        for giver, reader in itertools.permutations(range(num_ranks), 2):
            number = largest_matching({(u, v) for u, v in read if (owner[u], owner[v]) == (giver, reader)})
            found[giver] += number
            found[reader] += number
        computed |= {u for u, _ in read}
    return found


def sent(rank: int, world_size: int, data: Data) -> tuple[list[float], list[float], float]:
    return sent_by(world_size, data, SUMS)


def test_a_step_sends_as_many_as_the_smallest_covers_have() -> None:
    data, num_ranks = plain_data(), 3
    graph = graph_of(data)
    partition = RandomPartitioner()(graph, num_ranks, seed=0)
    owner = partition.assignment.tolist()
    expected, of_rows = moved(data, owner, 3, num_ranks), rows_moved(data, owner, 3, num_ranks)
    assert sum(expected) < 0.9 * sum(of_rows)
    headers = 2 * 2 * (num_ranks - 1) * 8 * 7
    for rank, (_, at_boundary, _) in enumerate(run_ranks(sent, num_ranks, data)):
        assert at_boundary == [headers + expected[rank] * 5 * 8] * 3
    found = {price.boundary: price for price in prices(graph, partition, partition.report(graph), 3, 5)}
    assert found[SUMS].bytes_sent == max(expected) * 5 * 4 and found[SUMS].loses == "nothing"


# What is refused.


class Maximum(Model):
    def __init__(self, aggr: str = "max") -> None:
        super().__init__(lambda a, b: SAGEConv(a, b, aggr=aggr), 2)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        (block,) = batch.blocks
        return self._between(conv, conv((batch.x, batch.x[: block.num_dst]), block.edge_index))


class DropsBefore(Model):
    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        (block,) = batch.blocks
        x = functional.dropout(batch.x, 0.5)
        return self._between(conv, conv((x, x[: block.num_dst]), block.adj))


REFUSED: list[Any] = [Maximum, lambda: model("GAT", 2), DropsBefore, lambda: model("SAGE", 2)]


def refused(rank: int, world_size: int) -> list[str]:
    """The last one counts edges alike in a graph that weighs them."""
    found = []
    for make, data in zip(REFUSED, [*[plain_data()] * 3, weighted_data()], strict=True):
        with pytest.raises(ValueError, match="Leave sums out") as caught:
            quick(world_size).fit(make(), data_of(graph_of(data), boundary=SUMS))
        found.append(str(caught.value))
    return found


def test_layers_that_do_not_add_up_are_refused_on_all_ranks() -> None:
    for found in run_ranks(refused, 3):
        for said in found:
            assert "Layer 1 of layers() returns other rows where neighbours have their mean" in said


def test_a_graph_with_types_is_refused() -> None:
    with pytest.raises(ValueError, match=r"boundary=Exchange\(sums=True\) is for a graph without types"):
        data_of(Graph.from_pyg(DATA), boundary=SUMS)
