"""An evaluation of a graph larger than what is free reads rows from its files ahead, and gives the same rows."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import Graph, LinkDataModule, Loading, NeighborSampler, PartitionedDataModule, split_edges
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.extensions.larger_than_memory import sources
from lightning_gnn_dist.extensions.larger_than_memory.files import FileSource
from lightning_gnn_dist.layers import budget
from tests.data_fitting import trainer
from tests.extensions.inductive.test_inductive import Net, whole
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

SAMPLER = NeighborSampler([3, 3])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    whole().save(tmp_path / "graph")
    return tmp_path / "graph"


def has_free(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "free_bytes", lambda: num_bytes)


def source_of(data: Any) -> Any:
    return data.test_dataloader().learning(0).source


def data_of(graph: Path | Graph, **options: Any) -> PartitionedDataModule:
    return PartitionedDataModule(graph, sampler=SAMPLER, batch_size=16, **options)


def test_what_is_free_decides(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = Graph.open(path).num_bytes
    has_free(size, monkeypatch)
    assert isinstance(source_of(data_of(path)), GraphSource)
    has_free(size - 1, monkeypatch)
    data = data_of(path)
    loader = data.test_dataloader()
    assert isinstance(loader.learning(0).source, FileSource) and loader._bulk_size == 1
    assert data._home._evaluation.rows.cache.num_bytes == (size - 1) // 8  # type: ignore[attr-defined]
    given = data_of(path, loading=Loading(cache_bytes=100))
    assert isinstance(source_of(given), FileSource)
    assert given._home._sources.rows.cache.num_bytes == 100  # type: ignore[attr-defined]
    assert isinstance(source_of(data_of(whole())), GraphSource)  # in RAM


def test_it_is_said_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(sources, "rank_zero_info", told.append)
    has_free(1 << 14, monkeypatch)
    trainer(1).test(Net("SAGE"), data_of(path), verbose=False)
    said = [text for text in told if "reads rows from its files ahead" in text]
    assert len(said) == 1 and "16.4 kB are free" in said[0] and "2.0 kB hold those that come again" in said[0]


def predicted(module: Any, data: Any) -> Tensor:
    return torch.cat(trainer(1).predict(module, data))  # type: ignore[arg-type]


@pytest.mark.parametrize("free", [1 << 14, 1 << 12])
def test_rows_are_the_same_to_the_bit(free: int, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = typed_graph_of_papers(200)
    types.save(tmp_path / "typed")
    torch.manual_seed(0)
    for module, graph in ((Net("GAT"), path), (HeteroSAGE(list(types.types.edge_types)), tmp_path / "typed")):
        rows = []
        for there in (1 << 40, free):
            has_free(there, monkeypatch)
            rows.append(predicted(module, data_of(graph, seed=0)))
        assert rows[0].equal(rows[1])


def test_a_fit_validates_and_goes_on_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for free in (1 << 40, 1 << 14):
        has_free(free, monkeypatch)
        module, run = Net("SAGE"), trainer(1, max_epochs=2)
        data = data_of(path, seed=0)
        run.fit(module, data)
        found.append((run.callback_metrics["val"], module.first.lin_l.weight.detach()))
    assert found[0][0] == found[1][0] and found[0][1].equal(found[1][1])


def test_held_links_are_judged_the_same_way(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split_edges(Graph.open(path)).save(tmp_path / "split")
    has_free(1 << 12, monkeypatch)
    assert isinstance(source_of(LinkDataModule(tmp_path / "split", sampler=SAMPLER)), FileSource)
