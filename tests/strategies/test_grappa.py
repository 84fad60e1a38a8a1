"""Laws of Grappa, on several gloo ranks: what its steps are, what it sends, and that it goes on where it stopped."""

from __future__ import annotations

import logging
import os
import signal
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import collectives
from lightning_gnn_dist.coverage import Coverage, coverage_mean
from lightning_gnn_dist.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.partition.base import Partition
from lightning_gnn_dist.partition.random import RandomPartitioner
from lightning_gnn_dist.residency import Redeal, Rotate
from lightning_gnn_dist.rounds import EverySteps
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from lightning_gnn_dist.sampling.whole import WholePartSampler
from lightning_gnn_dist.strategies.grappa import GrappaStrategy
from lightning_gnn_dist.strategies.local_sgd import LocalSGDStrategy
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, state_of

PATIENCE = {"timeout": timedelta(seconds=30)}


def grappa(**options: Any) -> GrappaStrategy:
    return GrappaStrategy(**PATIENCE, **options)


def graph() -> Graph:
    return communities(600, 4, num_features=8, train_share=0.3, seed=1)


class Model(pl.LightningModule):
    """Two layers, SGD; weighs nodes or leaves that to the strategy."""

    def __init__(self, *, weighs_nodes: bool = True, dropout: float = 0.0, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([SAGEConv(8, 16), SAGEConv(16, 4)])
        self.norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
        self.weighs_nodes, self.dropout = weighs_nodes, dropout
        self.seen: list[tuple[Tensor, bool]] = []
        self.validated: list[State] = []

    def forward(self, batch: Any) -> Tensor:
        x = self.norm(self.convs[0](batch.x, batch.edge_index)).relu()
        x = functional.dropout(x, self.dropout, self.training)
        return self.convs[1](x, batch.edge_index)[: batch.batch_size]

    def training_step(self, batch: Any) -> Tensor:
        self.seen.append((batch.n_id[: batch.batch_size].clone(), batch.is_filler))
        losses = functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        return coverage_mean(losses, batch) if self.weighs_nodes else losses.mean()

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self(batch).sum(), sync_dist=True, batch_size=batch.batch_size)

    def on_validation_start(self) -> None:
        self.validated.append(state_of(self))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data_of(source: Graph | None = None, **options: Any) -> PartitionedDataModule:
    defaults: dict[str, Any] = {
        "partitioner": RandomPartitioner(),
        "sampler": WholePartSampler(2),
        "batch_size": 10**9,
        "num_threads": 0,
    }
    return PartitionedDataModule(graph() if source is None else source, **(defaults | options))


def trainer_of(devices: int, strategy: Any, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_val_batches": 0}
    defaults["enable_checkpointing"] = False
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **quiet, **(defaults | options))


# Law 2: at full coverage Grappa is DDP. Law 1: alone it is plain Lightning.


def ddp_and_grappa(rank: int, world_size: int, options: dict[str, Any]) -> list[State]:
    states = []
    for strategy in (DDPStrategy(**PATIENCE), grappa()):
        torch.manual_seed(0)
        module = Net(optimizer="Adam")
        fit(rank, strategy, module, devices=world_size, **options)
        states.append(state_of(module))
    return states


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulated and clipped", "bf16"],
)
def test_batches_without_coverage_make_it_ddp(options: dict[str, Any]) -> None:
    for ddp, ours in run_ranks(ddp_and_grappa, 2, options):
        assert differs(ddp, ours) == 0.0


def alone(rank: int, world_size: int) -> list[State]:
    states = []
    for strategy in (SingleDeviceStrategy(torch.device("cpu")), grappa()):
        module = Model(dropout=0.5)
        torch.manual_seed(1)
        trainer_of(1, strategy).fit(module, data_of(sampler=NeighborSampler([3, 3]), batch_size=32))
        states.append(state_of(module))
    return states


