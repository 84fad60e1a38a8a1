"""Laws of Grappa, on several gloo ranks: what its steps are, what it sends, and what it refuses."""

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
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

import lightning_gnn_dist as lgd
from lightning_gnn_dist.rounds.checkpoints import KEY
from lightning_gnn_dist.wire import collectives
from tests.every_strategy import PATIENCE, plain_ddp
from tests.placing import batches_of
from tests.ranks import RankError, run_ranks
from tests.strategies.fitting import Net, State, batches, differs, fit, hear, state_of
from tests.strategies.weighted_fitting import Model, data_of, graph, grappa, trainer_of

# Law 2: at full coverage Grappa is DDP. Law 1: alone it is plain Lightning.


def ddp_and_grappa(rank: int, world_size: int) -> list[list[State]]:
    found = []
    for options in ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}):
        found.append(list[State]())
        for strategy in (plain_ddp(), grappa()):
            torch.manual_seed(0)
            module = Net(optimizer="Adam")
            fit(rank, strategy, module, devices=world_size, **options)  # type: ignore[arg-type]
            found[-1].append(state_of(module))
    return found


def test_batches_without_coverage_make_it_ddp() -> None:
    for found in run_ranks(ddp_and_grappa, 2):
        assert [differs(ddp, ours) for ddp, ours in found] == [0.0] * 3


# The weighted gradient is the central one.


def central_step(weights: str, level: str, world_size: int) -> State:
    """One SGD step along sum(w g) / sum(w), from the parts as a single process can build them."""
    data = data_of(coverage=lgd.Coverage(level=level), **CUT)  # type: ignore[arg-type]
    module, total, whole = Model(), 0.0, []
    for rank in range(world_size):
        part = data.part(rank, world_size)
        loader = batches_of(data, part, 1, 0, 0, 1)
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


def uneven() -> lgd.Partition:
    """Three parts of very different size, so that counts of seeds differ too."""
    generator = torch.Generator().manual_seed(3)
    share = torch.rand(600, generator=generator)
    return lgd.Partition(((share > 0.15).int() + (share > 0.4).int()).int(), 3)


CUT: dict[str, Any] = {"partitioner": uneven()}


# How ranks and nodes count, and whether the module weighs nodes: one that does not is weighed batch by batch.
WAYS = [(*way, True) for way in (("coverage", "node"), ("coverage", "batch"), ("nodes", "node"), ("uniform", "node"))]
WAYS.append(("coverage", "node", False))


