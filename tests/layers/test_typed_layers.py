"""Layers of a graph with types, one after the other for all nodes, give the rows of one forward of the whole graph."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.data_fitting import trainer
from tests.layers.typed_model import ByLayers, some_data
from tests.ranks import RankError, run_ranks

CLOSE: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
DATA = some_data()
EXACT: dict[str, Any] = {"precision": "64-true"}


def graph_of(data: Any = DATA) -> lgd.Graph:
    return lgd.Graph.from_pyg(data)


def model(num_layers: int = 2, kind: type[ByLayers] = ByLayers) -> Any:
    return kind(DATA.edge_types, num_layers).eval()


@pytest.mark.parametrize(
    "sampler", [lgd.NeighborSampler([-1, -1]), lgd.NeighborSampler([3, 2]), lgd.WholePartSampler(2)], ids=str
)
def test_rows_of_a_batch_are_those_of_its_edges(sampler: Any) -> None:
    data, module = lgd.PartitionedDataModule(graph_of(), sampler=sampler, batch_size=40, seed=0), model()
    data.setup("fit")
    for batch in data.train_dataloader():
        expected = module.whole(batch)["paper"][: batch.batch_size]
        torch.testing.assert_close(module(batch), expected, **CLOSE)
        if sampler != lgd.NeighborSampler([3, 2]):
            torch.testing.assert_close(expected, module.whole(DATA)["paper"][batch["paper"].n_id][: len(expected)])
    inner, last = module.called[-2:]
    assert inner["author"] > last["author"] == 0 and last["paper"] <= 40


def test_rows_of_a_whole_graph_of_pyg_are_by_type() -> None:
    found, expected = lgd.through_layers(model(), DATA), model().whole(DATA)
    assert found.keys() == expected.keys()
    for kind, rows in expected.items():
        torch.testing.assert_close(found[kind], rows, **CLOSE)


def evaluated(rank: int, world_size: int, where: Any, folder: Path) -> tuple[float, list[dict[str, int]]]:
    data = lgd.PartitionedDataModule(where, sampler=lgd.NeighborSampler([4, 4]), batch_size=15, seed=0)
    module, run = model(), trainer(world_size, **EXACT)
    (metrics,) = run.test(module, data, verbose=False)
    called = list(module.called)
    writer = trainer(world_size, callbacks=[lgd.PredictionWriter(folder / "rows.npy", overwrite=True)], **EXACT)
    writer.predict(module, data, return_predictions=False)
    return metrics["test_loss"], called


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_evaluation_computes_each_layer_once(num_ranks: int, tmp_path: Path) -> None:
    check_evaluation(num_ranks, graph_of(), tmp_path, DATA["paper"].test_mask.nonzero().view(-1))


def check_evaluation(num_ranks: int, where: Any, folder: Path, order: Tensor) -> None:
    """``order`` has the tested papers in the order of the file's rows."""
    papers, expected = DATA["paper"], model().whole(DATA)["paper"].detach()
    loss = F.cross_entropy(expected[papers.test_mask], papers.y[papers.test_mask], reduction="sum")
    for found, called in run_ranks(evaluated, num_ranks, where, folder):
        assert found == pytest.approx(float(loss), rel=1e-6)  # Lightning keeps 32 bits
        assert len(called) <= 3  # one look before the two layers, of all of this rank's seeds together
    rows = torch.from_numpy(np.load(folder / "rows.npy"))
    torch.testing.assert_close(rows[: len(order)] if len(rows) == len(order) else rows[order], expected[order], **CLOSE)


def test_evaluation_batches_may_be_read_all_the_same() -> None:
    seen = list[Any]()

    class Reads(ByLayers):
        def test_step(self, batch: Any, batch_idx: int) -> None:
            first = self(batch)
            assert batch["paper"].y[: batch.batch_size].shape == (batch.batch_size,)
            kept = dict(batch.x_dict), dict(batch.edge_index_dict)
            torch.testing.assert_close(self.whole(batch)["paper"][: batch.batch_size], first, **CLOSE)
            seen.append(({kind: len(x) for kind, x in kept[0].items()}, batch["author"].num_nodes, batch.blocks))

    data = lgd.PartitionedDataModule(graph_of(), sampler=lgd.NeighborSampler([2, 2]), batch_size=10, seed=0)
    trainer(1, **EXACT).test(Reads(DATA.edge_types).eval(), data, verbose=False)
    assert seen and all(sizes["author"] == number and len(blocks) == 2 for sizes, number, blocks in seen)


