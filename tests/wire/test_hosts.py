"""Sums over ranks of several hosts: the sums of all ranks, for the bytes between hosts of one rank each."""

import os
import re
import signal
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_gnn_dist as lgd
from lightning_gnn_dist import PartitionedDataModule
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces, exchange_pieces
from lightning_gnn_dist.wire.collectives import Sent, flatten, traffic, write_back
from lightning_gnn_dist.wire.hosts import HostGradients, find_hosts
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import every_strategy
from tests.ranks import RankError, join, run_ranks, start_ranks
from tests.sage import SAGE

HOSTS, NUMBERS = 2, 1000
WEIGHTS = [1.0, 0.0, 2.5, 0.5]


def of_rank(rank: int) -> Tensor:
    return torch.randn(NUMBERS, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def mean_by_hand() -> Tensor:
    return sum(weight * of_rank(rank) for rank, weight in enumerate(WEIGHTS)) / sum(WEIGHTS)  # type: ignore[return-value]


def sent_by(work: Callable[[], object]) -> Sent:
    before = Sent(traffic.bytes_sent, traffic.bytes_between_hosts)
    work()
    return Sent(traffic.bytes_sent - before.all, traffic.bytes_between_hosts - before.between_hosts)


def meet(rank: int, world_size: int, hosts: list[int]) -> dict[str, Any]:
    join(rank, world_size)
    find_hosts(hosts[rank], HOSTS)
    find_hosts(hosts[rank], HOSTS)  # of a second fit: nothing is made anew
    mean, count = of_rank(rank), torch.tensor([rank])
    sent = sent_by(lambda: collectives.average_([mean, count], WEIGHTS[rank]))
    sent_row = sent_by(lambda: collectives.all_gather_rows(torch.zeros(1)))
    dist.barrier()
    return {"mean": mean, "count": int(count), "sent": sent, "row": sent_row}


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [1, 0, 1, 0], [0, 1, 1, 1]], ids=str)
def test_a_mean_is_that_of_all_ranks_and_leaves_a_host_once(hosts: list[int]) -> None:
    found = run_ranks(meet, 4, hosts)
    num_bytes = 8 * (NUMBERS + 1) + 8  # and the weight, and the integer
    for rank, one in enumerate(found):
        torch.testing.assert_close(one["mean"], mean_by_hand(), rtol=0, atol=1e-12)
        assert one["mean"].equal(found[0]["mean"]) and one["count"] == 3
        others, is_first = hosts.count(hosts[rank]) - 1, rank == hosts.index(hosts[rank])
        between = 2 * num_bytes * (HOSTS - 1) / HOSTS if is_first else 0.0
        within = num_bytes * (others if is_first else 1)
        assert one["sent"] == Sent(within + between, between)
        assert one["row"] == Sent(12, 12 if hosts[(rank + 1) % 4] != hosts[rank] else 0)


def go_back(rank: int, world_size: int) -> list[Tensor]:
    join(rank, world_size)
    find_hosts(rank // 2, HOSTS)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600), nn.Linear(600, 1)).double())
    gradients = HostGradients(ddp, collectives.hosts)
    ddp(of_rank(rank)[:30].view(10, 3)).square().mean().backward()
    gradients.close()
    dist.barrier()
    return [parameter.grad for parameter in ddp.parameters()]  # type: ignore[misc]


def test_gradients_are_means_over_all_ranks() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 600), nn.Linear(600, 600), nn.Linear(600, 1)).double()
    torch.stack([model(of_rank(rank)[:30].view(10, 3)).square().mean() for rank in range(4)]).mean().backward()
    for found in run_ranks(go_back, 4):
        for ours, parameter in zip(found, model.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, rtol=0, atol=1e-12)


# Pieces of unequal lengths, on all ranks, and their bytes.


def pieces_of(rank: int) -> list[Tensor]:
    """Rank 1 has none."""
    ids = torch.arange(0 if rank == 1 else rank + 1, dtype=torch.int32)
    return [ids, torch.full((len(ids), 2), float(rank)), ids + 7]


def gather(rank: int, world_size: int) -> tuple[list[list[Tensor]], float]:
    join(rank, world_size)
    before = collectives.traffic.bytes_sent
    return all_gather_pieces(pieces_of(rank)), collectives.traffic.bytes_sent - before


