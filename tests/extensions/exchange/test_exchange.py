"""An exchange loses nothing; what it needs, sends and leaves behind."""

import itertools
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch_geometric.data import Data
from torch_geometric.nn import GraphSAGE, SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.wire.collectives import traffic
from tests.boundary.models import (
    MODELS,
    Model,
    Normed,
    Weights,
    check_learned,
    learned_by_hand,
    model,
    weighted_data,
    weights_of,
)
from tests.boundary.test_whole_graph import STEPS, odd
from tests.boundary.test_whole_graph import fit as fit_cases
from tests.boundary.typed_parts import CLOSE, DATA, OPTIONS, RANKS, owners
from tests.callbacks.test_run_report import Told, fit
from tests.callbacks.test_run_report import logged as logged_numbers
from tests.cli.test_train import check_config
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.extensions.ready_made.models_by_layers import READY, Ready
from tests.layers.models import NUM_CLASSES, NUM_FEATURES, graph_of
from tests.layers.typed_model import ByLayers
from tests.ranks import run_ranks
from tests.slow import slow


def data_of(graph: Any, num_layers: int = 2, **options: Any) -> lgd.PartitionedDataModule:
    defaults: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "sampler": lgd.WholePartSampler(num_layers)}
    defaults["boundary"] = lgd.Exchange()
    return lgd.PartitionedDataModule(graph, **(defaults | options))


def quick(world_size: int, strategy: Any = None, **options: Any) -> pl.Trainer:
    defaults: dict[str, Any] = {"max_epochs": 2, "limit_val_batches": 0, "precision": "64-true"}
    return trainer(world_size, strategy or lgd.GrappaStrategy(**PATIENCE), **(defaults | options))


# It loses nothing: ranks take the steps of one process on the whole graph, also with types.


def exchanges(num_layers: int, data: Data, world_size: int) -> dict[str, Any]:
    sampler = lgd.WholePartSampler(num_layers)
    return {"partitioner": odd(data, world_size), "sampler": sampler, "boundary": lgd.Exchange()}


@pytest.mark.parametrize("world_size", [2, slow(4), slow(5)])
def test_an_exchange_loses_nothing(world_size: int) -> None:
    data = weighted_data()
    cases = [(name, 3) for name in MODELS + (READY if world_size > 2 else [])] + [("SAGE", 1), ("GAT", 2)]
    check_learned(cases, run_ranks(fit_cases, world_size, data, cases, {"data": exchanges}), STEPS)


@pytest.mark.slow
def test_an_exchange_loses_nothing_under_ddp() -> None:
    data = weighted_data()
    cases = [("SAGE", 2), ("JK", 3)]
    check_learned(cases, run_ranks(fit_cases, 3, data, cases, {"data": exchanges, "strategy": plain_ddp}), STEPS)


def by_hand(num_layers: int, steps: int) -> Weights:
    """Gradient descent of one process on the whole graph."""
    module, papers = ByLayers(DATA.edge_types, num_layers), DATA["paper"]
    for _ in range(steps):
        rows = module.whole(DATA)["paper"]
        loss = cross_entropy(rows[papers.train_mask], papers.y[papers.train_mask])
        gradient = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        for p, g in zip(module.parameters(), gradient, strict=True):
            p.data -= 0.1 * (0 if g is None else g)
    return {name: p.detach() for name, p in module.named_parameters()}


def exchanged(
    rank: int,
    world_size: int,
    where: Any,
    num_layers: int,
    folder: Path,
    exchange: lgd.Exchange,
    accelerator: str = "cpu",
) -> Weights:
    options: dict[str, Any] = OPTIONS | {"accelerator": accelerator}

    def fit_until(epochs: int, **resumed: Any) -> ByLayers:
        cut = {} if isinstance(where, Path) else {"partitioner": owners(where, world_size)}
        cut |= {"sampler": lgd.WholePartSampler(num_layers), "boundary": exchange, "seed": 0}
        data = lgd.PartitionedDataModule(where, **cut)
        strategy = lgd.GrappaStrategy(**PATIENCE, find_unused_parameters=True)
        run = trainer(world_size, strategy, max_epochs=epochs, **options)
        module = ByLayers(DATA.edge_types, num_layers)
        run.fit(module, data, **resumed)
        run.save_checkpoint(folder / "half.ckpt")
        return module

    fit_until(2)
    return {name: p.detach().cpu() for name, p in fit_until(4, ckpt_path=folder / "half.ckpt").named_parameters()}


@pytest.mark.parametrize("accelerator", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("num_layers", "place"), [slow(2, "RAM"), (3, "RAM"), (2, "shards")])
def test_an_exchange_is_one_process(num_layers: int, place: str, accelerator: str, tmp_path: Path) -> None:
    where: Any = lgd.Graph.from_pyg(DATA)
    num_ranks = RANKS if place == "RAM" else 2
    if accelerator == "gpu" and torch.cuda.device_count() < num_ranks:
        pytest.skip(f"fewer than {num_ranks} CUDA devices")
    if place == "shards":
        lgd.save_shards(where, owners(where, 2), tmp_path / "shards")
        where = tmp_path / "shards"
    expected = by_hand(num_layers, 4)
    for found in run_ranks(exchanged, num_ranks, where, num_layers, tmp_path, lgd.Exchange(), accelerator):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, **CLOSE)


