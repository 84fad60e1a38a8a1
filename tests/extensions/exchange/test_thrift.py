"""Exchanges that save bytes or time, and ranks that die, stop, raise or do something else between two of them."""

import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch_geometric.nn import SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.exchange.row_exchange import THREAD_NAME, Route, RowExchange, tied
from lightning_gnn_dist.wire.channel import open_channel
from tests.boundary.models import Model, learned_by_hand, model, weighted_data, weights_of
from tests.boundary.test_whole_graph import odd
from tests.extensions.exchange.test_exchange import data_of, quick
from tests.layers.models import graph_of
from tests.ranks import run_ranks, start_ranks

LAYERS = 3


def seen_by_hand(layers: Any, data: Any, owner: Tensor, tables: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """A forward in which every rank sees the rows of others as tables say. Returns the rows behind each layer, the
    tables that each rank has read, and the predictions. A table that is None stands for the rows of this forward."""
    rows, behind, read = data.x, [], []
    for number, layer in enumerate(layers):
        seen = rows
        made = torch.zeros(data.num_nodes, 5 if number < len(layers) - 1 else 3, dtype=torch.float64)
        for rank in range(int(owner.max()) + 1):
            own = (owner == rank).view(-1, 1)
            if number:
                table = behind[-1].detach() if tables[number - 1] is None else tables[number - 1]
                leaf = table.clone().requires_grad_()
                read.append(leaf)
                seen = torch.where(own, rows, leaf)
            made = torch.where(own, layer(seen), made)
        rows = made
        behind.append(rows)
    return behind[:-1], read, rows


def gradient_of_others(read: list[Tensor], owner: Tensor, num_ranks: int) -> list[Tensor]:
    """What the ranks send to the owners of the rows that they have read, behind each layer."""
    sums = []
    for number in range(0, len(read), num_ranks):
        of_ranks = zip(read[number : number + num_ranks], range(num_ranks), strict=True)
        sums.append(sum(torch.where((owner == rank).view(-1, 1), 0.0, leaf.grad) for leaf, rank in of_ranks))
    return sums  # type: ignore[return-value]


def learned_from_stale_rows(name: str, data: Any, owner: Tensor, steps: int, every: int, overlap: bool) -> Any:
    """The weights after some steps, by hand: tables hold the rows that were sent last, and gradients not yet added."""
    module, num_ranks = model(name, LAYERS), int(owner.max()) + 1
    optimizer, seeds = module.configure_optimizers(), data.train_mask
    layers = [lambda x, conv=conv: module._between(conv, conv(x, data.edge_index)) for conv in module.convs]
    rows: list[Any] = [None] * (LAYERS - 1)
    nothing = [torch.zeros(data.num_nodes, 5, dtype=torch.float64)] * (LAYERS - 1)
    arrived: list[Any] = nothing
    for step in range(steps):
        is_due, waits = step % every == 0, step == 0 or not overlap
        used: list[Any] = [None] * (LAYERS - 1) if is_due and waits else rows
        added, arrived = arrived, nothing
        for _ in range(LAYERS if is_due and waits else 1):  # the gradients of this step come from the last layer first
            optimizer.zero_grad()
            behind, read, out = seen_by_hand(layers, data, owner, used)
            loss = cross_entropy(out[seeds], data.y[seeds])
            (loss + sum((a * b).sum() for a, b in zip(behind, added, strict=True))).backward()
            if is_due:
                rows, sent = [each.detach() for each in behind], gradient_of_others(read, owner, num_ranks)
                added, arrived = (sent, nothing) if waits else (added, sent)
        optimizer.step()
    return weights_of(module)


def fitted(rank: int, world_size: int, name: str, exchange: lgd.Exchange, folder: Path, at: int) -> Any:
    """The weights after 6 steps, those of a fit that was resumed on the way, and threads that are left."""
    found = []
    for epochs, path in ((6, None), (at, None), (6, folder / "half.ckpt")):
        module, running = fit(world_size, name, exchange, epochs, path)
        if epochs == at:
            running.save_checkpoint(folder / "half.ckpt")
        found.append(weights_of(module))
    return found[0], found[2], [each.name for each in threading.enumerate() if each.name.startswith(THREAD_NAME)]


def fit(world_size: int, name: str, exchange: lgd.Exchange, epochs: int, path: Path | None) -> tuple[Any, Any]:
    data, module = weighted_data(), model(name, LAYERS)
    running = quick(world_size, max_epochs=epochs, limit_val_batches=1.0)
    parts = data_of(graph_of(data), LAYERS, partitioner=odd(data, world_size), boundary=exchange)
    running.fit(module, parts, ckpt_path=path)
    return module, running


@pytest.mark.parametrize(
    ("name", "exchange", "num_ranks"),
    [
        ("SAGE", lgd.Exchange(every=2), 2),
        pytest.param("GAT", lgd.Exchange(every=3), 4, marks=pytest.mark.slow),
        pytest.param("SAGE", lgd.Exchange(overlap=True), 4, marks=pytest.mark.slow),
        pytest.param("GAT", lgd.Exchange(overlap=True), 2, marks=pytest.mark.slow),
        pytest.param("GAT", lgd.Exchange(every=2, overlap=True), 2, marks=pytest.mark.slow),
        pytest.param("SAGE", lgd.Exchange(every=3, overlap=True), 4, marks=pytest.mark.slow),
    ],
    ids=repr,
)
def test_stale_rows_and_gradients_are_as_old_as_asked(name: Any, exchange: Any, num_ranks: int, tmp_path: Path) -> None:
    data = weighted_data()
    owner = odd(data, num_ranks).assignment
    expected = learned_from_stale_rows(name, data, owner, 6, exchange.every, exchange.overlap)
    at = 2 * exchange.every if exchange.every < 3 else exchange.every
    fresh = learned_by_hand(name, LAYERS, data, 6)
    assert max(float((value - fresh[key]).abs().max()) for key, value in expected.items()) > 1e-4
    for found, resumed, threads in run_ranks(fitted, num_ranks, name, exchange, tmp_path, at):
        assert not threads
        for key, value in expected.items():
            assert torch.allclose(found[key], value, rtol=0, atol=1e-12), key
            assert exchange.overlap or torch.allclose(resumed[key], value, rtol=0, atol=1e-12), key


PATIENCE_SECONDS = 15.0
NEVER = 600.0  # seconds, longer than a test may take
HOST = socket.gethostname()


class Faulty(Model):
    """A model that rank 1 runs in another way from its third step on."""

    def __init__(self, fault: str) -> None:
        super().__init__(SAGEConv, 3)
        self.fault, self.steps = fault, 0

    def _meets(self, fault: str) -> bool:
        return self.fault == fault and self.global_rank == 1 and self.steps == 3

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        if conv is self.convs[1]:
            if self._meets("raise"):
                raise KeyError("a fault")
            if self._meets("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._meets("stop"):
                os.kill(os.getpid(), signal.SIGSTOP)
            if self._meets("sleep"):
                time.sleep(NEVER)
            if self.fault == "sleep" and self.global_rank == 0 and self.steps == 3:
                raise KeyError("of rank 0")
        return super()._layer(conv, batch)

    def training_step(self, batch: Any) -> Any:
        self.steps += 1
        if self._meets("twice"):
            lgd.through_layers(self, batch)
        if self.fault == "again":
            rows = checkpoint(self, batch, use_reentrant=False)
            return cross_entropy(rows, batch.y)
        loss = super().training_step(batch)
        return None if self._meets("no loss") else loss


def fit_with_a_fault(
    rank: int,
    world_size: int,
    fault: str,
    exchange: lgd.Exchange = lgd.Exchange(),  # noqa: B008
    patience: float = PATIENCE_SECONDS,
) -> tuple[str, str]:
    module = Faulty(fault)
    data = data_of(graph_of(weighted_data()), 3, boundary=exchange)
    strategy = lgd.GrappaStrategy(launch=lgd.Launch(timeout=timedelta(seconds=patience)))
    try:
        quick(world_size, strategy, max_epochs=8).fit(module, data)
    except (RuntimeError, KeyError) as error:
        return str(error), str(error.__cause__)
    return "", ""


def outcomes_of(fault: str, exchange: lgd.Exchange) -> list[tuple[str, str]]:
    """What ranks say: at once of one that has died, after their patience of one that has left or stands still."""
    knows_at_once = fault == "kill" or (fault == "raise" and not exchange.overlap)
    patience = NEVER if knows_at_once else PATIENCE_SECONDS
    with start_ranks(fit_with_a_fault, 3, fault, exchange, patience) as ranks:
        if fault == "stop":
            ranks.wait_for({0, 2})
            os.kill(ranks.pids[1], signal.SIGKILL)
        return ranks.results(may_die={1} if fault != "raise" else set())


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fault", ["raise", "kill", "stop"])
def test_a_rank_that_is_gone_is_named_also_while_rows_are_under_way(fault: str, overlap: bool) -> None:
    of_ranks = outcomes_of(fault, lgd.Exchange(overlap=overlap))
    assert fault != "raise" or of_ranks[1][0] == "'a fault'"
    for said, _ in (of_ranks[0], of_ranks[2]):
        if fault == "raise" and not overlap:
            assert said.startswith("Rank ") and "in step 3, behind layer 1 (forward), and rank 1 on " in said
        else:
            assert f"ank 1 on {HOST} did not answer" in said


@pytest.mark.slow
def test_a_rank_that_raises_does_not_wait_for_one_that_stands_still() -> None:
    with start_ranks(fit_with_a_fault, 3, "sleep", lgd.Exchange(overlap=True), NEVER) as ranks:
        ranks.wait_for({0})
        for rank in (1, 2):
            os.kill(ranks.pids[rank], signal.SIGKILL)
        said, _ = ranks.results(may_die={1, 2})[0]
    assert said == "'of rank 0'"


def test_ranks_that_do_different_things_are_told_so() -> None:
    for error, _ in run_ranks(fit_with_a_fault, 2, "twice"):
        assert "rank 0 is in step 3, forward 1, behind layer 1 (backward, rows of 5 float64)" in error
        assert "rank 1 is in step 3, forward 2, behind layer 0 (forward, rows of 5 float64)" in error
        assert "Every rank must run the same layers on every batch" in error


@pytest.mark.slow
def test_a_rank_that_skips_a_step_is_named() -> None:
    (said, _), (of_lightning, _) = run_ranks(fit_with_a_fault, 2, "no loss")
    assert f"in step 3, behind layer 1 (backward), and rank 1 on {HOST} did not answer" in said
    assert "returning None in distributed training is not supported" in of_lightning


def test_a_model_that_is_run_again_in_the_backward_is_refused() -> None:
    for error, _ in run_ranks(fit_with_a_fault, 2, "again"):
        assert "was run again in the backward (torch.utils.checkpoint)" in error


# Rows sent between ranks and their gradients sent back, against one process that has all rows.


COUNTS = [4, 0, 3]  # rows of each rank
ASKED: dict[tuple[int, int], list[int]] = {(0, 2): [2, 0], (1, 0): [1, 1, 3], (1, 2): [1], (2, 0): [3, 0]}
SECONDS = timedelta(seconds=30)
DRAWS = 300


def rows_of(rank: int) -> Tensor:
    return torch.randn(COUNTS[rank], 2, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def factors(rank: int, count: int) -> Tensor:
    return torch.randn(count, 2, 3, generator=torch.Generator().manual_seed(10 + rank), dtype=torch.float64)


def route_of(rank: int) -> Route:
    told = [torch.tensor(ASKED.get((other, rank), []), dtype=torch.int64) for other in range(3)]
    lengths = [len(ASKED.get((rank, other), [])) for other in range(3)]
    places = torch.arange(sum(lengths)).flip(0)  # received rows may stand anywhere
    return Route(told, list(places.split(lengths)))


def drawn(rank: int, world_size: int) -> tuple[Tensor, Tensor, list[int]]:
    """The mean of what is gathered, and of the gradients, over many draws."""
    dist.init_process_group("gloo", timeout=SECONDS)
    exchange, sums, numbers = RowExchange(open_channel(world_size), 5, share=0.5), [], []
    for step in range(1, DRAWS + 1):
        exchange.begin_step(step)
        rows = rows_of(rank).requires_grad_()
        gathered, thread = exchange.gather(rows, exchange.begin(), route_of(rank), 0)
        (tied(gathered, thread) * factors(rank, len(gathered))).sum().backward()
        sums.append((gathered.detach(), rows.grad))
        numbers.append(int(gathered[len(rows) :].flatten(1).any(1).sum()))
    exchange.close()
    rows, gradients = (torch.stack(list(each)).mean(0) for each in zip(*sums, strict=True))
    return rows, gradients, numbers


@pytest.mark.slow
def test_a_share_of_the_rows_is_right_in_the_mean() -> None:
    leaves = [rows_of(rank).requires_grad_() for rank in range(3)]
    of_ranks = run_ranks(drawn, 3)
    for rank, (rows, _, numbers) in enumerate(of_ranks):
        pieces = [leaves[other][ASKED.get((rank, other), [])] for other in range(3)]
        expected = torch.cat([leaves[rank], torch.cat(pieces).flip(0)])
        (expected * factors(rank, len(expected))).sum().backward()
        assert torch.allclose(rows, expected, rtol=0, atol=0.6)
        assert set(numbers) == {sum((len(piece) + 1) // 2 for piece in pieces)}
    for (_, gradients, _), leaf in zip(of_ranks, leaves, strict=True):
        assert torch.allclose(gradients, leaf.grad, rtol=0, atol=0.6)  # type: ignore[arg-type]