def steps(rank: int, world_size: int) -> list[State]:
    states = []
    for weights, level, weighs_nodes in WAYS:
        module = Model(weighs_nodes=weighs_nodes)
        data = data_of(coverage=lgd.Coverage(level=level), **CUT)  # type: ignore[arg-type]
        trainer_of(world_size, grappa(weights=weights), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states


def test_a_step_is_the_central_weighted_step() -> None:
    expected = [central_step(weights, level if weighs else "batch", 3) for weights, level, weighs in WAYS]
    for states in run_ranks(steps, 3):
        for state, central, way in zip(states, expected, WAYS, strict=True):
            assert differs(state, central) < 1e-6, way


def two_sides(*, inner_edge: bool) -> lgd.Graph:
    """Two sides of twenty nodes, with edges from each to the other, and one that is not cut."""
    side = torch.arange(20)
    ends = [torch.stack([side, side + 20]), torch.stack([side + 20, side])]
    if inner_edge:
        ends.append(torch.tensor([[20, 21], [21, 20]]))
    arrays = {"x": torch.randn(40, 8, generator=torch.Generator().manual_seed(0)), "y": torch.arange(40) % 4}
    arrays["train_mask"] = torch.ones(40, dtype=torch.bool)
    return lgd.Graph.from_edge_index(torch.cat(ends, 1), 40, arrays)


SIDES = lgd.Partition((torch.arange(40) >= 20).int(), 2)


def steps_of_sides(rank: int, world_size: int) -> list[State]:
    states = []
    for weights, weighs_nodes, inner_edge in UNCOVERED:
        module = Model(weighs_nodes=weighs_nodes)
        data = data_of(two_sides(inner_edge=inner_edge), partitioner=SIDES)
        trainer_of(world_size, grappa(weights=weights), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states


def plain_step(inner_edge: bool, graph: lgd.Graph | None = None, by_class: Tensor | None = None) -> State:
    """One step along the plain mean of all losses."""
    graph, losses = two_sides(inner_edge=inner_edge) if graph is None else graph, []
    data, module = data_of(graph, partitioner=SIDES), Model()
    for rank in range(2):
        (batch,) = batches_of(data, data.part(rank, 2), 1, 0, 0, 1)
        y = batch.y[: batch.batch_size]
        losses.append(functional.cross_entropy(module(batch), y, weight=by_class, reduction="none"))
    gradients = torch.autograd.grad(torch.cat(losses).mean(), list(module.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(module.parameters(), gradients, strict=True):
            parameter -= 0.1 * gradient
    return state_of(module)


# Where nothing is covered all nodes count alike, as they do where coverage is not asked for.
UNCOVERED = [("coverage", True, False), ("coverage", False, False), ("nodes", False, True), ("uniform", False, True)]


def test_a_rank_without_coverage_counts_by_its_nodes() -> None:
    for states in run_ranks(steps_of_sides, 2):
        for state, (*_, inner_edge) in zip(states, UNCOVERED, strict=True):
            assert differs(state, plain_step(inner_edge=inner_edge)) < 1e-6


BY_CLASS = torch.tensor([4.0, 1.0, 1.0, 0.5])


class Classes(Model):
    """Weighs classes, and reduces the losses of a batch in one of three ways."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction

    def training_step(self, batch: Any) -> Tensor:
        y, reduction = batch.y[: batch.batch_size], self.reduction
        losses = functional.cross_entropy(self(batch), y, weight=BY_CLASS, reduction=reduction)
        return losses.mean() if reduction == "none" else losses


def unlike_sides() -> lgd.Graph:
    """Each side has two classes alone."""
    graph = two_sides(inner_edge=True)
    graph.node_arrays["y"] = torch.arange(40) // 10
    return graph


def steps_by_class(rank: int, world_size: int) -> list[State]:
    states = []
    for reduction in ("none", "mean", "sum"):
        module = Classes(reduction)
        data = data_of(unlike_sides(), partitioner=SIDES)
        trainer_of(world_size, grappa(weights="nodes"), max_epochs=1).fit(module, data)
        states.append(state_of(module))
    return states


def test_a_mean_over_seeds_weighs_classes_as_one_process_does() -> None:
    expected = plain_step(inner_edge=True, graph=unlike_sides(), by_class=BY_CLASS)
    for right, *wrong in run_ranks(steps_by_class, 2):
        assert differs(right, expected) < 1e-6
        assert all(differs(state, expected) > 1e-3 for state in wrong)  # other steps than a step of one process


def said(rank: int, world_size: int, weighs_nodes: bool, options: dict[str, Any]) -> list[str]:
    """What two fits of two epochs say."""
    lines, trainer = hear(), trainer_of(world_size, grappa(), **options)
    other_side = lgd.Partition((torch.arange(40) < 20).int(), 2)
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


# What it sends.


def sent(rank: int, world_size: int) -> tuple[float, float]:
    module, before = Model(), collectives.traffic.bytes_sent
    counts = []

    class Count(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            counts.append(collectives.traffic.bytes_sent - before)

    trainer = trainer_of(world_size, grappa(), callbacks=[Count()], max_epochs=3)
    trainer.fit(module, data_of(batch_size=30, sampler=lgd.NeighborSampler([4, 4])))
    values, steps = sum(p.numel() for p in module.parameters()), len(module.seen) // 3
    ring = 2 * (world_size - 1) / world_size
    return counts[2] - counts[1], ring * steps * (4 * values + 8 * 5) + (world_size - 1) * 8 * 3


def test_an_epoch_sends_gradients_five_numbers_a_step_and_three_at_its_end() -> None:
    for measured, expected in run_ranks(sent, 2):
        assert measured == expected


def test_backends_of_several_devices_are_known() -> None:
    assert lgd.GrappaStrategy(launch=lgd.Launch(backend="cpu:gloo"))._process_group_backend == "cpu:gloo"


# Replicas of Grappa: equal wherever a run ends, and the same when it was stopped and resumed.


def validated(rank: int, world_size: int) -> list[list[State]]:
    """At every validation of a fit whose buffers are averaged, and of one whose buffers are not."""
    states = []
    for buffers in ("average", "local"):
        module = Model(batch_norm=True, dropout=0.5)
        torch.manual_seed(rank)
        data = data_of(batch_size=20, sampler=lgd.NeighborSampler([4, 4]))
        options = {"limit_val_batches": 1.0, "val_check_interval": 2}
        trainer_of(world_size, grappa(buffers=buffers), **options).fit(module, data)
        states.append(module.validated)
    return states


def test_replicas_are_equal_at_every_validation_but_for_local_buffers() -> None:
    (first, own), (second, other) = run_ranks(validated, 2)
    assert len(first) == 4
    assert all(differs(a, b) == 0.0 for a, b in zip(first, second, strict=True))
    assert differs(own[-1], other[-1]) > 0
    parameters = [{k: v for k, v in state.items() if "norm" not in k} for state in (own[-1], other[-1])]
    assert differs(*parameters) == 0.0


def ended_early(rank: int, world_size: int) -> tuple[State, set[str]]:
    """A fit that ends in the middle of an epoch: its weights, and the names of its figures."""
    module = Model(batch_norm=True)
    strategy, data = grappa(), data_of(batch_size=20, sampler=lgd.NeighborSampler([4, 4]))
    module.on_train_batch_start = lambda batch, idx: -1 if idx == 3 else None  # type: ignore[assignment]
    trainer = trainer_of(world_size, strategy)
    trainer.fit(module, data)
    return state_of(module), set(trainer.logged_metrics)


def test_replicas_are_equal_where_a_run_ends_in_the_middle_of_an_epoch() -> None:
    (first, figures), (second, _) = run_ranks(ended_early, 2)
    assert differs(first, second) == 0.0
    assert {"comm/bytes_sent", "data/waited_seconds"} <= figures


def stopped_and_resumed(
    rank: int, world_size: int, folder: str, stop_at: int, limits: dict[str, Any]
) -> tuple[State, State, list[Any]]:
    """Six epochs in super-epochs of two; a second run goes on from the checkpoint of a step in the middle."""
    settings = {"holding": lgd.Holding(lgd.Rotate()), "batch_size": 30, "sampler": lgd.NeighborSampler([4, 4])}
    states, seen = [], []
    for ckpt_path in (None, f"{folder}/step={stop_at}.ckpt"):
        module = Model(dropout=0.5, batch_norm=True)
        torch.manual_seed(rank)
        if ckpt_path is not None:
            torch.rand(rank + 1)  # another state than the first run had
        saves = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=stop_at, save_top_k=-1)
        options = {"callbacks": [saves], "enable_checkpointing": True, "max_epochs": 6} | limits
        trainer = trainer_of(world_size, grappa(), **options)
        trainer.fit(module, data_of(**settings), ckpt_path=ckpt_path)
        states.append(state_of(module))
        seen.append([ids.tolist() for ids, _ in module.seen])
    return states[0], states[1], seen


@pytest.mark.parametrize(
    ("stop_at", "limits"),
    [
        pytest.param(8, {}, marks=pytest.mark.slow),
        (5, {}),
        pytest.param(4, {"limit_train_batches": 2}, marks=pytest.mark.slow),
    ],
    ids=["between epochs", "in an epoch", "at the end of a shortened epoch"],
)
def test_a_resumed_run_ends_with_the_same_weights(tmp_path: Path, stop_at: int, limits: dict[str, Any]) -> None:
    for whole, resumed, (all_seen, later_seen) in run_ranks(stopped_and_resumed, 3, str(tmp_path), stop_at, limits):
        assert later_seen == all_seen[stop_at:]
        assert differs(whole, resumed) == 0.0  # DDP deals gradients out before the first step, in one order for good


def saved(rank: int, world_size: int, folder: str) -> dict[str, tuple[State, State]]:
    """The buffers of checkpoints that are written in an epoch, and those of this rank then."""
    own: dict[str, State] = {}

    class Keeps(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *args: Any) -> None:
            if trainer.global_step == 3:
                before = state_of(module)
                trainer.save_checkpoint(f"{folder}/by_hand.ckpt")
                trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
                assert differs(before, state_of(module)) == 0.0  # the run goes on as if nothing had been
                own["norm"] = {name: value.float() for name, value in before.items() if "running" in name}

    saves = [
        ModelCheckpoint(folder, filename="full", every_n_train_steps=3, save_top_k=-1),
        ModelCheckpoint(folder, filename="time-{step}", train_time_interval=timedelta(0), save_top_k=-1),
    ]
    trainer = trainer_of(world_size, grappa(), callbacks=[Keeps(), *saves], enable_checkpointing=True, max_epochs=1)
    trainer.fit(Model(batch_norm=True), data_of(batch_size=20, sampler=lgd.NeighborSampler([4, 4])))
    files = {"by_hand": "by_hand", "full": "full", "weights": "weights", "time": "time-step=3"}
    states = {name: torch.load(f"{folder}/{file}.ckpt", weights_only=True) for name, file in files.items()}
    return {name: (state["state_dict"], own["norm"]) for name, state in states.items()}


def test_a_checkpoint_in_an_epoch_holds_the_mean_of_buffers(tmp_path: Path) -> None:
    first, second = run_ranks(saved, 2, str(tmp_path))
    for (state, own), (_, other) in zip(first.values(), second.values(), strict=True):
        mean = {name: (own[name] + other[name]) / 2 for name in own}
        assert differs(own, other) > 0.01
        assert differs({name: state[name] for name in mean}, mean) < 1e-6


class Fails(Model):
    def training_step(self, batch: Any) -> Any:
        if len(self.seen) == 3 and self.global_rank == 0:
            raise ZeroDivisionError("on one rank")
        return super().training_step(batch)


def fails(rank: int, world_size: int, strategy: Any, folder: str) -> None:
    warnings.filterwarnings("ignore", "This checkpoint is written after an exception")
    saves = ModelCheckpoint(folder, filename="last", save_on_exception=True, enable_version_counter=False)
    trainer = trainer_of(world_size, strategy, callbacks=[saves], enable_checkpointing=True)
    trainer.fit(Fails(batch_norm=True), data_of(batch_size=20, sampler=lgd.NeighborSampler([4, 4])))


ALONE = [grappa(), lgd.LocalSGDStrategy(lgd.EverySteps(2), **PATIENCE)]


@pytest.mark.parametrize("strategy", ALONE, ids=["gradients", "rounds"])
def test_a_checkpoint_of_one_rank_after_an_exception_has_weights_alone(strategy: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="on one rank"):
        run_ranks(fails, 2, strategy, str(tmp_path), grace=1)
    (path,) = tmp_path.glob("*.ckpt")
    content = torch.load(path, weights_only=True)
    assert content["state_dict"].keys() == Model(batch_norm=True).state_dict().keys()
    assert content[KEY]["ranks"] is None


class Slow(Model):
    def on_train_batch_end(self, *args: Any) -> None:
        if len(self.seen) == 3 and self.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def terminated(rank: int, world_size: int) -> int:
    module = Slow()
    trainer = trainer_of(world_size, grappa(), max_epochs=50)
    with pytest.raises(SystemExit):
        trainer.fit(module, data_of(batch_size=10, sampler=lgd.NeighborSampler([4, 4])))
    return len(module.seen)


def test_sigterm_on_one_rank_ends_all_after_the_same_step() -> None:
    first, second = run_ranks(terminated, 2)
    assert first == second == 4


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


# Passes of Grappa: every training node is a seed once an epoch, and ranks take the same number of steps.


# Every training node is a seed once an epoch, and ranks take the same number of steps.


def few_labels(rank: int, world_size: int) -> tuple[list[list[int]], int, State]:
    source = graph()
    seeds = source.split("train")
    lone = torch.zeros(600, dtype=torch.int32)
    lone[seeds[:3]] = 1  # rank 1 has three seeds, rank 0 all others
    module = Model()
    trainer = trainer_of(world_size, grappa())
    options = {"coverage": None, "batch_size": 20, "sampler": lgd.NeighborSampler([4, 4])}
    trainer.fit(module, data_of(source, partitioner=lgd.Partition(lone, 2), **options))
    counted = [ids.tolist() for ids, is_filler in module.seen if not is_filler]
    return counted, len(module.seen), state_of(module)


def test_a_rank_with_few_seeds_fills_up_with_steps_that_count_for_nothing() -> None:
    (first, steps, state), (second, other_steps, other) = run_ranks(few_labels, 2)
    assert steps == other_steps == 2 * len(first) // 2
    assert differs(state, other) == 0.0
    per_epoch = sorted(node for ids in first[: len(first) // 2] + second[: len(second) // 2] for node in ids)
    assert per_epoch == graph().split("train").tolist()


class Logs(Model):
    """Logs its loss as docs/evaluation.md says, and remembers what it has logged."""

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
    sides = lgd.Partition(torch.zeros(600, dtype=torch.int32).index_fill_(0, seeds[:1], 1), 2)
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
    data = data_of(holding=lgd.Holding(residency, every=2), batch_size=40, loading=lgd.Loading(num_threads=1))
    trainer = trainer_of(world_size, grappa(), max_epochs=6)
    trainer.fit(module, data)
    steps = len(module.seen) // 6
    return [torch.cat([ids for ids, _ in module.seen[e * steps : (e + 1) * steps]]).tolist() for e in range(6)]


@pytest.mark.parametrize("residency", [lgd.Rotate(), pytest.param(lgd.Redeal(30), marks=pytest.mark.slow)], ids=repr)
def test_every_training_node_is_a_seed_once_an_epoch(residency: Any) -> None:
    everyone = graph().split("train").tolist()
    epochs = list(zip(*run_ranks(rotating, 3, residency), strict=True))
    for ranks in epochs:
        assert sorted(node for ids in ranks for node in ids) == everyone
    same = [set(epochs[0][rank]) == set(epochs[2][rank]) for rank in range(3)]
    assert all(same) == isinstance(residency, lgd.Rotate)


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
    ("strategy", "message"), [(lgd.GrappaStrategy, "not say how many it has"), (lgd.LocalSGDStrategy, "with a length")]
)
def test_a_loader_without_a_length_is_refused(strategy: Any, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        run_ranks(endless_loader, 2, strategy)
    assert sorted(error.value.failures) == [0, 1]
