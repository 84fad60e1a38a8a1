"""Rounds that are as long as replicas stay together, against rounds by hand."""

from __future__ import annotations

import math
from itertools import cycle, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch.nn.functional import mse_loss

from lightning_gnn_dist import AdaptiveSteps, Elastic, EverySteps, LLCGStrategy, TMAStrategy
from lightning_gnn_dist.rounds.clock import schedule, takes_equal_steps
from tests.ranks import run_ranks
from tests.strategies.fitting import State, batches, differs, fit, state_of
from tests.strategies.round_fitting import local_sgd, same_start

CLOCK, ROUNDS, RANKS = AdaptiveSteps(2, 7), 7, 3


def lengths_of(rank: int, world_size: int, strategy: Any, **options: Any) -> tuple[list[int], list[float], Any]:
    """The steps of each round, the distances that were logged, and what was learned."""
    module, ends, far = same_start(lr=0.3), [0], []

    def look(trainer: Any, *_: Any) -> None:
        ends.append(trainer.global_step)
        far.append(float(trainer.callback_metrics.get("round/distance", 0)))

    callbacks = [LambdaCallback(on_train_epoch_end=look)]
    fit(rank, strategy, module, devices=world_size, callbacks=callbacks, **options)
    return [stop - start for start, stop in pairwise(ends)], far, module


def adaptive(rank: int, world_size: int) -> tuple[list[int], list[float], State]:
    lengths, far, module = lengths_of(rank, world_size, local_sgd(CLOCK), max_epochs=ROUNDS, precision="64-true")
    return lengths, far, state_of(module)


def by_hand() -> tuple[list[int], list[float], State]:
    model = same_start(lr=0.3).double()
    parameters, streams = list(model.parameters()), [cycle(batches(rank)) for rank in range(RANKS)]
    lengths, far = [2], []
    for _ in range(ROUNDS):
        before, ends = torch.nn.utils.parameters_to_vector(parameters).detach(), []
        for stream in streams:
            torch.nn.utils.vector_to_parameters(before.clone(), parameters)
            for x, y in islice(stream, lengths[-1]):
                gradients = torch.autograd.grad(mse_loss(model.layers(x.double()), y.double()), parameters)
                for each, gradient in zip(parameters, gradients, strict=True):
                    each.data -= 0.3 * gradient
            ends.append(torch.nn.utils.parameters_to_vector(parameters).detach())
        mean = sum(ends) / RANKS
        far.append(math.sqrt(sum(float((end - mean).square().sum()) for end in ends) / RANKS))
        lengths.append(int(min(7, 2 * lengths[-1], max(2, lengths[-1] * far[0] / far[-1]))))
        torch.nn.utils.vector_to_parameters(mean, parameters)
    return lengths[:-1], far, state_of(model)


def test_rounds_are_as_long_as_by_hand() -> None:
    lengths, far, state = by_hand()
    assert len(set(lengths)) > 2  # they do change
    for found in run_ranks(adaptive, RANKS):
        assert found[0] == lengths
        assert found[1] == pytest.approx(far, rel=1e-6)  # Lightning logs in float32
        assert differs(found[2], state) < 1e-12


def resumed(rank: int, world_size: int, folder: Path) -> tuple[list[int], State, list[int], State]:
    whole, _, module = lengths_of(rank, world_size, local_sgd(CLOCK), max_epochs=ROUNDS)
    half = fit(rank, local_sgd(CLOCK), same_start(lr=0.3), devices=world_size, max_epochs=3)
    half.save_checkpoint(folder / "half.ckpt")
    again = lengths_of(rank, world_size, local_sgd(CLOCK), max_epochs=ROUNDS, ckpt_path=str(folder / "half.ckpt"))
    return whole[3:], state_of(module), again[0][1:], state_of(again[2])


def test_a_resumed_fit_goes_on_with_the_same_lengths(tmp_path: Path) -> None:
    for whole, state, again, other in run_ranks(resumed, 2, tmp_path):
        assert whole[1:] == again  # the first is counted from the start of the fit
        assert differs(state, other) == 0.0


def test_what_it_says_and_refuses() -> None:
    assert takes_equal_steps(CLOCK) and not takes_equal_steps(TMAStrategy().clock)
    assert schedule(CLOCK, 5, 7).startswith("Rounds of 2 to 7 local steps, the longer the closer")
    lengths, far, _ = lengths_of(0, 1, local_sgd(CLOCK))
    assert lengths == [2, 2, 2] and far == [0.0] * 3  # on one rank there is nothing to measure
    assert LLCGStrategy(CLOCK).outer == LLCGStrategy(EverySteps(2)).outer
    with pytest.raises(ValueError, match=r"die at any time. AdaptiveSteps.* compares the replicas of all ranks"):
        TMAStrategy(CLOCK, peers=Elastic())
    with pytest.raises(ValueError, match=r"longest \(3\) must not be below shortest \(4\)"):
        AdaptiveSteps(4, 3)