@pytest.mark.slow
def test_the_shipped_config_trains(tmp_path: Path) -> None:
    check_config("whole_graph.yaml", tmp_path)


# What it sends.


SENT = [  # and the bytes of a row of five numbers
    (lgd.Exchange(), 5 * 8),
    (lgd.Exchange(every=2, share=0.4), 5 * 8),
]


def sent(rank: int, world_size: int, data: Any) -> list[tuple[list[float], list[float], float]]:
    return [sent_by(world_size, data, exchange) for exchange, _ in SENT]


def sent_by(world_size: int, data: Any, exchange: lgd.Exchange) -> tuple[list[float], list[float], float]:
    """All bytes of the second, third and fourth step, those at the boundary, and what is logged of these."""
    module, before = model("SAGE", 3), list[tuple[float, float]]()

    class Count(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            before.append((traffic.bytes_sent, traffic.boundary_bytes))

    parts = data_of(graph_of(data), 3, boundary=exchange)
    running = quick(world_size, max_epochs=5, callbacks=[Count()])
    running.fit(module, parts)
    spent = [[after - start for start, after in itertools.pairwise(of[1:])] for of in zip(*before, strict=True)]
    return spent[0], spent[1], float(running.callback_metrics["comm/boundary_bytes"])


def rows_moved(data: Any, owner: list[int], num_layers: int, num_ranks: int, share: float = 1.0) -> list[int]:
    """The rows and gradients of rows that each rank sends in a step, counted edge by edge."""
    edges = list(zip(*data.edge_index.tolist(), strict=True))
    computed, moved = set(data.train_mask.nonzero().view(-1).tolist()), [0] * num_ranks
    for _ in range(num_layers - 1):  # behind the last but one, and on to the first
        read = {(u, owner[v]) for u, v in edges if v in computed and owner[u] != owner[v]}
        for (giver, reader), number in Counter((owner[u], reader) for u, reader in read).items():
            moved[giver] += math.ceil(share * number)  # rows
            moved[reader] += math.ceil(share * number)  # and their gradients
        computed |= {u for u, v in edges if v in computed}
    return moved


def test_a_step_sends_rows_and_gradients_that_edges_ask_for() -> None:
    data, num_ranks = weighted_data(), 3
    owner = lgd.RandomPartitioner()(graph_of(data), num_ranks, seed=0).assignment.tolist()
    num_values = sum(p.numel() for p in model("SAGE", 3).parameters())
    of_grappa = 2 * (num_ranks - 1) / num_ranks * (8 * num_values + 8 * 5)  # five numbers a step
    of_grappa += (num_ranks - 1) * 8 * 3  # three to each of the others at the end of a pass
    headers = 2 * 2 * (num_ranks - 1) * 8 * 6  # six numbers behind two layers, forward and backward
    for rank, found in enumerate(run_ranks(sent, num_ranks, data)):
        for (measured, at_boundary, logged), (exchange, bytes_of_row) in zip(found, SENT, strict=True):
            of_rows = headers + rows_moved(data, owner, 3, num_ranks, exchange.share)[rank] * bytes_of_row
            assert at_boundary == [of_rows * (step % exchange.every == 0) for step in (1, 2, 3)], exchange
            assert logged == of_rows * len(range(0, 5, exchange.every))
            assert measured == pytest.approx([of_grappa + rows for rows in at_boundary], abs=1e-6)


def fit_with_exchange(rank: int, world_size: int, folder: Path, strategy: Any) -> Told:
    data, report = data_of(graph_of(weighted_data())), lgd.RunReport()
    fit(folder, world_size, strategy, [report], data, model("SAGE", 2), precision="64-true")
    return report.ranks, report.table


@pytest.mark.parametrize("strategy", [pytest.param("grappa", marks=pytest.mark.slow), "ddp"])
def test_rows_at_the_boundary_are_told_apart(strategy: str, tmp_path: Path) -> None:
    (ranks, table), _ = run_ranks(fit_with_exchange, 2, tmp_path, strategy)
    assert "MB at boundary" in table and min(rank["boundary_bytes"] for rank in ranks) > 0
    assert strategy == "ddp" or all(rank["bytes_sent"] > rank["boundary_bytes"] for rank in ranks)
    step, *_ = steps = logged_numbers(tmp_path, "comm/boundary_bytes")
    assert steps == [step, 2 * step, 3 * step] and ranks[0]["boundary_bytes"] == steps[-1]
    assert bool(logged_numbers(tmp_path, "comm/bytes_sent")) == (strategy == "grappa")


# Where it runs.


def test_one_rank_needs_no_exchange() -> None:
    data, module = weighted_data(), model("SAGE", 2)
    quick(1, "auto", max_epochs=4).fit(module, data_of(graph_of(data)))
    for key, value in learned_by_hand("SAGE", 2, data, 4).items():
        assert torch.allclose(weights_of(module)[key], value, rtol=0, atol=1e-12), key


class SeesMasks(Model):
    """Notes whether its batches mark the training nodes that the graph does; logs a mean over all ranks."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__(SAGEConv, 2)
        self.mask, self.is_marked = mask, False

    def training_step(self, batch: Any) -> Tensor:
        self.is_marked = torch.equal(batch.train_mask, self.mask[batch.n_id])
        losses = cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        loss = lgd.coverage_mean(losses, batch)
        self.log("mean", loss, batch_size=batch.batch_size, sync_dist=True, on_epoch=True, on_step=False)
        return loss


def logged(rank: int, world_size: int) -> tuple[bool, float]:
    data = weighted_data()
    owner = (torch.arange(data.num_nodes) % 2).to(torch.int32)
    owner[data.train_mask] = 0  # one of the two ranks has no training node
    module = SeesMasks(data.train_mask)
    parts = data_of(graph_of(data), partitioner=lgd.Partition(owner, 2))
    running = quick(world_size, max_epochs=1)
    running.fit(module, parts)
    return module.is_marked, float(running.callback_metrics["mean"])


def test_masks_are_the_graphs_and_means_over_ranks_are_numbers() -> None:
    for is_marked, mean in run_ranks(logged, 2):
        assert is_marked and not math.isnan(mean)


class Integers(Model):
    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)

    def _between(self, conv: Any, x: Tensor) -> Tensor:
        return x if conv is self.convs[-1] else x.long()


# What is refused.


class WithoutLayers(Model):
    def __init__(self) -> None:
        super().__init__(SAGEConv, 1)
        self.gnn = GraphSAGE(NUM_FEATURES, 4, 2, NUM_CLASSES)

    layers = None  # type: ignore[assignment]

    def forward(self, batch: Any) -> Tensor:
        return self.gnn(batch.x, batch.edge_index)[: batch.batch_size]


class ReadsEdges(Ready):
    def __init__(self) -> None:
        super().__init__(GraphSAGE, 2)

    def forward(self, batch: Any) -> Tensor:
        return self.gnn(batch.x, batch.edge_index)[: batch.batch_size]


class Writes(Model):
    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)

    def forward(self, batch: Any) -> Tensor:
        batch.x.add_(1.0)
        return lgd.through_layers(self, batch)


ROUNDS = "LocalSGDStrategy does not exchange gradients at every step: use GrappaStrategy() or"
REFUSED: list[tuple[Callable[[], Model], dict[str, Any], str]] = [
    (WithoutLayers, {}, "WithoutLayers does not say what its layers are: define layers()"),
    (ReadsEdges, {}, "This batch has no edge_index: with boundary=Exchange() ranks send each other rows"),
    (Normed, {}, "norm (BatchNorm1d) normalises by the rows of all nodes at once"),
    (Integers, {}, "Layer 0 returned rows of torch.int64, and ranks exchange rows of torch.float32"),
    (lambda: Model(SAGEConv, 3), {}, "layers() returns 3 layers, and the sampler was told of 2"),
    (lambda: Model(SAGEConv, 2), {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2 has nothing to add up"),
    (lambda: Model(SAGEConv, 2), {"strategy": lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE)}, ROUNDS),
    (Writes, {}, "write into a copy"),  # of the batch that all passes share
]


def refused(rank: int, world_size: int) -> list[str]:
    found = []
    for make, options, _ in REFUSED:
        with pytest.raises((ValueError, AttributeError, TypeError, RuntimeError)) as caught:
            quick(world_size, **options).fit(make(), data_of(graph_of(weighted_data())))
        found.append(str(caught.value))
    return found


def test_what_cannot_be_exchanged_is_refused() -> None:
    for found in run_ranks(refused, 2):
        for said, (*_, message) in zip(found, REFUSED, strict=True):
            assert message in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampler": lgd.NeighborSampler([4, 4])}, r"takes sampler=WholePartSampler\(num_hops\).*got NeighborSampler"),
        ({"holding": lgd.Holding(lgd.Rotate())}, r"boundary=Exchange\(\) sees the whole graph: choose one"),
    ],
)
def test_settings_that_contradict_an_exchange_are_refused(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_of(graph_of(weighted_data()), **options)
    with pytest.raises(TypeError, match="Did you mean 'share'"):
        lgd.Exchange(shares=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("strategy", "precision", "message"),
    [
        (DDPStrategy(), "16-mixed", 'precision="16-mixed" skips steps on single ranks'),
        (FSDPStrategy(), "32-true", "FSDPStrategy is no strategy for it: use GrappaStrategy"),
        (lgd.GrappaStrategy(weights="uniform"), "32-true", 'weights="uniform" counts ranks, whatever their seeds'),
    ],
)
def test_strategies_that_do_otherwise_are_refused(strategy: Any, precision: str, message: str) -> None:
    options = {"precision": precision, "strategy": strategy, "accumulate_grad_batches": 1}
    trainer: Any = SimpleNamespace(**options, lightning_module=Model(SAGEConv, 2))
    with pytest.raises(ValueError, match=message):
        lgd.Exchange().check_in_fit(trainer)
