"""The data module under Lightning: what ranks train on, and which settings it takes."""

import threading
import warnings
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.batches import THREAD_NAME
from lightning_gnn_dist.homes.run import warn_of_slow_bfloat16
from tests.data_fitting import fit_with, full_graph_logits, model, small_graph, trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.placing import most_seeds, placed
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of

# Training.


def train(rank: int, world_size: int, graph: lgd.Graph, options: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([4, 4]), boundary=lgd.Isolated(), **options)
    if rank == 1:  # a look before the fit changes nothing
        data.setup("fit")
        next(iter(data.train_dataloader()))
    module = model()
    trainer(world_size, lgd.LocalSGDStrategy(**PATIENCE)).fit(module, data)
    part = data.part(rank, world_size)
    return module.trained, part.node_arrays["n_id"].tolist()


@pytest.mark.parametrize("partitioner", [lgd.RandomPartitioner(), lgd.MetisPartitioner()], ids=["random", "metis"])
def test_every_training_node_is_a_seed_once_a_pass_on_its_own_rank(partitioner: Any) -> None:
    graph = small_graph()
    results = run_ranks(train, 3, graph, {"partitioner": partitioner, "batch_size": 7})
    batches = {len(trained) for trained, _ in results}
    assert len(batches) == 1
    count = batches.pop() // 2
    assert sorted(node for _, nodes in results for node in nodes) == list(range(600))
    for first, last in ((0, count), (count, 2 * count)):
        seeds = [torch.cat(trained[first:last]).tolist() for trained, _ in results]
        assert sorted(node for own in seeds for node in own) == graph.split("train").tolist()
        for own, (_, nodes) in zip(seeds, results, strict=True):
            assert set(own) <= set(nodes)
    assert results[0][0][0].tolist() != results[0][0][count].tolist()  # another order in every pass
    assert max(len(seeds) for trained, _ in results for seeds in trained) <= 7


class Locked(lgd.PartitionedDataModule):
    def __init__(self, graph: lgd.Graph) -> None:
        super().__init__(graph, batch_size=64)
        self.lock = threading.Lock()

    @cached_property
    def drawn(self) -> Tensor:
        return torch.rand(3)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "lock"}


def test_what_a_class_of_ones_own_has_stays_after_a_fit() -> None:
    data = Locked(small_graph())
    lock, drawn = data.lock, data.drawn
    for _ in range(2):
        trainer(1, max_epochs=1).fit(model(), data)
    assert data.lock is lock and data.drawn is drawn


def ddp(rank: int, world_size: int) -> tuple[State, list[Tensor], list[Tensor]]:
    data = lgd.PartitionedDataModule(small_graph(), partitioner=lgd.MetisPartitioner(), batch_size=8)
    module = model()
    trainer(world_size, plain_ddp(), reload_dataloaders_every_n_epochs=1).fit(module, data)
    count = len(module.trained) // 2
    return state_of(module), module.trained[:count], module.trained[count:]


def test_ddp_takes_it_too_and_lightning_injects_no_sampler() -> None:
    (first, *one), (second, *two) = run_ranks(ddp, 2)
    assert differs(first, second) == 0.0
    everyone = small_graph().split("train").tolist()
    for mine, yours in zip(one, two, strict=True):
        assert len(mine) == len(yours)
        assert sorted(torch.cat([*mine, *yours]).tolist()) == everyone
    assert one[0][0].tolist() != one[1][0].tolist()


@pytest.mark.parametrize("form", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_features_on_disk_train_as_float32(tmp_path: Path, form: torch.dtype) -> None:
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].to(form)
    graph.save(tmp_path / "graph")
    data = lgd.PartitionedDataModule(tmp_path / "graph", batch_size=30, evaluation=lgd.Evaluation(batch_size=600))
    module = model()
    fit = trainer(1, max_epochs=1)
    fit.fit(module, data)
    (logits,) = [logits for _, logits in fit.predict(module, data)]
    graph.node_arrays["x"] = next(iter(data.predict_dataloader())).x
    assert torch.allclose(logits, full_graph_logits(module, graph), atol=1e-4)