def test_every_rank_has_the_pieces_of_all_and_sends_no_more() -> None:
    for found, sent in run_ranks(gather, 3):
        for rank, theirs in enumerate(found):
            assert all(torch.equal(one, other) for one, other in zip(theirs, pieces_of(rank), strict=True))
        assert sent == pytest.approx(2 * 3 * 8 + (1 + 3) * 16 * 2 / 3)  # the lengths, and four rows of 16 bytes


# How many rows a rank sends to each; rank 1 sends nothing to anybody, and nobody sends rank 2 any.
COUNTS = [[2, 3, 0], [0, 0, 0], [1, 0, 4]]


def for_rank(source: int, to: int) -> list[Tensor]:
    ids = torch.arange(COUNTS[source][to], dtype=torch.int32) + 10 * source + to
    return [ids, ids[:, None].double() / 3, ids.to(torch.int8)]  # numbers of unequal widths, one after the other


def exchange(rank: int, world_size: int, counts: list[list[int]]) -> tuple[list[list[Tensor]], float]:
    join(rank, world_size)
    before = collectives.traffic.bytes_sent
    lengths = [[[count] * 3 for count in of_source] for of_source in counts]
    sent = [[piece[: counts[rank][to]] for piece in for_rank(rank, to)] for to in range(world_size)]
    return exchange_pieces(sent, lengths), collectives.traffic.bytes_sent - before


def test_every_rank_has_what_was_sent_to_it_alone() -> None:
    for rank, (found, sent) in enumerate(run_ranks(exchange, 3, COUNTS)):
        for source, pieces in enumerate(found):
            assert all(torch.equal(one, other) for one, other in zip(pieces, for_rank(source, rank), strict=True))
        assert sent == sum(COUNTS[rank][to] for to in range(3) if to != rank) * (4 + 8 + 1)


@pytest.mark.slow
def test_nothing_is_sent_where_ranks_keep_what_they_have() -> None:
    counts = [[COUNTS[rank][to] if rank == to else 0 for to in range(3)] for rank in range(3)]
    for rank, (found, sent) in enumerate(run_ranks(exchange, 3, counts)):
        assert sent == 0 and [len(pieces[0]) for pieces in found] == [counts[source][rank] for source in range(3)]


# Ranks whose weights or optimizers differ are told so by every strategy, and by Lightning's DDP on our data.


STRATEGIES: dict[str, Callable[[], Any]] = every_strategy() | {"ddp": lambda: DDPStrategy(process_group_backend="gloo")}
LR = r"Rank 1 has lr=0\.02 in optimizer 0, rank 0 has 0\.01\. Ranks train one model"
WEIGHTS_OF_RANKS = r"Rank 1's weights of convs\.0\.\S+ differ from rank 0's\. Ranks train one model"


class Changes(pl.Callback):
    """Changes the weights, or the learning rate, of rank 1 in one hook."""

    def __init__(self, hook: str, what: str, epoch: int = 0) -> None:
        self.what, self.epoch = what, epoch
        setattr(self, hook, self.change)

    def change(self, trainer: pl.Trainer, module: pl.LightningModule, *args: Any) -> None:
        if trainer.global_rank == 0 or trainer.current_epoch != self.epoch:
            return
        if self.what == "lr":
            trainer.optimizers[0].param_groups[0]["lr"] = 0.02
        else:
            with torch.no_grad():
                next(module.parameters()).view(-1)[0] += 1.0


CASES = [(name, "on_train_start", what) for name in STRATEGIES for what in ("lr", "weights")]
CASES += [("grappa", "on_fit_start", "weights"), ("ddp", "on_fit_start", "weights")]


def told(world_size: int, name: str, *callbacks: pl.Callback, **options: Any) -> str:
    module, data = model(lr=0.01), PartitionedDataModule(small_graph(), batch_size=30)
    options = {"callbacks": [*callbacks], "limit_val_batches": 0, "max_epochs": 3} | options
    try:
        trainer(world_size, STRATEGIES[name](), **options).fit(module, data)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return ""


def differing_at_the_start(rank: int, world_size: int) -> list[str]:
    return [told(world_size, name, Changes(hook, what)) for name, hook, what in CASES]


def test_what_a_hook_of_the_start_changes_on_one_rank_is_refused() -> None:
    for said in run_ranks(differing_at_the_start, 2):
        for message, (name, hook, what) in zip(said, CASES, strict=True):
            assert re.match(LR if what == "lr" else WEIGHTS_OF_RANKS, message), (name, hook, what, message)


