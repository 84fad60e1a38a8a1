"""Membership, as far as one process can tell. The rest is in strategies/test_elastic_rounds.py."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist.wire.membership import (
    LIGHTHOUSE,
    RANK,
    RANKS,
    Elastic,
    Membership,
    check_available,
    name_of_rank,
    quorum_of,
)
from lightning_gnn_dist.wire.membership import _flatten as flatten
from lightning_gnn_dist.wire.membership import _write_back as write_back

HAS_TORCHFT = importlib.util.find_spec("torchft") is not None


def some_tensors(value: float) -> list[Tensor]:
    return [
        torch.full((2, 3), value),
        torch.full((4,), value, dtype=torch.float16),
        torch.full((), value, dtype=torch.float64),
        torch.full((2,), int(value)),
        torch.full((1,), complex(value, -value)),
    ]


def test_a_mean_is_weighed_and_written_into_the_old_storage() -> None:
    mine, yours = some_tensors(1.0), some_tensors(9.0)
    sums = {kind: flatten(mine, 3.0)[kind] + flatten(yours, 1.0)[kind] for kind in (torch.float32, torch.float64)}
    places = [tensor.data_ptr() for tensor in mine]
    write_back(sums, mine)
    for tensor, expected in zip(mine, some_tensors(3.0), strict=True):
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected)
    assert [tensor.data_ptr() for tensor in mine] == places


def test_without_weight_everything_stays_as_it_is() -> None:
    tensors = some_tensors(2.0)
    write_back(flatten(some_tensors(7.0), 0.0), tensors)
    assert all(torch.equal(tensor, before) for tensor, before in zip(tensors, some_tensors(2.0), strict=True))


def test_a_quorum_is_a_majority() -> None:
    assert [quorum_of(ranks) for ranks in (1, 2, 3, 4, 5, 8)] == [1, 2, 2, 3, 3, 5]


def test_names_sort_as_numbers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for rank in (2, 10, 100):
        monkeypatch.setenv(RANK, str(rank))
        names.append(name_of_rank())
    assert names == sorted(names)
    for variable in (RANK, "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(variable, raising=False)
    assert "-" in name_of_rank()  # host and process


def test_the_launcher_says_how_many_ranks_to_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Elastic().ranks == 1
    monkeypatch.setenv(RANKS, "4")
    assert Elastic().ranks == 4 and Elastic(ranks=3).ranks == 3


@pytest.mark.parametrize("option", ["patience", "timeout", "attempts", "ranks", "start"])
def test_options_that_could_not_work_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: 0}
    with pytest.raises(ValueError, match=f"{option} must be .*, got 0"):
        Elastic(**options)


@pytest.mark.skipif(HAS_TORCHFT, reason="torchft is installed")
def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"needs torchft.*pip install lightning-gnn-dist\[elastic\]"):
        check_available()


@pytest.mark.skipif(not HAS_TORCHFT, reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")
def test_a_rank_without_a_lighthouse_is_told_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LIGHTHOUSE, raising=False)
    with pytest.raises(ValueError, match="lightning-gnn-dist elastic --ranks 4"):
        Membership(Elastic(), dict, lambda state: None, 0)
