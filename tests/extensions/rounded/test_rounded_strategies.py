"""Strategies whose means go in few bits: LLCG, a search of the learning rate, a fine-tuning, sums by hosts."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist import EverySteps, LLCGStrategy, LocalSGDStrategy, Outer, Rounded
from lightning_gnn_dist.extensions.rounded.rounded_mean import Codec, RoundedMean, means_together
from lightning_gnn_dist.wire.hosts import find_hosts, open_channel_of_means
from tests.every_strategy import PATIENCE
from tests.ranks import join, run_ranks
from tests.strategies.fitting import differs, state_of
from tests.strategies.graph_fitting import data_module, fit, model
from tests.strategies.test_llcg import RANKS, STEPS, by_hand, in_rounds, plain
from tests.strategies.test_one_rank import searched
from tests.strategies.test_used_parameters import check_fine_tuning
from tests.wire.test_hosts import HOSTS, NUMBERS, WEIGHTS, mean_by_hand, of_rank, sent_by


def test_a_round_is_nearly_that_by_hand_in_fewer_bits() -> None:
    expected, start = by_hand(), state_of(plain())
    found = [states[0] for states in run_ranks(in_rounds, RANKS, [(Rounded(8), STEPS)])]
    for rounded in found:
        assert differs(rounded, found[0]) == 0.0
        # Adam's first steps are as long for a gradient near zero, whose sign rounding may change.
        away = sum(float((rounded[name] - expected[name]).square().sum()) for name in expected)
        assert 0 < away < 0.02 * sum(float((start[name] - expected[name]).square().sum()) for name in expected)


def exchanges_of_rounds(rank: int, world_size: int) -> list[int]:
    marks, calls = list[int](), list[Any]()

    def counted(call: Any) -> Any:
        return lambda *args, **options: (calls.append(call), call(*args, **options))[1]

    for name in ("all_gather", "all_reduce", "all_to_all_single", "broadcast"):
        setattr(dist, name, counted(getattr(dist, name)))  # this process runs nothing else
    module = model()
    module.on_train_epoch_start = lambda: marks.append(len(calls))
    strategy = LLCGStrategy(EverySteps(2), reducer=Rounded(8), **PATIENCE)
    fit(strategy, module, data_module(), world_size, max_epochs=4, limit_val_batches=0)
    return [after - before for before, after in pairwise(marks)]


def test_a_round_takes_nine_exchanges() -> None:
    """Two tell numbers, one sums what is not rounded; replicas with moments, correction and anchor take two each."""
    assert run_ranks(exchanges_of_rounds, 2) == [[9, 9, 9]] * 2


DILOCO = partial(LocalSGDStrategy, EverySteps(2), outer=Outer.diloco(), reducer=Rounded(8), **PATIENCE)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_a_fit_after_a_search_of_the_rate_is_the_fit_without(tmp_path: Any) -> None:
    for found in run_ranks(searched, 2, str(tmp_path), {"outer": DILOCO}):
        before, after, num_rates = found["outer"]
        assert differs(before, after) == 0.0 and num_rates >= 4


def test_a_fine_tuning_may_unfreeze_what_was_frozen_at_the_start() -> None:
    check_fine_tuning({"reducer": Rounded(16)})


def meet(rank: int, world_size: int, hosts: list[int]) -> tuple[Tensor, float]:
    join(rank, world_size)
    find_hosts(hosts[rank], HOSTS)
    channel, rounded = open_channel_of_means(), list[Tensor]()
    taken, weight = RoundedMean(channel, Codec(16), NUMBERS), WEIGHTS[rank]
    sent = sent_by(lambda: rounded.extend(means_together([taken], [of_rank(rank)], weight, 0, is_agreed=True)))
    channel.close()
    dist.barrier()
    return rounded[0], sent.between_hosts


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 1, 1]], ids=str)
def test_a_mean_of_hosts_leaves_each_once(hosts: list[int]) -> None:
    found = run_ranks(meet, 4, hosts)
    for rank, (mean, between) in enumerate(found):
        assert mean.equal(found[0][0]) and (mean - mean_by_hand()).abs().max() < 0.03  # of bfloat16
        assert (between > 0) == (rank == hosts.index(hosts[rank]))
    assert found[0][1] == run_ranks(meet, HOSTS, [0, 1])[0][1]
