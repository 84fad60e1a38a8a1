"""What boundary="auto" chooses, and that all ranks and a resumed fit choose the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist import (
    Auto,
    Coverage,
    EverySteps,
    Exchange,
    Halo,
    Holding,
    Isolated,
    LocalSGDStrategy,
    NeighborSampler,
    RandomPartitioner,
    Redeal,
    Rotate,
)
from lightning_gnn_dist.boundary import auto
from lightning_gnn_dist.boundary.auto import choose
from lightning_gnn_dist.boundary.boundary import Boundary
from lightning_gnn_dist.homes.part_reader import PartReader
from tests.boundary.models import model, weighted_data, weights_of
from tests.boundary.test_exchange import check, data_of, quick
from tests.boundary.test_prices import PARTS, cut_graph
from tests.every_strategy import PATIENCE
from tests.layers.models import graph_of
from tests.ranks import run_ranks
from tests.strategies.fitting import hear


@pytest.mark.parametrize(
    ("held", "room", "exchanges", "boundary", "better"),
    [
        ([10, 20, 30], 10, True, Exchange(), None),
        ([10, 20, 30], 9, True, Isolated(), (Halo(1), 10)),
        ([10, 20, 30], 30, False, Halo(3), None),
        ([10, 20, 30], 29, False, Halo(2), (Halo(3), 30)),
        ([10, 20, 20], 30, False, Halo(2), None),  # nothing is three hops away
        ([10, 20, 20], 19, False, Halo(1), (Halo(2), 20)),
        ([10], 5, False, Isolated(), (Halo(1), 10)),
    ],
)
def test_the_most_exact_that_fits_is_chosen(
    held: list[int], room: int, exchanges: bool, boundary: Boundary, better: Any
) -> None:
    choice = choose(held, room, exchanges=exchanges)
    assert (choice.boundary, choice.better) == (boundary, better)
    assert auto.short_name(boundary) in choice.told(room)


def bytes_of_parts(hops: int) -> int:
    """The bytes of the largest part with a halo, as it is read."""
    graph, partition = cut_graph()
    settings = PARTS, 0, Halo(hops), Coverage()
    readers = [PartReader(graph, partition, Holding(), rank, *settings) for rank in range(PARTS)]
    return max(reader.read(0).graph.num_bytes for reader in readers)


STRATEGIES: dict[str, Any] = {"grappa": lambda: None, "local_sgd": lambda: LocalSGDStrategy(EverySteps(2), **PATIENCE)}
NEIGHBORS = {"sampler": NeighborSampler([4, 4])}


REDEALT = {"holding": Holding(Redeal(6)), "partitioner": RandomPartitioner()}
ROTATED = {"holding": Holding(Rotate()), "partitioner": RandomPartitioner()}
CASES: list[tuple[tuple[int, int] | None, str, dict[str, Any], Boundary]] = [
    ((1, 0), "grappa", {}, Exchange()),
    ((1, -1), "grappa", {}, Isolated()),
    ((2, 0), "local_sgd", {}, Halo(2)),
    ((2, -1), "grappa", NEIGHBORS, Halo(1)),
    ((2, 10**6), "grappa", NEIGHBORS | ROTATED, Halo(2)),
    ((1, 10**6), "grappa", REDEALT, Halo(2)),
    (None, "grappa", {}, Halo(2)),  # a fit that sends rows in every step must be asked for
]


def asked(bytes_of: tuple[int, int] | None, strategy: str) -> Any:
    """So many bytes more than the largest part takes with a halo of so many hops."""
    if bytes_of is None:
        return "auto"
    return Auto(bytes_of_parts(bytes_of[0]) + bytes_of[1], exchange=strategy == "grappa")


def chosen_by(rank: int, world_size: int) -> list[Any]:
    """What each fit has chosen, and its line in the log."""
    graph, partition = cut_graph()
    lines, found = hear(), []
    for bytes_of, strategy, options, _ in CASES:
        lines.clear()
        data = data_of(graph, **({"partitioner": partition, "boundary": asked(bytes_of, strategy)} | options))
        quick(world_size, STRATEGIES[strategy](), max_epochs=1).fit(model("SAGE", 2), data)
        said = [line for line in lines if line.startswith("boundary=")]
        found.append((data.boundary, data.coverage is None, said))
    return found


def test_a_fit_takes_what_fits_the_largest_part() -> None:
    for rank, found in enumerate(run_ranks(chosen_by, PARTS)):
        for (taken, is_uncovered, lines), (*_, boundary) in zip(found, CASES, strict=True):
            assert taken == boundary and is_uncovered == isinstance(boundary, Exchange)
            assert len(lines) == (rank == 0)
            assert all(line.startswith(f'boundary="auto" is {auto.short_name(boundary)}') for line in lines)


def with_a_poor_rank(rank: int, world_size: int, poor: int) -> Any:
    """What is chosen where a rank has little memory."""
    auto.free_bytes = lambda: 2 * world_size * (poor if rank == 1 else 10**9)
    graph, partition = cut_graph()
    data = data_of(graph, partitioner=partition, boundary="auto")
    quick(world_size, STRATEGIES["local_sgd"](), max_epochs=1).fit(model("SAGE", 2), data)
    return data.boundary


def test_the_rank_with_least_memory_decides_for_all() -> None:
    assert run_ranks(with_a_poor_rank, PARTS, bytes_of_parts(1)) == [Halo(1)] * PARTS


def resumed(rank: int, world_size: int, folder: Path) -> Any:
    """The weights of a fit whose second half has memory for less, and what it takes; then with another sampler."""
    graph, rows = graph_of(weighted_data()), []
    for epochs, room, path in ((2, 10**6, None), (4, 1, folder / "half.ckpt")):
        module, data = model("SAGE", 2), data_of(graph, boundary=Auto(room, exchange=True))
        running = quick(world_size, max_epochs=epochs)
        running.fit(module, data, ckpt_path=path)
        running.save_checkpoint(folder / "half.ckpt")
        rows.append(data.boundary)
    try:
        other = data_of(graph, boundary=Auto(exchange=True), **NEIGHBORS)
        quick(world_size, max_epochs=6).fit(model("SAGE", 2), other, ckpt_path=folder / "half.ckpt")
    except ValueError as error:
        return weights_of(module), rows, str(error)


def test_a_resumed_fit_keeps_what_was_chosen(tmp_path: Path) -> None:
    for weights, rows, said in run_ranks(resumed, 2, tmp_path):
        check(weights, "SAGE", 4)
        assert rows == [Exchange(), Exchange()]
        assert said.startswith('boundary="auto" was Exchange() in the fit of the checkpoint, and can be Halo(2), Halo')


def chosen_again(rank: int, world_size: int) -> list[Any]:
    graph, partition = cut_graph()
    data, found = data_of(graph, partitioner=partition, boundary=Auto(exchange=True)), []
    for strategy in STRATEGIES:
        quick(world_size, STRATEGIES[strategy](), max_epochs=1).fit(model("SAGE", 2), data)
        found.append((data.boundary, data.coverage))
    return found


def test_each_fit_chooses_for_itself() -> None:
    for found in run_ranks(chosen_again, PARTS):
        assert found == [(Exchange(), None), (Halo(2), Coverage())]


def test_one_rank_has_nothing_to_choose() -> None:
    data = data_of(graph_of(weighted_data()), boundary="auto")
    quick(1, "auto", max_epochs=1).fit(model("SAGE", 2), data)
    assert data.boundary == Auto()


def test_a_part_can_be_looked_at_before_a_fit() -> None:
    graph, partition = cut_graph()
    room = bytes_of_parts(1)
    data = data_of(graph, partitioner=partition, boundary=Auto(room))
    expected = data_of(graph, partitioner=partition, boundary=Halo(1))
    for rank in range(PARTS):
        assert data.part(rank, PARTS).num_nodes == expected.part(rank, PARTS).num_nodes