def test_one_rank_is_plain_lightning() -> None:
    plain, ours = run_ranks(alone, 1)[0]
    assert differs(plain, ours) == 0.0


# The weighted gradient is the central one.


def central_step(weights: str, level: str, world_size: int) -> State:
    """One SGD step along sum(w g) / sum(w), from the parts as a single process can build them."""
    data = data_of(coverage=Coverage(level=level), **CUT)  # type: ignore[arg-type]
    module, total, whole = Model(), 0.0, []
    for rank in range(world_size):
        part = data.part(rank, world_size)
        loader = data._batches_of(part, 1, 0, 0, 1)
        (batch,) = loader
        losses = functional.cross_entropy(module(batch), batch.y[: batch.batch_size], reduction="none")
        own = batch.coverage[: batch.batch_size]
        if level == "batch":
            own = own.mean().expand(batch.batch_size)
        if weights == "nodes":
            own = own / own.sum() * batch.batch_size  # the module weighs nodes, the strategy counts them
        if weights == "uniform":
            own = own / own.sum()
        gradients = torch.autograd.grad((losses * own).sum(), list(module.parameters()))
        whole.append(gradients)
        total += float(own.sum())
    with torch.no_grad():
        for place, parameter in enumerate(module.parameters()):
            parameter -= 0.1 * sum(gradients[place] for gradients in whole) / total
    return state_of(module)


def uneven() -> Partition:
    """Three parts of very different size, so that counts of seeds differ too."""
    generator = torch.Generator().manual_seed(3)
    share = torch.rand(600, generator=generator)
    return Partition(((share > 0.15).int() + (share > 0.4).int()).int(), 3)


CUT: dict[str, Any] = {"partitioner": uneven()}


def one_step(rank: int, world_size: int, weights: str, level: str) -> State:
    module = Model()
    data = data_of(coverage=Coverage(level=level), **CUT)  # type: ignore[arg-type]
    trainer_of(world_size, grappa(weights=weights), max_epochs=1).fit(module, data)
    return state_of(module)


@pytest.mark.parametrize(
    ("weights", "level"), [("coverage", "node"), ("coverage", "batch"), ("nodes", "node"), ("uniform", "node")]
)
def test_a_step_is_the_central_weighted_step(weights: str, level: str) -> None:
    expected = central_step(weights, level, 3)
    for state in run_ranks(one_step, 3, weights, level):
        assert differs(state, expected) < 1e-6


def opaque_step(rank: int, world_size: int) -> tuple[State, State]:
    states = []
    for level, weighs_nodes in (("node", False), ("batch", True)):
        module = Model(weighs_nodes=weighs_nodes)
        data = data_of(coverage=Coverage(level=level), **CUT)  # type: ignore[arg-type]
        trainer_of(world_size, grappa(), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states[0], states[1]


def test_a_module_that_weighs_nothing_is_weighed_batch_by_batch() -> None:
    for opaque, batch_level in run_ranks(opaque_step, 3):
        assert differs(opaque, batch_level) < 1e-6


def two_sides(*, inner_edge: bool) -> Graph:
    """Two sides of twenty nodes, with edges from each to the other, and one that is not cut."""
    side = torch.arange(20)
    ends = [torch.stack([side, side + 20]), torch.stack([side + 20, side])]
    if inner_edge:
        ends.append(torch.tensor([[20, 21], [21, 20]]))
    arrays = {"x": torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), "y": torch.arange(40) % 4}
    arrays["train_mask"] = torch.ones(40, dtype=torch.bool)
    return Graph.from_edge_index(torch.cat(ends, 1), 40, arrays)


SIDES = Partition((torch.arange(40) >= 20).int(), 2)


def step_of_sides(rank: int, world_size: int, weights: str, weighs_nodes: bool, inner_edge: bool) -> State:
    module = Model(weighs_nodes=weighs_nodes)
    data = data_of(two_sides(inner_edge=inner_edge), partitioner=SIDES)
    trainer_of(world_size, grappa(weights=weights), max_epochs=1).fit(module, data)
    return state_of(module)