def differing_later(rank: int, world_size: int, folder: Path) -> list[str]:
    saves = ModelCheckpoint(folder, every_n_train_steps=1)
    changes = Changes("on_train_epoch_start", "lr", epoch=1)
    return [
        told(world_size, "grappa", Changes("on_train_batch_end", "weights", epoch=1)),
        told(world_size, "ddp", changes),
        told(world_size, "grappa", changes, saves, enable_checkpointing=True),
        told(world_size, "grappa"),
        told(world_size, "ddp"),
    ]


def fine_tuned(rank: int, world_size: int) -> str:
    class Unfreezes(pl.callbacks.BaseFinetuning):
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.convs[0])

    return told(world_size, "ddp", Unfreezes())


def test_ddp_cannot_exchange_what_is_unfrozen_later() -> None:
    for message in run_ranks(fine_tuned, 2):
        assert message.startswith("Unfreezes unfreezes parameters in a fit") and "use GrappaStrategy()" in message


def test_what_changes_later_on_one_rank_is_refused_where_ranks_exchange_anyway(tmp_path: Path) -> None:
    for weights, rate, saved, *alike in run_ranks(differing_later, 2, tmp_path):
        assert re.match(WEIGHTS_OF_RANKS, weights) and re.match(LR, rate) and re.match(LR, saved)
        assert alike == ["", ""]


# Averages, broadcasts and the count of bytes, on several ranks.


def grouped(rank: int, world_size: int, function: Callable[[int], Any]) -> Any:
    join(rank, world_size)
    return function(rank)


def average(rank: int) -> list[Tensor]:
    tensors = [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * rank,
        torch.tensor(float(rank), dtype=torch.float64),
        torch.tensor([10 * rank]),  # integers: the maximum
        torch.full((3,), rank, dtype=torch.bfloat16),
        torch.empty(0),
        torch.tensor([1.0 + 1.0j]) * rank,
    ]
    before = [tensor.data_ptr() for tensor in tensors]
    collectives.average_(tensors, weight=1.0 if rank < 2 else 2.0)
    assert before == [tensor.data_ptr() for tensor in tensors]
    return tensors


def test_average_weighs_floats_and_takes_the_maximum_of_integers() -> None:
    mean = (0 * 1 + 1 * 1 + 2 * 2) / 4
    for matrix, number, count, half, _, wave in run_ranks(grouped, 3, average):
        assert torch.equal(matrix, torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * mean)
        assert number.item() == mean
        assert number.dtype == torch.float64
        assert count.tolist() == [20]
        assert half.tolist() == [mean] * 3
        assert wave.tolist() == [(1 + 1j) * mean]


@pytest.mark.gpu
def test_tensors_of_two_devices_meet_on_the_one_that_trains() -> None:
    """Adam keeps its `step` in RAM, and its moments where the parameters are."""
    values = [torch.tensor(float(i)) if i % 2 else torch.arange(4.0) + i for i in range(8)]
    tensors = [value.clone() if i % 2 else value.cuda() for i, value in enumerate(values)]
    given = [*tensors, torch.tensor([7])]
    flats = flatten(given, 2.0, collectives.meeting_place(given))
    assert [flat.device.type for flat, _ in flats] == ["cuda", "cuda"]
    assert len(flats[0][0]) == 4 * 4 + 4 + 1
    flats[0][0].mul_(3.0)  # as if two other ranks held the same
    write_back(flats)
    assert [flat.device.type for flat, _ in flatten(tensors, 1.0, torch.device("cpu"))] == ["cpu"]
    assert [tensor.is_cuda for tensor in tensors] == [True, False] * 4
    assert [tensor.tolist() for tensor in tensors] == [value.tolist() for value in values]


def no_weight(rank: int) -> None:
    collectives.average_([torch.ones(2)], weight=0.0)


def test_weights_must_have_a_positive_sum() -> None:
    with pytest.raises(RankError, match="add up to 0"):
        run_ranks(grouped, 2, no_weight)


def count(rank: int) -> float:
    start = collectives.traffic.bytes_sent
    collectives.average_([torch.ones(999)])  # and one more for the sum of weights
    return collectives.traffic.bytes_sent - start


def test_bytes_are_those_of_a_ring() -> None:
    assert run_ranks(grouped, 4, count) == [2 * 4000 * 3 / 4] * 4


