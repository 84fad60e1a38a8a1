"""The data module under Lightning: what ranks train on, and which settings it takes."""

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Evaluation,
    EverySteps,
    Fetch,
    Graph,
    Holding,
    Isolated,
    Loading,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Rotate,
    SuperNodePartitioner,
)
from lightning_gnn_dist.batches.batches import THREAD_NAME
from lightning_gnn_dist.graph.convert import quantize_rows
from tests.data_fitting import fit_with, full_graph_logits, model, small_graph, trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.ranks import RankError, run_ranks
from tests.sage import SAGE
from tests.strategies.fitting import State, differs, state_of

# Training.


def train(rank: int, world_size: int, graph: Graph | str, options: dict[str, Any]) -> tuple[list[Tensor], list[int]]:
    data = PartitionedDataModule(graph, sampler=NeighborSampler([4, 4]), boundary=Isolated(), **options)
    module = model()
    trainer(world_size, LocalSGDStrategy(**PATIENCE)).fit(module, data)
    part = data.part(rank, world_size)
    return module.trained, part.node_arrays["n_id"].tolist()


@pytest.mark.parametrize("partitioner", [RandomPartitioner(), MetisPartitioner()], ids=["random", "metis"])
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


def ddp(rank: int, world_size: int) -> tuple[State, list[Tensor], list[Tensor]]:
    data = PartitionedDataModule(small_graph(), partitioner=MetisPartitioner(), batch_size=8)
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


def test_one_process_without_a_strategy_trains_on_the_whole_graph() -> None:
    graph = small_graph()
    module, data = model(), PartitionedDataModule(graph, sampler=NeighborSampler([4, 4]), batch_size=20)
    trainer(1).fit(module, data)
    first, second = torch.cat(module.trained[:5]), torch.cat(module.trained[5:])
    assert len(module.trained) == 10
    assert sorted(first.tolist()) == sorted(second.tolist()) == graph.split("train").tolist()
    assert first.tolist() != second.tolist()


@pytest.mark.parametrize("form", ["float16", "bfloat16", "int8"])
def test_narrow_features_on_disk_train_as_float32(tmp_path: Path, form: str) -> None:
    graph = small_graph()
    if form == "int8":
        graph.node_arrays["x"], graph.node_arrays["x_scale"] = quantize_rows(graph.node_arrays["x"])
    else:
        graph.node_arrays["x"] = graph.node_arrays["x"].to(getattr(torch, form))
    graph.save(tmp_path / "graph")
    data = PartitionedDataModule(tmp_path / "graph", batch_size=30, evaluation=Evaluation(batch_size=600))
    module = model()
    fit = trainer(1, max_epochs=1)
    fit.fit(module, data)
    assert next(iter(data.correction_batches(0))).x.dtype == torch.float32
    (logits,) = [logits for _, logits in fit.predict(module, data)]
    graph.node_arrays["x"] = next(iter(data.predict_dataloader())).x
    assert torch.allclose(logits, full_graph_logits(module, graph), atol=1e-4)
    narrow = PartitionedDataModule(tmp_path / "graph", batch_size=30, loading=Loading(widen=False))
    assert next(iter(narrow.train_dataloader())).x.dtype == getattr(torch, form)
    assert next(iter(narrow.correction_batches(0))).x.dtype == getattr(torch, form)


def test_overfitting_shows_the_same_batches_in_every_epoch() -> None:
    warnings.filterwarnings("ignore", "You requested to overfit")
    module = model()
    trainer(1, overfit_batches=2, max_epochs=3).fit(module, PartitionedDataModule(small_graph(), batch_size=10))
    first, second = module.trained[:2]
    assert [seeds.tolist() for seeds in module.trained] == [first.tolist(), second.tolist()] * 3


# Baselines.


def scopes(rank: int, world_size: int) -> list[tuple[list[int], set[int], int]]:
    found = []
    for boundary in (Isolated(), Fetch()):
        data = PartitionedDataModule(small_graph(), sampler=NeighborSampler([-1, -1]), batch_size=7, boundary=boundary)
        module = model()
        trainer(world_size, plain_ddp(), max_epochs=1).fit(module, data)
        batches = list(data.train_dataloader())
        everyone = {int(node) for batch in batches for node in batch.n_id}
        found.append((torch.cat(module.trained).tolist(), everyone, sum(batch.num_edges for batch in batches)))
    return found


def test_training_on_the_graph_sees_neighbours_across_the_cut() -> None:
    results = run_ranks(scopes, 2)
    for (mine, near, few), (seeds, far, many) in results:
        assert sorted(mine) == sorted(seeds)
        assert near < far and few < many
    assert sorted(results[0][0][0] + results[1][0][0]) == small_graph().split("train").tolist()


def test_extra_nodes_send_but_are_not_learned_from() -> None:
    graph = small_graph()
    alone: dict[str, Any] = {"partitioner": RandomPartitioner(), "boundary": Isolated()}
    plain = PartitionedDataModule(graph, **alone)
    for options, count in (
        ({"holding": Holding(extra_nodes=0.1)}, 20),
        ({"holding": Holding(extra_nodes=0.1, extra_of="graph")}, 60),
    ):
        more = PartitionedDataModule(graph, **alone, **options)
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
    data = PartitionedDataModule(
        small_graph(),
        partitioner=RandomPartitioner(),
        holding=Holding(Rotate()),
        batch_size=4,
        loading=Loading(num_threads=2),
    )
    module = Stopped(12, 4)
    module.error = error
    strategy = LocalSGDStrategy(EverySteps(100), **PATIENCE) if world_size > 1 else "auto"
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
    warnings.filterwarnings("ignore", "You defined a `validation_step`")
    data = PartitionedDataModule(small_graph())
    trainer(world_size, LocalSGDStrategy(**PATIENCE)).fit(model(), data.train_dataloader())


def test_a_loader_made_without_the_trainer_is_refused() -> None:
    with pytest.raises(RankError, match=r"made for 1 rank, and 2 train.*trainer\.fit\(model, datamodule\)"):
        run_ranks(loader_alone, 2)


def test_a_partitioner_that_cannot_work_fails_on_all_ranks() -> None:
    with pytest.raises(RankError, match="num_supernodes") as error:
        run_ranks(fit_with, 2, small_graph(), {"partitioner": SuperNodePartitioner(10**6)})
    assert set(error.value.failures) == {0, 1}


def test_it_can_be_printed_while_loaders_are_open() -> None:
    data = PartitionedDataModule(small_graph())
    data.train_dataloader()
    assert "num_nodes=600" in str(data) and "MetisPartitioner" in repr(data)
