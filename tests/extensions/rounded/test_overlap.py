"""Means that travel while the next round trains: against rounds by hand, against no overlap, resumed, and in bytes."""

from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.rounded import reducers
from lightning_gnn_dist.extensions.rounded.reducers import Overlap
from lightning_gnn_dist.rounds.reducer import Groups
from lightning_gnn_dist.wire.collectives import traffic
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, same_start, state_of
from tests.strategies.graph_fitting import data_module
from tests.strategies.graph_fitting import fit as fit_graph
from tests.strategies.graph_fitting import model as graph_model

RANKS, ROUNDS = 3, 4
STEPS = [2, 3, 4]  # of each rank
Gradients = list[Tensor]


class AtOnce(Overlap):
    """Takes a mean in where it is sent."""

    def contribute(self) -> Groups:
        groups = super().contribute()
        assert self._load is not None
        self._send(self._load)
        self.fit.round.has_mean = self.finish()
        return groups


def in_rounds(rank: int, world_size: int, settings: list[dict[str, Any]]) -> list[tuple[list[State], State]]:
    """What each epoch validated, and the end."""
    found = []
    for options in settings:
        module = same_start(optimizer="Adam" if "average_optimizer" in options else "SGD")
        options = options | {"weights": "steps", "reducer": lgd.Overlapped()}
        strategy = lgd.TMAStrategy(lgd.EverySteps(STEPS[rank]), **options, **PATIENCE)
        more: dict[str, Any] = {"precision": "64-true", "num_sanity_val_steps": 0, "max_epochs": ROUNDS}
        fit(rank, strategy, module, devices=world_size, validate=True, **more)
        found.append((module.validated, state_of(module)))
    return found


def by_hand(outer: lgd.Outer, *, failed: bool, moments: bool) -> tuple[list[State], State]:
    """Replica by replica in one process. Every mean is taken in one round after it was sent."""
    steps, weights = [1 if failed and rank == 2 else STEPS[rank] for rank in range(RANKS)], [*STEPS]
    weights[2] = 0 if failed else STEPS[2]
    shared = same_start().double()
    nets = [same_start().double() for _ in STEPS]
    kind = torch.optim.Adam if moments else torch.optim.SGD
    optimizers = [kind(net.parameters(), lr=0.1) for net in nets]
    draws = [batch_of(rank) for rank in range(RANKS)]
    speed = [torch.zeros_like(each) for each in shared.parameters()]
    sent, validated = None, []
    ahead = [[torch.zeros_like(each) for each in shared.parameters()] for _ in nets]

    def mean(values: list[Tensor]) -> Tensor:
        return sum(w * value for w, value in zip(weights, values, strict=True)) / sum(weights)

    def take_in(moved: list[Gradients], states: list[list[Tensor]]) -> None:
        for place, each in enumerate(shared.parameters()):
            way = mean([of_rank[place] for of_rank in moved])
            speed[place] = outer.momentum * speed[place] + way
            each.data += outer.lr * (way + outer.momentum * speed[place] if outer.nesterov else speed[place])
        for optimizer in optimizers if moments else []:
            for target, *values in zip(tensors(optimizer), *states, strict=True):
                target.copy_(mean(values))

    for _ in range(ROUNDS):
        begun = []
        for net, own in zip(nets, ahead, strict=True):
            begun.append([each.detach() + move for each, move in zip(shared.parameters(), own, strict=True)])
            for each, start in zip(net.parameters(), begun[-1], strict=True):
                each.data = start.clone()
        for net, optimizer, draw, count in zip(nets, optimizers, draws, steps, strict=True):
            for x, y in islice(draw, count):
                optimizer.zero_grad()
                mse_loss(net.layers(x.double()), y.double()).backward()
                optimizer.step()
        ahead = [
            [now.detach() - start for now, start in zip(net.parameters(), starts, strict=True)]
            for net, starts in zip(nets, begun, strict=True)
        ]
        states = [[each.clone() for each in tensors(optimizer)] for optimizer in optimizers]
        if sent is not None:
            take_in(*sent)
        sent = ahead, states
        validated.append(state_of(shared))
    assert sent is not None
    take_in(*sent)
    return validated, state_of(shared)


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [state[name] for state in optimizer.state.values() for name in sorted(state)]


def batch_of(rank: int) -> Any:
    while True:
        yield from batches(rank)


def test_rounds_equal_those_by_hand() -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"outer": lgd.Outer.diloco(), "failed_ranks": [2]},
        {"outer": lgd.Outer(momentum=0.5), "average_optimizer": True},
    ]
    hands = [
        by_hand(
            options.get("outer", lgd.Outer()), failed="failed_ranks" in options, moments="average_optimizer" in options
        )
        for options in settings
    ]
    assert differs(hands[0][1], hands[1][1]) > 1e-3
    for of_rank in run_ranks(in_rounds, RANKS, settings):
        for (validated, end), (seen, last) in zip(of_rank, hands, strict=True):
            assert max(differs(*pair) for pair in zip(validated, seen, strict=True)) < 1e-12
            assert differs(end, last) < 1e-12


