"""Who holds what: everything is somebody's own, and a sweep shows a rank all that it promises."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_gnn_dist import Fixed, Holding, Redeal, Rotate
from lightning_gnn_dist.homes.residency import Held, Residency, default_period, held_by_all

ALL = [Fixed(), Rotate(), Redeal(40)]


@pytest.mark.parametrize("residency", ALL, ids=repr)
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_every_chunk_is_own_on_one_rank(residency: Residency, world_size: int) -> None:
    for super_epoch in range(7):
        held = [residency.held(super_epoch, rank, world_size, seed=3) for rank in range(world_size)]
        assert sorted(chunk for one in held for chunk in one.own) == list(range(residency.num_chunks(world_size)))
        assert all(not set(one.own) & set(one.others) for one in held)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_the_variable_chunk_visits_every_other_chunk_once_a_sweep(world_size: int) -> None:
    for rank in range(world_size):
        visited = [Rotate().held(s, rank, world_size, 0).others for s in range(Rotate().sweep(world_size))]
        assert sorted(visited) == [(chunk,) for chunk in range(world_size) if chunk != rank]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_no_chunk_is_variable_on_two_ranks(world_size: int) -> None:
    for super_epoch in range(10):
        others = [Rotate().held(super_epoch, rank, world_size, 0).others for rank in range(world_size)]
        assert sorted(others) == [(chunk,) for chunk in range(world_size)]


@dataclass(frozen=True)
class Custom(Fixed):
    """One of two ranks' making."""

    ranks: tuple[Any, Any]

    def held(self, super_epoch: int, rank: int, world_size: int, seed: int) -> Any:
        return self.ranks[rank]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        (((0,), (1,)), r"Custom.held\(\) must return Held\(own, others\), got \(0,\)"),
        ((Held((0,)), Held((0,))), r"exactly one rank's own.*\[\(0,\), \(0,\)\]"),
        ((Held((0,), (0,)), Held((1,))), "both as own and as others"),
        ((Held((0,)), Held((2,))), "chunks from 0 to 1"),
    ],
)
def test_what_a_residency_says_is_checked(ranks: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        held_by_all(Custom(ranks), 0, 2, 0)


def test_redealing_depends_on_seed_and_super_epoch_alone() -> None:
    deals = {(seed, s): Redeal(40).held(s, 1, 4, seed) for seed in range(3) for s in range(3)}
    assert len(set(deals.values())) == 9
    assert all(Redeal(40).held(s, 1, 4, seed) == held for (seed, s), held in deals.items())
    assert all(len(held.own) == 10 for held in deals.values())


@pytest.mark.parametrize(
    ("max_epochs", "sweep", "period"), [(50, 7, 7), (7, 7, 1), (3, 7, 1), (None, 7, 1), (-1, 7, 1), (100, 1, 100)]
)
def test_by_default_a_sweep_fits_the_run(max_epochs: Any, sweep: int, period: int) -> None:
    assert default_period(max_epochs, sweep) == period


def test_too_few_super_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_supernodes \(3\) must be at least the number of ranks \(4\)"):
        Redeal(3).num_chunks(4)


def test_parts_that_never_change_have_no_period() -> None:
    with pytest.raises(ValueError, match=r"every=2 says how often parts change, and with Fixed\(\) they never do"):
        Holding(every=2)