class Wrong(ByLayers):
    def __init__(self, returns: Any) -> None:
        super().__init__(DATA.edge_types)
        self.returns = returns

    def layers(self) -> Any:
        return [super().layers()[0], lambda batch: self.returns]


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        (torch.zeros(3, 2), r"Layer 1 of layers\(\) must return a dict from node types, .*'paper'.* returned Tensor"),
        ({"pager": torch.zeros(3)}, "returned one with .*pager"),
        ({"paper": torch.zeros(3, 2)}, r"returned a tensor of \(3, 2\) for a batch of 40 nodes of type 'paper'"),
        ({}, r"Layer 1 of layers\(\) returned no rows of any type"),
        ({"author": torch.zeros(90, 2)}, r"last layer of layers\(\) returned no rows of the seeds' type, 'paper'"),
    ],
)
def test_what_is_no_dict_of_rows_is_refused(returns: Any, message: str) -> None:
    data = lgd.PartitionedDataModule(graph_of(), sampler=lgd.NeighborSampler([2, 2]), batch_size=40, seed=0)
    data.setup("fit")
    with pytest.raises((TypeError, ValueError), match=message):
        Wrong(returns)(next(iter(data.train_dataloader())))


def test_what_a_layer_says_is_not_taken_for_an_error_of_labels() -> None:
    data = lgd.PartitionedDataModule(graph_of(), sampler=lgd.NeighborSampler([2, 2]), batch_size=40, seed=0)
    run = trainer(1, max_epochs=1, limit_val_batches=0, **EXACT)
    with pytest.raises(TypeError, match=r"^Layer 1 of layers\(\) returned a tensor"):
        run.fit(Wrong({"paper": torch.zeros(3, 2)}), data)


class Filters(ByLayers):
    """Returns no rows of a type of which its batch has no node to compute."""

    def layers(self) -> Any:
        def some(layer: Any, batch: Any) -> dict[str, Tensor]:
            return {kind: rows for kind, rows in layer(batch).items() if batch[kind].batch_size}

        return [partial(some, layer) for layer in super().layers()]


class Forgets(ByLayers):
    """Returns no rows of words on rank 1."""

    def layers(self) -> Any:
        first, last = super().layers()
        kept = [kind for kind in DATA.node_types if kind != "word" or self.trainer.global_rank == 0]
        return [lambda batch: {kind: rows for kind, rows in first(batch).items() if kind in kept}, last]


class Widens(ByLayers):
    """Returns wider rows on rank 1."""

    def layers(self) -> Any:
        first, last = super().layers()
        times = 1 + self.trainer.global_rank
        return [lambda batch: {kind: rows.repeat(1, times) for kind, rows in first(batch).items()}, last]


def test_types_that_the_sampler_leaves_out_are_left_out_of_evaluations(tmp_path: Path) -> None:
    left = {kind: [0, 0] if kind[1] == "cites" else [-1, -1] for kind in DATA.edge_types}
    data, cut = DATA.clone(), torch.empty((2, 0), dtype=torch.int64)
    data["paper", "cites", "paper"].edge_index = cut
    papers, expected = DATA["paper"], model().whole(data)["paper"].detach()
    loss = F.cross_entropy(expected[papers.test_mask], papers.y[papers.test_mask], reduction="sum")
    for evaluation in (lgd.Evaluation(), lgd.Evaluation(batch_size=7)):
        parts = lgd.PartitionedDataModule(graph_of(), sampler=lgd.NeighborSampler(left), evaluation=evaluation, seed=0)
        (metrics,) = trainer(1, **EXACT).test(model(), parts, verbose=False)
        assert metrics["test_loss"] == pytest.approx(float(loss), rel=1e-6)


def judged(rank: int, world_size: int, kind: type[ByLayers], folder: Path) -> None:
    data = lgd.PartitionedDataModule(graph_of(), sampler=lgd.NeighborSampler([4, 4]), batch_size=15, seed=0)
    writer = lgd.PredictionWriter(folder / "rows.npy")
    trainer(world_size, callbacks=[writer], **EXACT).predict(model(2, kind), data, return_predictions=False)


def test_no_rows_and_none_to_return_are_alike(tmp_path: Path) -> None:
    run_ranks(judged, 2, Filters, tmp_path)
    rows = torch.from_numpy(np.load(tmp_path / "rows.npy"))
    torch.testing.assert_close(rows, model().whole(DATA)["paper"].detach(), **CLOSE)


WRONG = [(Forgets, "rows of a type on some ranks"), (Widens, "rows of another type or shape on rank 0")]


@pytest.mark.parametrize(("kind", "message"), WRONG)
def test_ranks_that_return_other_rows_are_told_of_it(kind: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=rf"Layer 0 of layers\(\) returned {message}"):
        run_ranks(judged, 2, kind, tmp_path)
