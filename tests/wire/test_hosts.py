"""Sums over ranks of several hosts: the sums of all ranks, for the bytes between hosts of one rank each."""

import re
from collections.abc import Callable
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

from lightning_gnn_dist import PartitionedDataModule
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.channel import all_gather_pieces, exchange_pieces
from lightning_gnn_dist.wire.collectives import Sent, traffic
from lightning_gnn_dist.wire.hosts import HostGradients, find_hosts
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import every_strategy
from tests.ranks import join, run_ranks

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


@pytest.mark.filterwarnings("ignore:Checkpoint directory")
def test_what_changes_later_on_one_rank_is_refused_where_ranks_exchange_anyway(tmp_path: Path) -> None:
    for weights, rate, saved, *alike in run_ranks(differing_later, 2, tmp_path):
        assert re.match(WEIGHTS_OF_RANKS, weights) and re.match(LR, rate) and re.match(LR, saved)
        assert alike == ["", ""]