def test_overfitting_shows_the_same_batches_in_every_epoch() -> None:
    warnings.filterwarnings("ignore", "You requested to overfit")
    module = model()
    trainer(1, overfit_batches=2, max_epochs=3).fit(module, lgd.PartitionedDataModule(small_graph(), batch_size=10))
    first, second = module.trained[:2]
    assert [seeds.tolist() for seeds in module.trained] == [first.tolist(), second.tolist()] * 3


# Baselines.


def test_extra_nodes_send_but_are_not_learned_from() -> None:
    graph = small_graph()
    alone: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "boundary": lgd.Isolated()}
    plain = lgd.PartitionedDataModule(graph, **alone)
    for options, count in (
        ({"holding": lgd.Holding(extra_nodes=0.1)}, 20),
        ({"holding": lgd.Holding(extra_nodes=0.1, extra_of="graph")}, 60),
    ):
        more = lgd.PartitionedDataModule(graph, **alone, **options)
        for rank in range(3):
            small, large = plain.part(rank, 3), more.part(rank, 3)
            assert large.num_nodes == small.num_nodes + count and large.num_edges > small.num_edges
            own = small.node_arrays["n_id"].tolist()
            assert large.node_arrays["n_id"].tolist()[: len(own)] == own
            seeds = [data.node_arrays["n_id"][data.split("train")].tolist() for data in (small, large)]
            assert seeds[0] == seeds[1]
    assert int(graph.node_arrays["train_mask"].sum()) == 90


# Refusals, and what is left behind.


class Stopped(SAGE):
    """Raises in its fourth step."""

    error: type[BaseException] = ValueError

    def training_step(self, batch: Any) -> Tensor:
        if len(self.trained) == 3:
            raise self.error
        return super().training_step(batch)


def threads_after(rank: int, world_size: int, error: type[BaseException]) -> tuple[str, list[str]]:
    before = threading.enumerate()  # of data modules that no test holds any more, and nobody has collected
    holding, loading = lgd.Holding(lgd.Rotate()), lgd.Loading(num_threads=2)
    cut: dict[str, Any] = {"partitioner": lgd.RandomPartitioner(), "holding": holding}
    data = lgd.PartitionedDataModule(small_graph(), **cut, batch_size=4, loading=loading)
    module = Stopped(12, 4)
    module.error = error
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(100), **PATIENCE) if world_size > 1 else "auto"
    raised = ""
    try:
        trainer(world_size, strategy).fit(module, data)
    except BaseException as caught:
        raised = type(caught).__name__
    left = [thread for thread in threading.enumerate() if thread not in before]
    return raised, [thread.name for thread in left if thread.name.startswith(THREAD_NAME)]


@pytest.mark.parametrize(("error", "name"), [(ValueError, "ValueError"), (KeyboardInterrupt, "SystemExit")])
def test_no_thread_outlives_an_exception_or_ctrl_c(error: type[BaseException], name: str) -> None:
    assert threads_after(0, 1, error) == (name, [])
    if error is ValueError:  # Lightning ends a rank that is interrupted by a signal to itself
        assert run_ranks(threads_after, 2, error) == [(name, [])] * 2


def loader_alone(rank: int, world_size: int) -> None:
    data = lgd.PartitionedDataModule(small_graph())
    trainer(world_size, lgd.LocalSGDStrategy(**PATIENCE)).fit(model(), data.train_dataloader())


def test_a_loader_made_without_the_trainer_is_refused() -> None:
    with pytest.raises(RankError, match=r"made for 1 rank, and 2 train.*trainer\.fit\(model, datamodule\)"):
        run_ranks(loader_alone, 2)


def test_it_can_be_printed_while_loaders_are_open() -> None:
    data = lgd.PartitionedDataModule(small_graph())
    data.train_dataloader()
    assert "num_nodes=600" in str(data) and "MetisPartitioner" in repr(data)


# Evaluation.


