"""Some of many chunks at a time: what is learned from when, and what comes out, against sums by hand."""

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.larger_than_memory.reorder import reorder_graph
from tests import data_fitting
from tests.graph.parted import small_graph, typed_graph_of_widths, uneven_partition
from tests.ranks import run_ranks

CHUNKS = 7
RATE = 0.05


def trainer(devices: int, strategy: Any = "auto", **options: Any) -> pl.Trainer:
    return data_fitting.trainer(devices, strategy, **({"limit_val_batches": 0, "precision": "64-true"} | options))


def graph_in_doubles() -> lgd.Graph:
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    return graph


def assignment(num_nodes: int = 300) -> Tensor:
    """Chunks of very unequal sizes."""
    return torch.rand(num_nodes, generator=torch.Generator().manual_seed(4)).square().mul(CHUNKS).int()


def data_of(path: Path | lgd.Graph, chunks: int = 2, **options: Any) -> lgd.PartitionedDataModule:
    partitioner = lgd.Partition(assignment(), CHUNKS) if isinstance(path, lgd.Graph) else None
    options = {"holding": lgd.Holding(lgd.Sweep(chunks=chunks, of=CHUNKS)), "coverage": None} | options
    options |= {"sampler": lgd.NeighborSampler([-1]), "batch_size": 16, "seed": 3}
    return lgd.PartitionedDataModule(path, partitioner=partitioner, **options)


class OneLayer(pl.LightningModule):
    """A linear layer of a node and of the mean of its neighbours, which remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = torch.nn.Linear(5, 3, bias=False), torch.nn.Linear(5, 3, bias=False)
        torch.nn.init.constant_(self.own.weight, 0.125)
        torch.nn.init.constant_(self.others.weight, -0.125)
        self.seen: list[tuple[list[int], set[int], bool]] = []

    def training_step(self, batch: Any) -> Tensor:
        size = batch.batch_size
        self.seen.append((batch.n_id[:size].tolist(), {*batch.n_id.tolist()}, bool(getattr(batch, "is_filler", False))))
        sums = batch.x.new_zeros(size, 5).index_add_(0, batch.edge_index[1], batch.x[batch.edge_index[0]])
        counts = batch.edge_index[1].bincount(minlength=size).clamp(min=1)
        out = self.own(batch.x[:size]) + self.others(sums / counts[:, None])
        return torch.nn.functional.cross_entropy(out, batch.y[:size])

    def validation_step(self, batch: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def by_hand(graph: lgd.Graph, steps: list[list[tuple[list[int], set[int]]]]) -> tuple[Tensor, Tensor]:
    """Both weights after some steps: in each the seeds of every rank, and the nodes that it holds."""
    own = torch.full((3, 5), 0.125, dtype=torch.float64)
    others = torch.full((3, 5), -0.125, dtype=torch.float64)
    x, y = graph.node_arrays["x"], graph.node_arrays["y"]
    for ranks in steps:
        of_own, of_others, count = torch.zeros_like(own), torch.zeros_like(others), 0
        for seeds, held in ranks:
            for v in seeds:
                row = graph.indices[int(graph.indptr[v]) : int(graph.indptr[v + 1])].tolist()
                inside = [u for u in row if u in held]
                mean = x[inside].mean(0) if inside else torch.zeros(5, dtype=torch.float64)
                error = (own @ x[v] + others @ mean).softmax(0)
                error[y[v]] -= 1
                of_own, of_others, count = of_own + error.outer(x[v]), of_others + error.outer(mean), count + 1
        own, others = own - RATE * of_own / count, others - RATE * of_others / count
    return own, others


def held_in(super_epoch: int, rank: int, world_size: int, chunks: int = 2) -> set[int]:
    """The nodes that a rank holds, by their first ids."""
    own = lgd.Sweep(chunks=chunks, of=CHUNKS).held(super_epoch, rank, world_size, 3).own
    return {v for v, chunk in enumerate(assignment().tolist()) if chunk in own}


def seen_by_turns(seen: list[Any], turns: int) -> list[list[Any]]:
    """What was shown in each super-epoch of two epochs."""
    size = len(seen) // (2 * turns)
    return [seen[i : i + size] for i in range(0, len(seen), size)]


def check_turns(of_ranks: list[list[Any]], turns: int, chunks: int = 2) -> list[list[tuple[list[int], set[int]]]]:
    """Check what ranks were shown in two epochs, and return it step by step."""
    graph, world_size = graph_in_doubles(), len(of_ranks)
    training = sorted(graph.node_arrays["train_mask"].nonzero().view(-1).tolist())
    found: list[list[tuple[list[int], set[int]]]] = [[] for _ in of_ranks[0]]
    for epoch in range(2):
        seeds: list[int] = []
        for rank, seen in enumerate(of_ranks):
            by_turn = seen_by_turns(seen, turns)
            for turn in range(turns):
                held = held_in(epoch * turns + turn, rank, world_size, chunks)
                for step, (batch_seeds, nodes, is_filler) in enumerate(by_turn[epoch * turns + turn]):
                    assert nodes <= held
                    used = [] if is_filler else batch_seeds
                    seeds += used
                    found[(epoch * turns + turn) * len(by_turn[0]) + step].append((used, held))
        assert sorted(seeds) == training  # each once in an epoch
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    graph = graph_in_doubles()
    reorder_graph(graph, lgd.Partition(assignment(), CHUNKS), tmp_path / "graph")
    return tmp_path / "graph"


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(("chunks", "turns"), [(2, 4), (3, 3), (7, 1)])
def test_one_rank_learns_from_each_node_once_in_an_epoch(is_saved: bool, chunks: int, turns: int, path: Path) -> None:
    data, module = data_of(path if is_saved else graph_in_doubles(), chunks), OneLayer()
    trainer(1).fit(module, data)
    assert len(data.train_dataloader()) == len(module.seen) // 2
    steps = check_turns([module.seen], turns, chunks)
    own, others = by_hand(graph_in_doubles(), steps)
    torch.testing.assert_close(module.own.weight.detach(), own, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(module.others.weight.detach(), others, rtol=1e-12, atol=1e-12)
    if turns > 1:
        held = [lgd.Sweep(chunks=chunks, of=CHUNKS).held(s, 0, 1, 3).own for s in range(2 * turns)]
        assert sorted(sum(held[:turns], ())) == sorted(sum(held[turns:], ())) == [*range(CHUNKS)]
        assert held[:turns] != held[turns:]  # dealt anew


def fit_of_ranks(rank: int, world_size: int, path: Path) -> tuple[list[Any], Tensor, Tensor]:
    module = OneLayer()
    trainer(world_size, lgd.GrappaStrategy()).fit(module, data_of(path, chunks=2))
    return module.seen, module.own.weight.detach(), module.others.weight.detach()


def test_two_ranks_learn_from_each_node_once_in_an_epoch(path: Path) -> None:
    found = run_ranks(fit_of_ranks, 2, path)
    steps = check_turns([seen for seen, *_ in found], 2)
    own, others = by_hand(graph_in_doubles(), steps)
    for _, weight, weight_of_others in found:
        torch.testing.assert_close(weight, own, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(weight_of_others, others, rtol=1e-12, atol=1e-12)


class Keeps(pl.Callback):
    """Writes checkpoints in the middle of sweeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step in (5, 15):
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def test_a_fit_goes_on_in_the_middle_of_a_sweep(tmp_path: Path) -> None:
    path, found = tmp_path / "graph", []
    reorder_graph(small_graph(), lgd.Partition(assignment(), CHUNKS), path)
    for stop in (0, 5, 15):
        module = OneLayer()
        fit = trainer(1, callbacks=[] if stop else [Keeps(tmp_path)], precision="32-true")
        start = tmp_path / f"{stop}.ckpt" if stop else None
        fit.fit(module, data_of(path, holding=lgd.Holding(lgd.Sweep(chunks=2))), ckpt_path=start)
        found.append((module.own.weight.detach(), len(module.seen) + stop))
    assert all(steps == found[0][1] and weight.equal(found[0][0]) for weight, steps in found)


