"""Walks over a module give what torch's own give, in their order."""

from __future__ import annotations

from collections.abc import Iterator

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch_geometric.nn import GAT, GraphSAGE
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist.rounds.walking import buffers_of, modules_of, parameters_of, unchanged


class Tied(pl.LightningModule):
    """Shares a layer, a weight and a buffer, and has parts that are None."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=False)
        self.again = self.first
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.nothing = None
        self.register_module("empty", None)
        self.register_parameter("missing", None)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("unset", None)
        self.norm = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False, track_running_stats=False))
        self.norm.register_buffer("same", self.steps)
        self.accuracy = MulticlassAccuracy(3)
        self.rows = nn.ModuleDict({"a": nn.Embedding(4, 2, sparse=True), "b": nn.ModuleList([self.norm])})
        self.own = nn.Parameter(torch.zeros(2), requires_grad=False)


class Chosen(nn.Module):
    """Says itself what its parameters, its buffers and its modules are."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.shown, self.hidden, self.names = nn.BatchNorm1d(2), nn.BatchNorm1d(2), names

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.shown.parameters(recurse)

    def buffers(self, recurse: bool = True) -> Iterator[torch.Tensor]:
        return self.shown.buffers(recurse)


class Proud(nn.Module):
    """Yields one module alone, wherever it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.shown, self.hidden = nn.Linear(2, 2), nn.Linear(2, 2)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):  # type: ignore[no-untyped-def]
        yield prefix, self
        yield from self.shown.named_modules(memo, f"{prefix}.shown", remove_duplicate)


MODULES = {
    "tied": Tied,
    "alone": lambda: nn.Linear(2, 3),
    "empty": nn.Sequential,
    "chosen": Chosen,
    "proud": lambda: nn.Sequential(nn.Linear(2, 2), Proud(), nn.BatchNorm1d(2)),
    "scripted": lambda: torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "compiled": lambda: torch.compile(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))),
    "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)),
    "sage": lambda: GraphSAGE(4, 8, 2, norm="batch"),
    "gat": lambda: GAT(4, 8, 2, jk="lstm"),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", MODULES)
def test_walks_are_torchs(name: str) -> None:
    module = MODULES[name]()
    walks = ((modules_of, "modules"), (parameters_of, "parameters"), (buffers_of, "buffers"))
    for walk, method in walks:
        assert [id(each) for each in walk(module)] == [id(each) for each in getattr(module, method)()], method


def test_what_changes_between_two_walks_is_seen() -> None:
    module = Tied()
    before = len(parameters_of(module))
    module.added = nn.Linear(2, 2)
    del module.second
    assert [id(each) for each in parameters_of(module)] == [id(each) for each in module.parameters()]
    assert len(parameters_of(module)) == before + 1  # its two, without the bias of the other


def test_an_unchanged_module_is_walked_through_once() -> None:
    module, other = MODULES["sage"](), MODULES["sage"]()
    expected = [id(each) for each in module.modules()]
    with unchanged(module):
        known = dict.copy(module._modules)
        module._modules.clear()
        assert [id(each) for each in modules_of(module)] == expected
        assert len(modules_of(other)) == len(expected)
        module._modules.update(known)
        next(module.parameters()).requires_grad_(False)
        assert [each.requires_grad for each in parameters_of(module)] == [p.requires_grad for p in module.parameters()]
    module.added = nn.Linear(2, 2)
    assert modules_of(module)[-1] is module.added
    with pytest.raises(KeyError), unchanged(module):
        raise KeyError
    del module.added
    assert [id(each) for each in modules_of(module)] == expected