def checked(rank: int) -> tuple[int, str]:
    collectives.check_group(1), collectives.check_group(2)
    try:
        collectives.check_group(3)
    except RuntimeError as error:
        return rank, str(error)
    return rank, ""


def test_a_group_of_an_earlier_fit_is_no_group_of_another_size() -> None:
    for _, said in run_ranks(grouped, 2, checked):
        assert said.startswith("This process is in a group of 2 rank(s) of an earlier fit") and "this fit has 3" in said


def test_alone_everything_is_a_no_op() -> None:
    tensor = torch.tensor([1.0, 2.0])
    collectives.average_([tensor], weight=0.0)
    collectives.broadcast_([tensor])
    assert tensor.tolist() == [1.0, 2.0]
    assert collectives.all_gather_rows(tensor).tolist() == [[1.0, 2.0]]
    assert collectives.gather_objects("me") == ["me"]
    assert (collectives.rank(), collectives.world_size()) == (0, 1)


def hashed_there(tensors: list[torch.Tensor]) -> tuple[int, ...]:
    return tuple(collectives.hash_there(collectives.octets(each)) for each in tensors)


@pytest.mark.parametrize("hashed", [collectives.checksum, hashed_there], ids=["cpu", "as on a device"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.cfloat])
def test_a_checksum_sees_every_bit(dtype: torch.dtype, hashed: Callable[[list[torch.Tensor]], Any]) -> None:
    tensor = torch.randn(37, generator=torch.Generator().manual_seed(0)).to(dtype)
    sums = {hashed([torch.zeros(3), tensor])}
    held = tensor.view(torch.uint8)
    bits = range(8 * held.numel()) if dtype != torch.bool else range(0, 8 * held.numel(), 8)
    for bit in bits:
        held[bit // 8] ^= 1 << bit % 8
        sums.add(hashed([torch.zeros(3), tensor]))
        held[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + len(bits)
    assert hashed([torch.zeros(3), tensor.clone()]) in sums
    assert hashed([tensor, torch.zeros(3)]) not in sums


def test_a_checksum_takes_empty_and_strided_tensors() -> None:
    matrix, checksum = torch.arange(12.0).view(3, 4), collectives.checksum
    assert checksum([torch.empty(0), matrix.t()]) == checksum([matrix.t().contiguous()]) != 0


# A rank that dies or stops in an exchange is named, with its host, by the errors of the others.


PATIENCE_SECONDS = 15.0


class InEvaluation(SAGE):
    def validation_step(self, batch: Any) -> None:
        if self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        super().validation_step(batch)


class InTraining(pl.LightningModule):
    """Stands still on rank 1, before its third step."""

    def training_step(self, batch: Any) -> Tensor:
        if self.global_rank == 1 and self.global_step == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        loss: Tensor = super().training_step(batch)
        return loss


def stalled(rank: int, world_size: int, run: Any, *args: Any) -> str:
    try:
        run(rank, world_size, lgd.Launch(timeout=timedelta(seconds=PATIENCE_SECONDS)), *args)
    except RuntimeError as error:
        return str(error)
    return ""


def check_stalled(run: Any, *args: Any) -> None:
    """Let rank 1 of three stand still in a fit, and see whom the others name."""
    with start_ranks(stalled, 3, run, *args) as ranks:
        ranks.wait_for({0, 2})
        os.kill(ranks.pids[1], signal.SIGKILL)
        of_ranks = ranks.results(may_die={1})
    for said in (of_ranks[0], of_ranks[2]):
        assert f"ank 1 on {socket.gethostname()} did not answer. See what was said there." in said


def graph_of_channel() -> lgd.Graph:
    return lgd.communities(600, 4, num_features=12, seed=3)


def in_evaluation(rank: int, world_size: int, launch: lgd.Launch) -> None:
    options: dict[str, Any] = {"sampler": lgd.NeighborSampler([3, 3]), "batch_size": 16}
    evaluation = lgd.Evaluation(batch_size=32)
    data = lgd.PartitionedDataModule(
        graph_of_channel(), partitioner=lgd.RandomPartitioner(), evaluation=evaluation, **options
    )
    trainer(world_size, lgd.LocalSGDStrategy(launch=launch), max_epochs=2).fit(InEvaluation(12, 4), data)


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named() -> None:
    check_stalled(in_evaluation)