def evaluate(rank: int, world_size: int, graph: lgd.Graph, sampler: Any) -> list[Any]:
    """What a rank validates, tests and predicts: metrics, ids and rows."""
    data = lgd.PartitionedDataModule(graph, evaluation=lgd.Evaluation(batch_size=50), sampler=sampler)
    run = trainer(world_size, lgd.LocalSGDStrategy(**PATIENCE) if world_size > 1 else "auto")
    found: list[Any] = []
    for judge in (run.validate, run.test):
        module = model()
        (metrics,) = judge(module, data, verbose=False)
        found.append((metrics, *map(torch.cat, zip(*module.evaluated, strict=True))))
    return [*found, ({}, *map(torch.cat, zip(*run.predict(module, data), strict=True)))]


@pytest.mark.parametrize(
    ("world_size", "sampler"),
    [(1, lgd.WholePartSampler(2)), (3, lgd.NeighborSampler([3, 3])), (3, lgd.WholePartSampler(2))],
)
def test_evaluation_and_predictions_are_full_graph_inference(world_size: int, sampler: Any) -> None:
    graph = small_graph()
    expected, y = full_graph_logits(model(), graph), graph.node_arrays["y"]
    of_ranks = run_ranks(evaluate, world_size, graph, sampler)
    splits = graph.split("val"), graph.split("test"), torch.arange(600)
    for nodes, found in zip(splits, zip(*of_ranks, strict=True), strict=True):
        seen, logits = (torch.cat([rank[piece] for rank in found]) for piece in (1, 2))
        assert seen.sort().values.equal(nodes) and (logits - expected[seen]).abs().max() < 1e-5
        accuracy = float((expected[nodes].argmax(1) == y[nodes]).float().mean())
        loss = float(torch.nn.functional.cross_entropy(expected[nodes], y[nodes]))
        for metrics, *_ in found[: 0 if nodes is splits[2] else None]:
            assert metrics == pytest.approx({"accuracy": accuracy, "loss": loss}, abs=1e-5)
    assert seen.equal(splits[2])  # predictions are in order


