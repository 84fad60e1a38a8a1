"""Local steps that read rows of the last meeting are those by hand."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch_geometric.data import Data

from lightning_gnn_dist import (
    Correction,
    Drift,
    EverySeconds,
    EverySteps,
    GlobalBatching,
    History,
    Holding,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    Redeal,
    Rotate,
    TMAStrategy,
    WholePartSampler,
)
from tests.boundary.models import Model, Weights, model, weighted_data, weights_of
from tests.boundary.test_whole_graph import unequal
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.layers.models import graph_of
from tests.ranks import run_ranks

RANKS, ROUNDS, STEPS, CHUNKS = 3, 3, 2, 9


# By hand, without a line of this package.


def layer(module: Any, index: int, data: Data, x: Tensor) -> Tensor:
    conv = module.convs[index]
    weights = [data.edge_weight] if type(module).__name__ == "Weighted" else []
    return module._between(conv, conv(x, data.edge_index, *weights))


def rows_of_meeting(module: Any, data: Data) -> list[Tensor]:
    """What every layer but the last makes of all nodes."""
    rows, x = [], data.x
    with torch.no_grad():
        for index in range(len(module.convs) - 1):
            rows.append(x := layer(module, index, data, x))
    return rows


def loss_of_part(module: Any, data: Data, own: Tensor, inside: Tensor, known: list[Tensor]) -> Tensor:
    x = data.x
    for index in range(len(module.convs)):
        x = layer(module, index, data, x)
        if index < len(known):
            x = torch.where(inside[:, None], x, known[index])
    seeds = own & data.train_mask
    return functional.cross_entropy(x[seeds], data.y[seeds])


@dataclass
class ByHand:
    """Local SGD with the rows of meetings; ``held`` gives each rank's own nodes and all that it computes in a round."""

    name: str
    num_layers: int
    held: Callable[[int], list[tuple[Tensor, Tensor]]]
    corrects: bool = False
    drifts: bool = False
    data: Data = field(default_factory=weighted_data)

    def learned(self, rounds: int) -> Weights:
        replicas = [model(self.name, self.num_layers) for _ in self.held(0)]
        optimizers = [replica.configure_optimizers() for replica in replicas]
        for number in range(rounds):
            known, parts = rows_of_meeting(replicas[0], self.data), self.held(number)
            anchors = [self.gradient(replica, *part, known) for replica, part in zip(replicas, parts, strict=True)]
            for replica, optimizer, part, anchor in zip(replicas, optimizers, parts, anchors, strict=True):
                for step in range(STEPS):
                    optimizer.zero_grad()
                    loss_of_part(replica, self.data, *part, known).backward()
                    for index, p in enumerate(replica.parameters()):
                        mean = torch.stack([other[index] for other in anchors]).mean(0)
                        p.grad += self.drifts * 0.8**step * (mean - anchor[index])
                    optimizer.step()
            self.meet(replicas)
        return weights_of(replicas[0])

    def gradient(self, replica: Model, own: Tensor, inside: Tensor, known: list[Tensor]) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss_of_part(replica, self.data, own, inside, known), list(replica.parameters()))

    def meet(self, replicas: list[Model]) -> None:
        mean = [
            torch.stack([p.detach() for p in of_ranks]).mean(0)
            for of_ranks in zip(*map(list_of, replicas), strict=True)
        ]
        for replica in replicas:
            for p, value in zip(replica.parameters(), mean, strict=True):
                p.data.copy_(value)
            if self.corrects:
                all_nodes = torch.ones(self.data.num_nodes, dtype=torch.bool)
                gradient = self.gradient(replica, all_nodes, all_nodes, rows_of_meeting(replica, self.data))
                for p, value in zip(replica.parameters(), gradient, strict=True):
                    p.data -= 0.1 * value


def list_of(module: Model) -> list[Tensor]:
    return list(module.parameters())


def fixed(owner: Tensor) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    return lambda _: [(owner == rank, owner == rank) for rank in range(RANKS)]


def rotated(owner: Tensor) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    def held(number: int) -> list[tuple[Tensor, Tensor]]:
        others = [(rank + 1 + number % (RANKS - 1)) % RANKS for rank in range(RANKS)]
        return [(owner == rank, (owner == rank) | (owner == other)) for rank, other in enumerate(others)]

    return held


def redealt(chunks: Tensor) -> Callable[[int], list[tuple[Tensor, Tensor]]]:
    def held(number: int) -> list[tuple[Tensor, Tensor]]:
        dealt = [Redeal(CHUNKS).held(number, rank, RANKS, 0).own for rank in range(RANKS)]
        return [(torch.isin(chunks, torch.tensor(own)),) * 2 for own in dealt]

    return held


# With the package.


def parts(num_layers: int, **options: Any) -> PartitionedDataModule:
    data = weighted_data()
    defaults = {
        "partitioner": unequal(data, RANKS),
        "sampler": WholePartSampler(num_layers),
        "boundary": History(),
        "batch_size": 1000,
    }
    return PartitionedDataModule(graph_of(data), **(defaults | options))


def averaging(**options: Any) -> LocalSGDStrategy:
    return LocalSGDStrategy(EverySteps(STEPS), **options, **PATIENCE)


def correcting() -> LLCGStrategy:
    correction = Correction(1, optimizer=partial(torch.optim.SGD, lr=0.1))
    return LLCGStrategy.as_published(EverySteps(STEPS), correction=correction, **PATIENCE)


