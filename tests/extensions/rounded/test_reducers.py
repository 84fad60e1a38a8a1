"""Meetings that send few bits: how many bytes that saves, how near the means are, and a run that is resumed."""

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gnn_dist import EverySteps, GrappaStrategy, LLCGStrategy, LocalSGDStrategy, Outer, Overlapped, Rounded
from lightning_gnn_dist.extensions.rounded.reducers import RoundedGradients
from lightning_gnn_dist.extensions.rounded.rounded_mean import ROW, Codec, RoundedMean, means_together
from lightning_gnn_dist.wire.collectives import traffic
from lightning_gnn_dist.wire.hosts import find_hosts, open_channel_of_means
from tests.cli.test_train import init, parsed
from tests.every_strategy import PATIENCE
from tests.ranks import RankError, join, run_ranks
from tests.rounds.means.test_outer import stopped_and_resumed
from tests.strategies.fitting import Net, State, differs, fit, local_sgd, same_start, state_of
from tests.strategies.graph_fitting import data_module
from tests.strategies.graph_fitting import fit as fit_graph
from tests.strategies.graph_fitting import model as graph_model
from tests.strategies.test_llcg import RANKS, STEPS, by_hand, in_rounds, plain
from tests.strategies.test_one_rank import searched
from tests.strategies.test_used_parameters import check_fine_tuning
from tests.wire.test_hosts import HOSTS, NUMBERS, WEIGHTS, mean_by_hand, of_rank, sent_by


def sent(rank: int, world_size: int, reducers: list[Rounded | None]) -> tuple[list[State], list[float]]:
    states, counted = [], []
    for reducer in reducers:
        numbers = []
        for rounds in (1, 3):
            module, before = same_start(), traffic.bytes_sent
            fit(rank, local_sgd(outer=Outer.diloco(), reducer=reducer), module, devices=world_size, max_epochs=rounds)
            numbers.append(traffic.bytes_sent - before)
        states.append(state_of(module))
        counted.append((numbers[1] - numbers[0]) / 2)
    return states, counted


def test_fewer_bits_are_fewer_bytes_and_nearly_the_same() -> None:
    of_ranks = run_ranks(sent, 2, [None, Rounded(16), Rounded(8)])
    for (exact, sixteen, eight), (whole, half, quarter) in of_ranks:
        assert 0 < differs(exact, sixteen) < 3e-3
        assert 0 < differs(exact, eight) < 3e-2
        assert differs(eight, of_ranks[0][0][2]) == differs(sixteen, of_ranks[0][0][1]) == 0.0
        rest = whole - 4 * (1 + sum(tensor.numel() for tensor in exact.values()))  # the ring of two ranks
        assert half - rest == 8 + 2 * (2 * ROW)  # the weight; a row to the other rank, and the mean of the own row
        assert quarter - rest == 8 + 2 * (ROW + 8)


def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    for whole, resumed in run_ranks(partial(stopped_and_resumed, reducer=Rounded(8)), 2, tmp_path):
        assert differs(whole, resumed) == 0.0


def test_what_cannot_send_means_is_refused() -> None:
    with pytest.raises(TypeError, match=r"reducer must say how means are sent, as Rounded\(8\) does, .* got 8"):
        LocalSGDStrategy(reducer=8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reducer must say how means are sent"):
        GrappaStrategy(reducer=Rounded)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"bits must be one of \[8, 16\], got 4"):
        Rounded(4)  # type: ignore[arg-type]


def late_gradients(rank: int, world_size: int) -> str:
    try:
        fit(rank, GrappaStrategy(reducer=Overlapped()), same_start(), devices=world_size)
    except ValueError as error:
        return str(error)
    return ""


def test_gradients_of_a_step_cannot_come_late() -> None:
    assert all("use reducer=Rounded(8), or a strategy of rounds" in told for told in run_ranks(late_gradients, 2))


# Gradients in fewer bits: what is lost, what is saved, and that it is the same on all ranks and when resumed.


def trained(rank: int, world_size: int, bits: list[Any], options: dict[str, Any]) -> list[tuple[State, float]]:
    found = []
    unused = options.pop("find_unused_parameters", False)
    for number in bits:
        torch.manual_seed(0)
        module, strategy = (
            Net(),
            GrappaStrategy(reducer=Rounded(number) if number else None, find_unused_parameters=unused, **PATIENCE),
        )
        before = traffic.bytes_sent
        trainer = fit(rank, strategy, module, devices=world_size, **options)
        found.append((state_of(module), (traffic.bytes_sent - before) / trainer.global_step))
    return found


