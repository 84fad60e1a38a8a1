"""What ranks do not have alike: a module brings it, no strategy touches it, and extensions are imported when asked."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_gnn_dist import EverySteps, GrappaStrategy, LocalSGDStrategy, Outer, names
from lightning_gnn_dist.rounds.meeting_hook import ReplicaState
from lightning_gnn_dist.rounds.own_states import states_of
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.strategies.fitting import Net, State, fit, state_of


class Own(ReplicaState):
    def __init__(self, module: nn.Module) -> None:
        self.layers = [each for each in module.modules() if isinstance(each, OwnLinear)]

    def excluded(self) -> set[int]:
        return {id(parameter) for layer in self.layers for parameter in layer.parameters()}


class OwnLinear(nn.Linear):
    """A layer of each rank's own."""

    def replica_state(self, module: nn.Module) -> ReplicaState:
        return Own(module)


def net() -> Net:
    torch.manual_seed(0)
    module = Net(optimizer="Adam")
    module.layers[4] = OwnLinear(8, 1)
    return module


def trained(rank: int, world_size: int, kind: str) -> State:
    strategies: dict[str, Any] = {
        "grappa": lambda: GrappaStrategy(**PATIENCE),
        "mean": lambda: LocalSGDStrategy(EverySteps(3), average_optimizer=True, **PATIENCE),
        "outer": lambda: LocalSGDStrategy(EverySteps(3), outer=Outer(momentum=0.5), **PATIENCE),
    }
    module = net()
    fit(rank, strategies[kind](), module, devices=world_size)
    return state_of(module)


@pytest.mark.parametrize("kind", ["grappa", "mean", "outer"])
def test_what_a_rank_has_alone_stays_its_own(kind: str) -> None:
    first, second = run_ranks(trained, 2, kind)
    own = {"layers.4.weight", "layers.4.bias"}
    differing = {name for name in first if not torch.equal(first[name], second[name])}
    assert differing == own
    start = net().state_dict()
    assert not any(torch.equal(start[name], first[name]) for name in first)  # all of it has trained


def test_one_state_is_of_all_modules_of_a_kind() -> None:
    both = nn.Sequential(OwnLinear(2, 2), OwnLinear(2, 2), nn.Embedding(3, 2, sparse=True), nn.Embedding(4, 2))
    own, rows = states_of(both)
    assert isinstance(own, Own) and len(own.excluded()) == 4
    assert [*rows.rows().values()] == ["2.weight"] and not rows.excluded()


def test_an_extension_that_was_taken_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(names.EXTENSIONS, "sparse rows", "lightning_gnn_dist.extensions.no_such.file:Tables")
    with pytest.raises(ImportError, match=r"needs lightning_gnn_dist\.extensions\.no_such\.file, whose folder"):
        states_of(nn.Embedding(3, 2, sparse=True))