def plain_step(inner_edge: bool) -> State:
    """One step along the plain mean of all losses."""
    data, module = data_of(two_sides(inner_edge=inner_edge), partitioner=SIDES), Model()
    losses = []
    for rank in range(2):
        (batch,) = data._batches_of(data.part(rank, 2), 1, 0, 0, 1)
        losses.append(functional.cross_entropy(module(batch), batch.y[: batch.batch_size], reduction="none"))
    gradients = torch.autograd.grad(torch.cat(losses).mean(), list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    return state_of(module)


@pytest.mark.parametrize("weighs_nodes", [True, False])
def test_where_nothing_is_covered_all_nodes_count_alike(weighs_nodes: bool) -> None:
    for state in run_ranks(step_of_sides, 2, "coverage", weighs_nodes, False):
        assert differs(state, plain_step(inner_edge=False)) < 1e-6


@pytest.mark.parametrize("weights", ["nodes", "uniform"])
def test_a_rank_without_coverage_counts_where_coverage_is_not_asked_for(weights: str) -> None:
    for state in run_ranks(step_of_sides, 2, weights, False, True):
        assert differs(state, plain_step(inner_edge=True)) < 1e-6


def said(rank: int, world_size: int, weighs_nodes: bool, options: dict[str, Any]) -> list[str]:
    """What two fits of two epochs say."""
    logger, lines = logging.getLogger("lightning.pytorch.utilities.rank_zero"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    trainer = trainer_of(world_size, grappa(), **options)
    other_side = Partition((torch.arange(40) < 20).int(), 2)
    for max_epochs in (2, 4):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(Model(weighs_nodes=weighs_nodes), data_of(two_sides(inner_edge=True), partitioner=other_side))
    return [line for line in lines if "coverage" in line]


@pytest.mark.parametrize(
    ("weighs_nodes", "options", "line"),
    [
        (False, {"accumulate_grad_batches": 4}, "whole batches are weighed"),
        (True, {}, "without a neighbour in their part: 38 of 40"),
    ],
)
def test_what_is_weighed_is_said_once_a_fit(weighs_nodes: bool, options: dict[str, Any], line: str) -> None:
    lines, of_rank_1 = run_ranks(said, 2, weighs_nodes, options)
    assert len(lines) == 2 and all(line in one for one in lines)
    assert not of_rank_1


# Every training node is a seed once an epoch, and ranks take the same number of steps.


def few_labels(rank: int, world_size: int) -> tuple[list[list[int]], int, State]:
    source = graph()
    seeds = source.split("train")
    lone = torch.zeros(600, dtype=torch.int32)
    lone[seeds[:3]] = 1  # rank 1 has three seeds, rank 0 all others
    module = Model()
    trainer = trainer_of(world_size, grappa())
    options = {"coverage": None, "batch_size": 20, "sampler": NeighborSampler([4, 4])}
    trainer.fit(module, data_of(source, partitioner=Partition(lone, 2), **options))
    counted = [ids.tolist() for ids, is_filler in module.seen if not is_filler]
    return counted, len(module.seen), state_of(module)


def test_a_rank_with_few_seeds_fills_up_with_steps_that_count_for_nothing() -> None:
    (first, steps, state), (second, other_steps, other) = run_ranks(few_labels, 2)
    assert steps == other_steps == 2 * len(first) // 2
    assert differs(state, other) == 0.0
    per_epoch = sorted(node for ids in first[: len(first) // 2] + second[: len(second) // 2] for node in ids)
    assert per_epoch == graph().split("train").tolist()


def filled_up(rank: int, world_size: int) -> list[State]:
    """Passes of three batches, and of five that both ranks fill up."""
    source, states = graph(), []
    seeds = source.split("train")
    source.node_arrays["train_mask"] = torch.zeros(600, dtype=torch.bool).index_fill_(0, seeds[:6], True)
    sides = Partition(torch.zeros(600, dtype=torch.int32).index_fill_(0, seeds[:3], 1), 2)
    for num_batches in (3, 5):
        data = data_of(source, partitioner=sides, batch_size=1)
        data._num_batches = lambda count=num_batches: count  # type: ignore[method-assign,misc]
        module = Model(weighs_nodes=False)
        trainer_of(world_size, grappa()).fit(module, data)
        states.append(state_of(module))
    return states


def test_a_batch_that_all_ranks_fill_up_with_counts_for_nothing() -> None:
    for plain, filled in run_ranks(filled_up, 2):
        assert differs(plain, filled) == 0.0


class Logs(Model):
    """Logs its loss as docs/strategies.md says, and remembers what it has logged."""

    def training_step(self, batch: Any) -> Tensor:
        losses = functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        if not batch.is_filler:
            self.log("of_seeds", losses.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(losses))
            self.seen.append((losses.detach(), False))
        return losses.mean()


def logged(rank: int, world_size: int) -> tuple[Tensor, float]:
    """Five seeds on one rank and one on the other, which fills four batches up."""
    source = graph()
    seeds = source.split("train")
    source.node_arrays["train_mask"] = torch.zeros(600, dtype=torch.bool).index_fill_(0, seeds[:6], True)
    sides = Partition(torch.zeros(600, dtype=torch.int32).index_fill_(0, seeds[:1], 1), 2)
    module = Logs()
    trainer = trainer_of(world_size, grappa(), max_epochs=1)
    trainer.fit(module, data_of(source, partitioner=sides, batch_size=1))
    return torch.cat([losses for losses, _ in module.seen]), float(trainer.logged_metrics["of_seeds"])


def test_what_is_logged_without_fillers_is_the_mean_over_all_seeds() -> None:
    (first, mean), (second, other) = run_ranks(logged, 2)
    assert (len(first), len(second)) == (5, 1)
    assert mean == other == pytest.approx(float(torch.cat([first, second]).mean()))


def rotating(rank: int, world_size: int, residency: Any) -> list[list[int]]:
    module = Model()
    data = data_of(residency=residency, repartition_every=2, batch_size=40, num_threads=1)
    trainer = trainer_of(world_size, grappa(), max_epochs=6)
    trainer.fit(module, data)
    steps = len(module.seen) // 6
    return [torch.cat([ids for ids, _ in module.seen[e * steps : (e + 1) * steps]]).tolist() for e in range(6)]


@pytest.mark.parametrize("residency", [Rotate(), Redeal(30)], ids=repr)
def test_every_training_node_is_a_seed_once_an_epoch(residency: Any) -> None:
    everyone = graph().split("train").tolist()
    epochs = list(zip(*run_ranks(rotating, 3, residency), strict=True))
    for ranks in epochs:
        assert sorted(node for ids in ranks for node in ids) == everyone
    same = [set(epochs[0][rank]) == set(epochs[2][rank]) for rank in range(3)]
    assert all(same) == isinstance(residency, Rotate)


# What it sends.


def sent(rank: int, world_size: int) -> tuple[float, float]:
    module, before = Model(), collectives.traffic.bytes_sent
    counts = []

    class Count(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            counts.append(collectives.traffic.bytes_sent - before)

    trainer = trainer_of(world_size, grappa(), callbacks=[Count()], max_epochs=3)
    trainer.fit(module, data_of(batch_size=30, sampler=NeighborSampler([4, 4])))
    values, steps = sum(p.numel() for p in module.parameters()), len(module.seen) // 3
    return counts[2] - counts[1], steps * 2 * (world_size - 1) / world_size * (4 * values + 8)


def test_an_epoch_sends_gradients_and_two_numbers_a_step() -> None:
    for measured, expected in run_ranks(sent, 2):
        assert measured == expected


# Replicas, buffers, resuming, stopping.


def validated(rank: int, world_size: int, buffers: str) -> list[State]:
    module = Model(batch_norm=True, dropout=0.5)
    torch.manual_seed(rank)
    options = {"limit_val_batches": 1.0, "val_check_interval": 2}
    data = data_of(batch_size=20, sampler=NeighborSampler([4, 4]))
    trainer_of(world_size, grappa(buffers=buffers), **options).fit(module, data)
    return module.validated


def test_replicas_are_equal_at_every_validation() -> None:
    first, second = run_ranks(validated, 2, "average")
    assert len(first) == 4
    assert all(differs(a, b) == 0.0 for a, b in zip(first, second, strict=True))


def ended_early(rank: int, world_size: int, options: dict[str, Any]) -> tuple[State, set[str]]:
    """A fit that ends in the middle of an epoch: its weights, and the names of its figures."""
    module = Model(batch_norm=True)
    strategy, data = grappa(), data_of(batch_size=20, sampler=NeighborSampler([4, 4]))
    if options.pop("leave", False):
        module.on_train_batch_start = lambda batch, idx: -1 if idx == 3 else None  # type: ignore[assignment]
    trainer = trainer_of(world_size, strategy, **options)
    trainer.fit(module, data)
    return state_of(module), set(trainer.logged_metrics)


@pytest.mark.parametrize("options", [{"max_steps": 3, "max_epochs": -1}, {"leave": True}], ids=["max_steps", "a hook"])
def test_replicas_are_equal_where_a_run_ends_in_the_middle_of_an_epoch(options: dict[str, Any]) -> None:
    (first, figures), (second, _) = run_ranks(ended_early, 2, options)
    assert differs(first, second) == 0.0
    assert {"comm/bytes_sent", "data/waited_seconds"} <= figures


def test_local_buffers_stay_local() -> None:
    first, second = run_ranks(validated, 2, "local")
    assert differs(first[-1], second[-1]) > 0
    parameters = [{k: v for k, v in state.items() if "norm" not in k} for state in (first[-1], second[-1])]
    assert differs(*parameters) == 0.0


def stopped_and_resumed(
    rank: int, world_size: int, folder: str, stop_at: int, limits: dict[str, Any]
) -> tuple[State, State, list[Any]]:
    """Six epochs in super-epochs of two; a second run goes on from the checkpoint of a step in the middle."""
    settings = {"residency": Rotate(), "batch_size": 30, "sampler": NeighborSampler([4, 4])}
    states, seen = [], []
    for ckpt_path in (None, f"{folder}/step={stop_at}.ckpt"):
        module = Model(dropout=0.5, batch_norm=True)
        torch.manual_seed(rank)
        if ckpt_path is not None:
            torch.rand(rank + 1)  # another state than the first run had
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=stop_at, save_top_k=-1)
        options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 6} | limits
        warnings.filterwarnings("ignore", "Checkpoint directory")
        trainer = trainer_of(world_size, grappa(), **options)
        trainer.fit(module, data_of(**settings), ckpt_path=ckpt_path)
        states.append(state_of(module))
        seen.append([ids.tolist() for ids, _ in module.seen])
    return states[0], states[1], seen


@pytest.mark.parametrize(
    ("stop_at", "limits"),
    [(8, {}), (5, {}), (4, {"limit_train_batches": 2})],
    ids=["between epochs", "in an epoch", "at the end of a shortened epoch"],
)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop_at: int, limits: dict[str, Any]) -> None:
    for whole, resumed, (all_seen, later_seen) in run_ranks(stopped_and_resumed, 3, str(tmp_path), stop_at, limits):
        assert later_seen == all_seen[stop_at:]
        # To rounding: after its first step DDP puts gradients in another order, and three terms are summed in another.
        assert differs(whole, resumed) < 1e-5


class Slow(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.seen) == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(rank: int, world_size: int) -> int:
    module = Slow()
    trainer = trainer_of(world_size, grappa(), max_epochs=50)
    with pytest.raises(SystemExit):
        trainer.fit(module, data_of(batch_size=10, sampler=NeighborSampler([4, 4])))
    return len(module.seen)


def test_sigterm_on_one_rank_ends_all_after_the_same_step() -> None:
    first, second = run_ranks(terminated, 2)
    assert first == second
    assert 3 < first < 8


# What is refused.


def uneven_loaders(rank: int, world_size: int) -> None:
    fit(rank, grappa(), Net(), devices=world_size, train=batches(rank, count=4 + rank))


def test_loaders_of_different_length_are_refused_on_all_ranks() -> None:
    with pytest.raises(RankError, match=r"\[4, 5\]") as error:
        run_ranks(uneven_loaders, 2)
    assert sorted(error.value.failures) == [0, 1]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([])


def endless_loader(rank: int, world_size: int, strategy: Any) -> None:
    fit(rank, strategy(**PATIENCE), Net(), devices=world_size, train=DataLoader(Endless()))


@pytest.mark.parametrize(
    ("strategy", "message"), [(GrappaStrategy, "not say how many it has"), (LocalSGDStrategy, "with a length")]
)
def test_a_loader_without_a_length_is_refused(strategy: Any, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        run_ranks(endless_loader, 2, strategy)
    assert sorted(error.value.failures) == [0, 1]


def with_unused_parameters(rank: int, world_size: int) -> None:
    module = Model()
    module.unused = nn.Linear(2, 2)
    trainer_of(world_size, grappa()).fit(module, data_of(batch_size=30))


def test_unused_parameters_are_told_of_with_the_way_out() -> None:
    with pytest.raises(RankError, match=r"use GrappaStrategy\(find_unused_parameters=True\)"):
        run_ranks(with_unused_parameters, 2)


def resumed_with_another_buffer(rank: int, world_size: int, folder: str) -> list[float]:
    for path in (None, f"{folder}/one.ckpt"):
        module = Model(batch_norm=True)
        if path is not None:
            module.register_buffer("added", torch.full((2,), 7.0), persistent=False)
        trainer = trainer_of(world_size, grappa(), max_epochs=1 if path is None else 2)
        trainer.fit(module, data_of(), ckpt_path=path)
        trainer.save_checkpoint(f"{folder}/one.ckpt")
    return module.added.tolist()  # type: ignore[no-any-return]


def test_a_buffer_that_is_new_since_the_checkpoint_keeps_its_value(tmp_path: Path) -> None:
    assert run_ranks(resumed_with_another_buffer, 2, str(tmp_path)) == [[7.0, 7.0]] * 2


def resume_from_rounds(rank: int, world_size: int, folder: str) -> None:
    path = f"{folder}/rounds.ckpt"
    trainer = trainer_of(world_size, LocalSGDStrategy(EverySteps(2), **PATIENCE))
    trainer.fit(Model(), data_of())
    trainer.save_checkpoint(path)
    trainer_of(world_size, grappa()).fit(Model(), data_of(), ckpt_path=path)


def test_a_checkpoint_of_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="strategy of rounds"):
        run_ranks(resume_from_rounds, 2, str(tmp_path))


WRONG: list[dict[str, Any]] = [
    {"weights": "degree"},
    {"buffers": "global"},
    {"timeout": 30},
    {"start_method": "x"},
    {"process_group_backend": "x"},
]


@pytest.mark.parametrize("strategy", [GrappaStrategy, LocalSGDStrategy])
@pytest.mark.parametrize("options", WRONG, ids=str)
def test_arguments_are_checked_where_they_are_given(strategy: Any, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        strategy(**options)


def test_backends_of_several_devices_are_known() -> None:
    assert GrappaStrategy(process_group_backend="cpu:gloo")._process_group_backend == "cpu:gloo"