@pytest.mark.slow
def test_gradients_in_fewer_bits_are_fewer_bytes_and_nearly_the_same() -> None:
    options = {"accumulate_grad_batches": 2, "find_unused_parameters": True}
    first, second = run_ranks(trained, 2, [None, 16, 8], options)
    for (mine, _), (other, _) in zip(first, second, strict=True):
        assert differs(mine, other) == 0.0
    (exact, whole), (sixteen, half), (eight, quarter) = first
    assert 0 < differs(exact, sixteen) < 3e-3
    assert 0 < differs(exact, eight) < 3e-2
    numbers = sum(tensor.numel() for tensor in exact.values())
    rest = whole - 4 * numbers  # the ring of two ranks
    assert half - rest == pytest.approx(16 + 2 * (2 * ROW))  # weight and length; a row to the other rank, and a mean
    assert quarter - rest == pytest.approx(16 + 2 * (ROW + 8))


def test_one_rank_sends_and_rounds_nothing() -> None:
    (((exact, _), (eight, sent)),) = run_ranks(trained, 1, [None, 8], {})
    assert differs(exact, eight) == sent == 0.0


class Uneven(Net):
    """The last layer has no part in some losses of one rank, and a step takes two passes."""

    def training_step(self, batch: Any) -> Tensor:
        short = self.trainer.global_rank == 1 and self.trainer.global_step % 2 == 0
        return self.layers[:-1](batch[0]).square().mean() if short else super().training_step(batch)


def in_buckets(rank: int, world_size: int, folder: Path) -> tuple[list[State], list[int]]:
    """Weights of fits whose every parameter is a bucket: where DDP looks for unused ones, or does not, and resumed."""
    begun, within = RoundedGradients._begun, []

    def noted(self: RoundedGradients, bucket: Any) -> Any:
        within.append(bucket.index())
        return begun(self, bucket)

    RoundedGradients._begun = noted  # type: ignore[method-assign]

    def run(epochs: int, looks: bool = False, path: Path | None = None) -> Any:
        torch.manual_seed(0)
        module = Uneven(optimizer="Adam")
        strategy = GrappaStrategy(reducer=Rounded(8), find_unused_parameters=looks, **PATIENCE)
        strategy._ddp_kwargs["bucket_cap_mb"] = 1e-6  # a byte
        options = {"max_epochs": epochs, "accumulate_grad_batches": 2, "ckpt_path": None if path is None else str(path)}
        return fit(rank, strategy, module, devices=world_size, **options), module

    _, whole = run(4)
    _, looked = run(4, looks=True)
    half, _ = run(2)
    half.save_checkpoint(folder / "half.ckpt")
    _, resumed = run(4, path=folder / "half.ckpt")
    return [state_of(module) for module in (whole, looked, resumed)], within


def test_what_is_sent_does_not_depend_on_who_looks_for_unused_parameters(tmp_path: Path) -> None:
    (first, within), (second, _) = run_ranks(in_buckets, 2, tmp_path)
    assert {*within} == {0, 1, 2, 3}
    assert all(differs(first[0], other) == 0.0 for other in [*first[1:], *second])


class FrozenHere(Net):
    """Freezes a layer on one rank alone."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.trainer.global_rank == 1:
            self.layers[-1].requires_grad_(False)


def freeze(rank: int, world_size: int) -> None:
    fit(rank, GrappaStrategy(reducer=Rounded(8), **PATIENCE), FrozenHere(), devices=world_size)


def test_a_layer_that_one_rank_has_frozen_is_refused() -> None:
    with pytest.raises(RankError, match=r"layers\.4\.weight is frozen on rank 1 and trained on others"):
        run_ranks(freeze, 2)


def test_a_configuration_can_name_it() -> None:
    written = init("LLCGStrategy", reducer=init("Rounded", bits=16))
    assert parsed(strategy=written).trainer.strategy.reducer.bits == 16


# LLCG, a search of the learning rate, a fine-tuning, and sums by hosts, all in few bits.


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
    module = graph_model()
    module.on_train_epoch_start = lambda: marks.append(len(calls))
    strategy = LLCGStrategy(EverySteps(2), reducer=Rounded(8), **PATIENCE)
    fit_graph(strategy, module, data_module(), world_size, max_epochs=4, limit_val_batches=0)
    return [after - before for before, after in pairwise(marks)]


def test_a_round_takes_nine_exchanges() -> None:
    """Two tell numbers, one sums what is not rounded; replicas with moments, correction and anchor take two each."""
    assert run_ranks(exchanges_of_rounds, 2) == [[9, 9, 9]] * 2


DILOCO = partial(LocalSGDStrategy, EverySteps(2), outer=Outer.diloco(), reducer=Rounded(8), **PATIENCE)


@pytest.mark.slow
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