def quick(strategy: Any, **options: Any) -> Any:
    defaults: dict[str, Any] = {"max_epochs": ROUNDS, "limit_val_batches": 0, "precision": "64-true"}
    return trainer(RANKS, strategy, **(defaults | options))


OWNER = unequal(weighted_data(), RANKS).assignment.long()
SUPERNODES = torch.arange(OWNER.numel()) % CHUNKS
DEALT = {"partitioner": Partition(SUPERNODES.to(torch.int32), CHUNKS), "holding": Holding(Redeal(CHUNKS), every=STEPS)}
CASES: dict[str, tuple[ByHand, Callable[[], Any], dict[str, Any]]] = {
    "SAGE": (ByHand("SAGE", 3, fixed(OWNER)), averaging, {}),
    "GCN": (ByHand("GCN", 3, fixed(OWNER)), averaging, {"sampler": NeighborSampler([-1] * 3)}),
    "rotated, with drift": (
        ByHand("SAGE", 3, rotated(OWNER), drifts=True),
        lambda: averaging(drift=Drift("ranks")),
        {"holding": Holding(Rotate(), every=STEPS)},
    ),
    "redealt": (ByHand("GCN", 2, redealt(SUPERNODES)), averaging, DEALT),
    "corrected": (
        ByHand("SAGE", 3, fixed(OWNER), corrects=True),
        correcting,
        {"global_batching": GlobalBatching(batch_size=1000)},
    ),
}


def fit(rank: int, world_size: int, names: list[str]) -> list[Weights]:
    found = []
    for name in names:
        by_hand, strategy, options = CASES[name]
        module = model(by_hand.name, by_hand.num_layers)
        quick(strategy()).fit(module, parts(by_hand.num_layers, **options))
        found.append(weights_of(module))
    return found


def test_local_steps_with_rows_of_the_last_meeting_are_those_by_hand() -> None:
    of_ranks = run_ranks(fit, RANKS, list(CASES))
    for case, name in enumerate(CASES):
        expected = CASES[name][0].learned(ROUNDS)
        for found in of_ranks:
            for key, value in expected.items():
                assert torch.allclose(found[case][key], value, rtol=0, atol=1e-12), (name, key)
                assert torch.equal(found[case][key], of_ranks[0][case][key]), "replicas differ"


def resumed(rank: int, world_size: int, folder: Path) -> tuple[Weights, Weights]:
    """The weights of a fit that never stopped, and of one that did."""
    _, strategy, options = CASES["rotated, with drift"]
    found = []
    for rounds, path in ((ROUNDS, None), (1, None), (ROUNDS, folder / "stopped.ckpt")):
        module, running = model("SAGE", 3), quick(strategy(), max_epochs=rounds)
        running.fit(module, parts(3, **options), ckpt_path=path)
        if rounds == 1:
            running.save_checkpoint(folder / "stopped.ckpt")
        found.append(weights_of(module))
    return found[0], found[2]


@pytest.mark.slow
def test_a_resumed_fit_is_one_that_never_stopped(tmp_path: Path) -> None:
    for whole, stopped in run_ranks(resumed, RANKS, tmp_path):
        for key, value in whole.items():
            assert torch.equal(stopped[key], value), key


def two_that_hold_all(rank: int, world_size: int) -> Weights:
    module, cut = model("SAGE", 3), unequal(weighted_data(), 2)
    running = trainer(2, averaging(), max_epochs=ROUNDS, limit_val_batches=0, precision="64-true")
    running.fit(module, parts(3, partitioner=cut, holding=Holding(Rotate())))
    return weights_of(module)


@pytest.mark.slow
def test_two_ranks_that_rotate_have_no_node_outside() -> None:
    owner = unequal(weighted_data(), 2).assignment.long()
    by_hand = ByHand("SAGE", 3, lambda _: [(owner == rank, owner >= 0) for rank in range(2)])
    for found in run_ranks(two_that_hold_all, 2):
        for key, value in by_hand.learned(ROUNDS).items():
            assert torch.allclose(found[key], value, rtol=0, atol=1e-12), key


# At the first step after a meeting, the loss is that of the whole graph.


def error_of_first_steps(module: Model, strategy: Any, **options: Any) -> float:
    """How far the rows of seeds are from those that one process computes, at the first steps of rounds."""
    data, errors = weighted_data(), []

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        rows = module(batch)
        whole = module.whole(data)[batch.n_id[: batch.batch_size]]
        if batch_idx == 0:
            errors.append(float((rows - whole).detach().abs().max()))
        return functional.cross_entropy(rows, batch.y[: batch.batch_size])

    module.training_step = training_step  # type: ignore[method-assign, assignment]
    quick(strategy, max_epochs=2).fit(module, parts(3, **options))
    assert len(errors) == 2
    return max(errors)


def first_steps(rank: int, world_size: int) -> dict[str, float]:
    drawn = {"sampler": NeighborSampler([-1] * 3), "batch_size": 4}
    errors = {name: error_of_first_steps(model(name, 3), averaging()) for name in ("GAT", "JK", "PyG GCN")}
    errors["drawn"] = error_of_first_steps(model("JK", 3), averaging(), **drawn)
    errors["extra"] = error_of_first_steps(model("SAGE", 3), averaging(), holding=Holding(extra_nodes=0.5))
    errors["by time"] = error_of_first_steps(model("SAGE", 3), TMAStrategy(EverySeconds(1e-9), **PATIENCE), **drawn)
    return errors


@pytest.mark.slow
def test_right_after_a_meeting_rows_are_those_of_the_whole_graph() -> None:
    for errors in run_ranks(first_steps, RANKS):
        assert max(errors.values()) < 1e-12, errors