def fit_either(rank: int, world_size: int, strategy: Any, ckpt_path: Path | None = None, **options: Any) -> State:
    """The end of a fit on a graph, where a strategy corrects, and else on batches of numbers."""
    path = ckpt_path and str(ckpt_path)
    if isinstance(strategy, lgd.LLCGStrategy):
        module: Any = graph_model()
        fit_graph(strategy, module, data_module(), world_size, path, **options)
    else:
        module = same_start(optimizer="Adam", batch_norm=True)
        fit(rank, strategy, module, devices=world_size, ckpt_path=path, **options)
    return {name: each for name, each in state_of(module).items() if not name.startswith("accuracy")}


def at_once_or_not(rank: int, world_size: int, outer: lgd.Outer, *, corrects: bool) -> tuple[State, State]:
    reducers.Overlap = AtOnce  # type: ignore[misc]  # in this rank's process alone
    options: Any = {"outer": outer, "average_optimizer": True} | PATIENCE
    kind = lgd.LLCGStrategy if corrects else lgd.LocalSGDStrategy
    plain, at_once = (
        fit_either(rank, world_size, kind(lgd.EverySteps(2), reducer=reducer, **options))
        for reducer in (None, lgd.Overlapped())
    )
    return plain, at_once


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("outer", [lgd.Outer.diloco(), lgd.Outer(momentum=0.8, adaptive=True)])
def test_a_mean_that_is_taken_in_where_it_is_sent_is_no_overlap(outer: lgd.Outer, corrects: bool) -> None:
    for without, at_once in run_ranks(partial(at_once_or_not, outer=outer, corrects=corrects), 2):
        assert differs(without, at_once) == 0.0


class Saver(pl.Callback):
    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def stopped_and_resumed(rank: int, world_size: int, folder: Path) -> list[tuple[State, State]]:
    late: Any = {"reducer": lgd.Overlapped()} | PATIENCE
    averaging: Any = late | {"outer": lgd.Outer(momentum=0.8, adaptive=True), "average_optimizer": True}
    makers = (
        lambda: lgd.LocalSGDStrategy(lgd.EverySteps(3), **averaging),
        lambda: lgd.LLCGStrategy(lgd.EverySteps(2), **late),
    )
    found = []
    for number, make in enumerate(makers):
        path = folder / f"{number}.ckpt"
        whole = fit_either(rank, world_size, make(), max_epochs=4, callbacks=[Saver(path)])
        found.append((whole, fit_either(rank, world_size, make(), path, max_epochs=4)))
    return found


def test_a_run_that_is_resumed_with_a_mean_under_way_ends_with_the_same_weights(tmp_path: Path) -> None:
    for of_rank in run_ranks(stopped_and_resumed, 2, tmp_path):
        for whole, resumed in of_rank:
            assert differs(whole, resumed) == 0.0
    ranks = torch.load(tmp_path / "0.ckpt", weights_only=True)["lightning_gnn_dist"]["ranks"]
    own = [rank["extra"]["under_way"]["pseudo_gradients"][0] for rank in ranks]
    assert not torch.equal(*own)


def sent(rank: int, world_size: int) -> list[float]:
    counted = []
    for reducer in (None, lgd.Overlapped()):
        numbers = []
        for rounds in (2, 4):
            options: Any = {"reducer": reducer, "outer": lgd.Outer(), "average_optimizer": True}
            strategy = lgd.LocalSGDStrategy(lgd.EverySteps(2), **options, **PATIENCE)
            before = traffic.bytes_sent
            fit(rank, strategy, same_start(optimizer="Adam"), devices=world_size, max_epochs=rounds)
            numbers.append(traffic.bytes_sent - before)
        counted.append(numbers[1] - numbers[0])
    return counted


def test_it_sends_as_many_bytes() -> None:
    for plain, late in run_ranks(sent, 2):
        assert plain == late > 0


class Spoilt(Net):
    """Whose weights are NaN on rank 1 at the second meeting."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 4 and self.global_rank == 1:
            next(self.parameters()).data.fill_(float("nan"))


def left_out(rank: int, world_size: int) -> State:
    torch.manual_seed(0)
    module = Spoilt()
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(2), reducer=lgd.Overlapped(), nonfinite="leave_out", **PATIENCE)
    fit(rank, strategy, module, devices=world_size, max_epochs=4)
    return state_of(module)


def test_a_rank_with_nan_is_left_out_of_one_mean() -> None:
    first, other = run_ranks(left_out, 2)
    assert differs(first, other) == 0.0
    assert all(bool(each.isfinite().all()) for each in first.values())


def resumed_without(rank: int, world_size: int, folder: Path) -> None:
    path = folder / "one.ckpt"
    options: Any = {"devices": world_size, "max_epochs": 3, "callbacks": [Saver(path)]}
    fit(rank, lgd.LocalSGDStrategy(lgd.EverySteps(2), reducer=lgd.Overlapped(), **PATIENCE), same_start(), **options)
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(2), outer=lgd.Outer(), **PATIENCE)
    fit(rank, strategy, same_start(), devices=world_size, ckpt_path=str(path))


def test_it_says_what_a_fit_without_overlap_leaves_behind(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="whose mean was under way"):  # a warning is an error in tests
        run_ranks(resumed_without, 2, tmp_path)


def test_elastic_ranks_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"A mean that a dead rank .* leave the reducer out"):
        lgd.TMAStrategy(peers=lgd.Elastic(), reducer=lgd.Overlapped())