def test_a_limit_counts_batches_of_the_training_size() -> None:
    graph = small_graph()
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([3, 3]), batch_size=16)
    half = -(-graph.split("test").numel() // 16) // 2
    for limit, value, asked in (
        ("limit_test_batches", 0.5, half),
        ("limit_test_batches", 3, 3),
        ("fast_dev_run", 1, 1),
    ):
        trainer(1, **{limit: value}).test(module := model(), data, verbose=False)
        assert [len(nodes) <= 16 for nodes, _ in module.evaluated] == [True] * asked
    trainer(1).test(module := model(), data, verbose=False)
    assert len(module.evaluated) == 1  # all of it at once


# Refusals.


OTHERS = (torch.arange(600) % 2).int()
REFUSED: list[tuple[lgd.Graph, Any, str]] = [
    (small_graph(), lgd.SuperNodePartitioner(10**6), "num_supernodes"),
    (small_graph(), lgd.Partition(OTHERS * 0, 1), "The partition has 1 parts of 600 nodes in all, but 2 ranks hold 2"),
    (small_graph(), lgd.Partition(OTHERS, 2), r'The chunks of rank 1 of 2 hold none of the .*balance="train"'),
]
REFUSED[2][0].node_arrays["train_mask"] &= OTHERS == 0


@pytest.mark.parametrize(("graph", "partitioner", "message"), REFUSED)
def test_parts_that_cannot_be_are_refused_on_all_ranks(graph: lgd.Graph, partitioner: Any, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        run_ranks(fit_with, 2, graph, {"partitioner": partitioner})
    assert set(error.value.failures) == {0, 1}


def in_rounds(rank: int, world_size: int) -> list[list[int]]:
    """The seeds of each pass, where every pass has parts of its own and a round ends in the middle of one."""
    module = model()
    data = lgd.PartitionedDataModule(small_graph(), batch_size=10, holding=lgd.Holding(lgd.Redeal(24), every=1))
    length = -(-most_seeds(data, world_size) // 10)
    trainer(world_size, lgd.LocalSGDStrategy(lgd.EverySteps(3), **PATIENCE), max_epochs=length).fit(module, data)
    passes = [torch.cat(module.trained[at : at + length]).tolist() for at in range(0, 3 * length, length)]
    return passes


def test_parts_that_change_suit_rounds_too() -> None:
    everyone = small_graph().split("train").tolist()
    passes = list(zip(*run_ranks(in_rounds, 2), strict=True))
    assert [sorted(first + second) for first, second in passes] == [everyone] * 3
    assert set(passes[0][0]) != set(passes[1][0])


def redealt(rank: int, world_size: int, options: dict[str, Any]) -> int:
    """Labels in four of eight chunks: the first deal that gives one rank none of them is that of super-epoch 26."""
    graph = small_graph()
    chunks = lgd.Partition((torch.arange(600) // 75).int(), 8)
    graph.node_arrays["train_mask"] = (torch.arange(600) < 300) & (torch.arange(600) % 15 == 0)
    holding = lgd.Holding(lgd.Redeal(8), every=1)
    data = lgd.PartitionedDataModule(graph, partitioner=chunks, holding=holding, batch_size=4)
    ours = trainer(world_size, lgd.GrappaStrategy(**PATIENCE), limit_val_batches=0, **options)
    module = model()
    ours.fit(module, data)
    return len(module.trained)


@pytest.mark.parametrize("options", [{"max_epochs": 30}, {"max_epochs": -1, "max_steps": 200}, {"max_epochs": -1}])
def test_a_deal_without_training_nodes_is_refused_before_the_run(options: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="none of the 20 training nodes in super-epoch 26") as error:
        run_ranks(redealt, 2, options)
    assert set(error.value.failures) == {0, 1}
    assert "setup" in str(error.value)


def test_the_length_of_a_super_epoch_survives_in_a_checkpoint() -> None:
    data = lgd.PartitionedDataModule(small_graph(), holding=lgd.Holding(lgd.Rotate()))
    data.trainer = trainer(1, max_epochs=30)
    placed(data, 0, 4)
    assert data.state_dict() == {"seed": 0, "repartition_every": 10}
    data.trainer.fit_loop.max_epochs = 300  # resumed for longer
    data.load_state_dict({"repartition_every": 10})
    assert data._home.every() == 10
    chosen = lgd.PartitionedDataModule(small_graph(), holding=lgd.Holding(lgd.Rotate(), every=2))
    chosen.load_state_dict({"repartition_every": 10})
    placed(chosen, 0, 4)
    assert chosen._home.every() == 2


def test_a_graph_without_training_nodes_or_the_split_says_so() -> None:
    graph = small_graph()
    del graph.node_arrays["val_mask"]
    with pytest.raises(ValueError, match=r"The graph has no val_mask \(it has: \['test_mask', 'train_mask'\]\)"):
        trainer(1).validate(model(), lgd.PartitionedDataModule(graph), verbose=False)
    graph.node_arrays["train_mask"].zero_()
    with pytest.raises(ValueError, match="train_mask marks no node"):
        lgd.PartitionedDataModule(graph).train_dataloader()


def test_the_ranks_own_what_their_parts_learn_from() -> None:
    holding = lgd.Holding(lgd.Redeal(10))
    data = lgd.PartitionedDataModule(lgd.communities(300, 4), holding=holding, boundary=lgd.Isolated())
    ranks = data.parts_of_ranks(3)
    for rank in range(3):
        assert ranks.nodes(rank).tolist() == data.part(rank, 3).node_arrays["n_id"].sort().values.tolist()


@pytest.mark.parametrize(("size", "lines"), [(10_000, 1), (8, 0)])
def test_a_batch_size_above_the_training_nodes_is_told(size: int, lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("lightning_gnn_dist.data.datamodule.rank_zero_info", told.append)
    trainer(1, limit_val_batches=0).fit(model(), lgd.PartitionedDataModule(small_graph(), batch_size=size))
    assert len(told) == lines and all("a pass is one batch" in line for line in told)
    assert all(line.startswith("batch_size=10000 is above a rank's ") for line in told)


# With a precision that ends in "-true" batches come in the type that the model computes in, and its layers run.


GRAPH = lgd.communities(300, 3, num_features=8)


NARROW = {"bf16": torch.bfloat16, "16": torch.float16}


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed", "bf16-true", "16-true"])
@pytest.mark.parametrize("widen", ["auto", True, False])
@pytest.mark.parametrize("sampler", [lgd.NeighborSampler([4, 3]), lgd.WholePartSampler(2)], ids=repr)
def test_what_a_step_computes_in_is_not_widened(precision: Any, widen: Any, stored: torch.dtype, sampler: Any) -> None:
    graph = stored_as(stored)
    graph.edge_arrays["edge_weight"] = torch.ones(graph.num_edges)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=50, loading=lgd.Loading(widen=widen))
    data.trainer = trainer(1, precision=precision)
    of_step = NARROW.get(precision.split("-")[0])
    stays = widen is False or (widen == "auto" and stored == of_step)
    of_model = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}.get(precision)
    loaders: list[Any] = [data.train_dataloader(), data.predict_dataloader(), data.correction_batches(0)]
    for loader in loaders:
        batch = next(iter(loader))
        assert batch.x.dtype == of_model or (stored if stays else torch.float32)
        assert batch.blocks[0].adj.dtype == batch.x.dtype
        assert batch.blocks[-1].weighted_adj.dtype == batch.x.dtype
        assert batch.edge_weight.dtype == (of_model or torch.float32)
        assert batch.x.equal(graph.node_arrays["x"][batch.n_id].to(batch.x.dtype))
        assert batch.target.dtype == batch.x.dtype
        assert batch.bytes.dtype == torch.int8
        assert batch.y.dtype == (of_model or (stored if widen is False else torch.float32)), "labels are widened"
    data.teardown("fit")


def stored_as(dtype: torch.dtype) -> lgd.Graph:
    """Features, labels and another array of a narrow type, and an array of bytes."""
    x, y = GRAPH.node_arrays["x"].to(dtype), GRAPH.node_arrays["y"].to(dtype)
    arrays = {**GRAPH.node_arrays, "x": x, "y": y, "target": x[:, :2], "bytes": x.to(torch.int8)}
    return lgd.Graph(GRAPH.indptr, GRAPH.indices, arrays)


def trained(precision: Any, widen: Any = "auto", **options: Any) -> SAGE:
    arrays = GRAPH.node_arrays | {"x": GRAPH.node_arrays["x"].bfloat16()}
    graph = lgd.Graph(GRAPH.indptr, GRAPH.indices, arrays)
    sampler, loading = lgd.NeighborSampler([4, 3]), lgd.Loading(widen=widen)
    torch.manual_seed(0)
    module = SAGE(8, 3, **options)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, batch_size=50, loading=loading)
    trainer(1, precision=precision).fit(module, data)
    return module


def test_kept_features_train_like_widened_ones_in_mixed_precision() -> None:
    kept, widened = (trained("bf16-mixed", widen=widen) for widen in ("auto", True))
    for one, other in zip(kept.parameters(), widened.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0.02)
    assert all(weight.isfinite().all() for weight in trained("bf16-true", blocks=False).parameters())


def test_a_processor_without_bfloat16_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Any = SimpleNamespace(strategy=SimpleNamespace())
    for precision, device, features, warned in (
        ("bf16-mixed", "cpu", {"avx2": True, "avx512bf16": False, "amx-bf16": False}, True),
        ("bf16-true", "cpu", {"avx2": True}, True),
        ("bf16-mixed", "cpu", {"avx2": True, "avx512bf16": True}, False),
        ("bf16-mixed", "cpu", {"amx-bf16": True}, False),
        ("bf16-true", "cpu", {"neon": True, "bf16": True}, False),
        ("bf16-mixed", "cpu", {}, False),  # not known
        ("32-true", "cpu", {"avx2": True}, False),
        ("64-true", "cpu", {"avx2": True}, False),
        ("bf16-mixed", "cuda", {"avx2": True}, False),
        ("bf16-mixed", "mps", {"avx2": True}, False),
    ):
        monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda features=features: features)
        known.precision, known.strategy.root_device = precision, torch.device(device)
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            warn_of_slow_bfloat16(known)
        assert len(given) == warned
        assert all(f'precision="{precision}" is slower than "32-true"' in str(each.message) for each in given)


def test_a_fit_tells_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx2": True})
    with pytest.warns(UserWarning, match='Use precision="32-true", and keep the features alone in bfloat16'):
        trained("bf16-mixed")