def test_a_sweep_goes_on_in_its_own_order_alone(path: Path, tmp_path: Path) -> None:
    trainer(1, callbacks=[Keeps(tmp_path)], max_epochs=1).fit(OneLayer(), data_of(path))
    said = r"checkpoint's epoch 1 ranks go through the chunks in 4 turns, and 1 ranks would in 3, in another order"
    with pytest.raises(ValueError, match=said):
        trainer(1).fit(OneLayer(), data_of(path, chunks=3), ckpt_path=tmp_path / "5.ckpt")
    loader = data_of(path).train_dataloader()
    loader.load_state_dict({"batches_done": 0, "num_ranks": 2, "turns": 2})  # of the end of an epoch
    with pytest.raises(ValueError, match="2 ranks go through the chunks in 2 turns, and 1 ranks would in 4"):
        loader.load_state_dict({"batches_done": 5, "num_ranks": 2, "turns": 2})


def test_a_typed_graph_is_gone_through(tmp_path: Path) -> None:
    graph = typed_graph_of_widths()
    reorder_graph(graph, uneven_partition(graph, 4), tmp_path / "graph")
    data = lgd.PartitionedDataModule(
        tmp_path / "graph",
        holding=lgd.Holding(lgd.Sweep(chunks=2)),
        sampler=lgd.NeighborSampler([-1]),
        batch_size=2,
        seed=0,
    )
    batches = [batch for batch in data.train_dataloader() if not getattr(batch, "is_filler", False)]
    seeds = [batch["paper"].n_id[: batch["paper"].batch_size] for batch in batches]
    expected = graph.types.node_arrays["paper"]["train_mask"].nonzero().view(-1)
    assert torch.cat(seeds).sort().values.equal(expected)


def test_bytes_decide_how_many_are_held(path: Path) -> None:
    graph = lgd.Graph.open(path)
    of_chunk = -(-(graph.num_bytes + 22 * 300) // CHUNKS)
    for room, chunks in ((2, 1), (3, 1), (5, 2), (100, CHUNKS)):
        data = data_of(path, holding=lgd.Holding(lgd.Sweep(bytes=room * of_chunk)))
        assert data.holding.residency == lgd.Sweep(chunks=chunks, of=CHUNKS)
    with pytest.raises(ValueError, match=r"has no room for two of 7 chunks, .* allow more, or cut into more chunks"):
        data_of(path, holding=lgd.Holding(lgd.Sweep(bytes=of_chunk)))


def test_a_sweep_is_counted(path: Path) -> None:
    data = data_of(path)
    for _ in data.train_dataloader():
        pass
    graph = lgd.Graph.open(path)
    found = data.figures
    assert found["data/switches"] == 3 and found["data/sweep_bytes"] == found["data/switch_bytes"]
    least = graph.num_bytes
    assert least <= found["data/sweep_bytes"] < least + 8 * (300 + 4 * CHUNKS)


def test_a_graph_that_is_replaced_is_refused(path: Path, tmp_path: Path) -> None:
    data = data_of(path, loading=lgd.Loading(num_threads=0))
    batches = iter(data.train_dataloader())
    next(batches)
    os.rename(path, tmp_path / "old")
    small_graph(301).save(path)
    with pytest.raises(ValueError, match="holds another graph than when the fit began"):
        list(batches)


def test_what_a_sweep_does_not_go_with_is_refused(path: Path) -> None:
    for boundary in (lgd.Halo(), lgd.Fetch()):
        with pytest.raises(ValueError, match=r"boundary=(Isolated|Fetch)\(\)"):
            data_of(path, boundary=boundary)
    for options in ({"every": 2}, {"extra_nodes": 0.1}):
        with pytest.raises(ValueError, match=f"leave {next(iter(options))} out"):
            lgd.Holding(lgd.Sweep(chunks=2), **options)
    for wrong in ({}, {"bytes": 10**9, "chunks": 2}):
        with pytest.raises(ValueError, match="needs either bytes or chunks"):
            lgd.Sweep(**wrong)
    with pytest.raises(ValueError, match=r"must not exceed of \(4\)"):
        lgd.Sweep(chunks=5, of=4)
    with pytest.raises(ValueError, match="on 4 ranks needs at least 8 chunks"):
        lgd.Sweep(chunks=1, of=7).num_chunks(4)
    with pytest.raises(ValueError, match="leaves numbers open"):
        lgd.Sweep(chunks=2).turns(1)
    split = lgd.split_edges(small_graph(), val=0.1, test=0.1, seed=0)
    with pytest.raises(ValueError, match=r"Sweep\(.*\) is for nodes as seeds"):
        lgd.LinkDataModule(split, holding=lgd.Holding(lgd.Sweep(chunks=2)))
    assert lgd.Holding(lgd.Rotate(), every=2).residency.turns(4) == 1


def test_a_turn_without_training_nodes_is_refused() -> None:
    graph = graph_in_doubles()
    graph.node_arrays["train_mask"] &= assignment() == 0
    with pytest.raises(ValueError, match=r"in super-epoch \d, .* hold more chunks at a time"):
        trainer(1).fit(OneLayer(), data_of(graph))


class Ending(OneLayer):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 2)]


def test_what_a_constant_learning_rate_loses_is_said(path: Path, logged: list[str]) -> None:
    ways: list[tuple[OneLayer, list[Any], int]] = [(OneLayer(), [], 1), (Ending(), [], 0)]
    ways.append((OneLayer(), [EMAWeightAveraging()], 0))
    for module, callbacks, count in ways:
        logged.clear()
        trainer(1, callbacks=callbacks, max_epochs=1).fit(module, data_of(path))
        assert sum("return a schedule that ends at 0" in text for text in logged) == count


def warned(rank: int, world_size: int, path: Path, chunks: int) -> bool:
    handler, said = logging.Handler(), list[str]()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    trainer(world_size, lgd.GrappaStrategy(), max_epochs=1).fit(OneLayer(), data_of(path, chunks))
    return any("A sweep ends with" in text for text in said)


def test_ranks_that_hold_all_chunks_hear_nothing_of_sweeps(path: Path) -> None:
    assert run_ranks(warned, 2, path, 2) == [True, False]
    assert run_ranks(warned, 2, path, 4) == [False, False]
