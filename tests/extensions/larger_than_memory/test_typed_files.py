"""Batches of a typed graph whose rows are read from files are those of the graph in RAM, whatever is held."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor
from torch_geometric.data import HeteroData

from lightning_gnn_dist import (
    Fetch,
    GlobalBatching,
    Graph,
    GrappaStrategy,
    Isolated,
    LinkDataModule,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    ShadowSampler,
    TemporalSampler,
    split_edges,
)
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.extensions.larger_than_memory.files import DiskRows, FileSource
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.base import Sampler
from tests.batch_contents import check_same, contents
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE
from tests.extensions.larger_than_memory.test_rows_in_files import strategy_of
from tests.loaders import over
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

COUNTS = {"author": 150, "paper": 300, "venue": 9, "word": 80}
CITES, WRITES, BACK = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author")
PRINTS, USES = ("venue", "prints", "paper"), ("word", "describes", "paper")
OF_ROWS = {"author": 37, "paper": 2 * 40 + 4 * 15, "venue": 0, "word": 4 * 9}  # bytes that are read of a node
WIDE = sum(OF_ROWS[kind] * count for kind, count in COUNTS.items())
SEEDS = torch.arange(150, 450)  # the papers


@cache
def of_widths() -> Graph:
    """Papers with two wide arrays, one float16, authors in int8 with scales, words with few numbers, venues without."""
    draw, data = torch.Generator().manual_seed(4), HeteroData()
    data["author"].x, data["author"].x_scale = quantize_rows(torch.randn(150, 37, generator=draw))
    data["paper"].x = torch.randn(300, 40, generator=draw).half()
    data["paper"].z = torch.randn(300, 3, 5, generator=draw)
    data["paper"].y, data["paper"].time = torch.arange(300) % 4, torch.randint(30, (300,), generator=draw)
    data["venue"].num_nodes = COUNTS["venue"]
    data["word"].x = torch.randn(80, 9, generator=draw)
    for kind, count in ((CITES, 900), (WRITES, 700), (BACK, 700), (PRINTS, 300), (USES, 600)):
        ends = [torch.randint(COUNTS[end], (count,), generator=draw) for end in kind[::2]]
        data[kind].edge_index = torch.stack([ends[0] ** 2 // COUNTS[kind[0]], ends[1]])
        data[kind].time = torch.randint(30, (count,), generator=draw)
    data[WRITES].edge_attr = torch.randn(700, 9, generator=draw)  # wide, so read from its file
    data[USES].share = torch.rand(600, generator=draw)
    return Graph.from_pyg(data, time="time")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("typed") / "graph"
    of_widths().save(found)
    return found


def passes(source: BatchSource, num_threads: int, seeds: Tensor = SEEDS) -> list[dict[str, Any]]:
    loader = over(source, seeds, 20, seed=1, bulk_size=3, num_threads=num_threads, inputs=seeds + 7)
    unfinished = iter(loader)
    found = [*(next(unfinished) for _ in range(4)), *loader, *loader.stream(7, 43)]
    unfinished.close()
    loader.close()
    return [contents(batch) for batch in found]


SAMPLERS: dict[str, Sampler] = {
    "neighbors": NeighborSampler([4, 3]),
    "all": NeighborSampler([-1, -1]),
    "of types": NeighborSampler({CITES: [4, 0], WRITES: [3, 2], BACK: [0, 2], PRINTS: [1, 1], USES: [0, 3]}),
    "in time": TemporalSampler([4, 3], "time"),
    "latest": TemporalSampler([3, 2], "time", pick="latest"),
    "shadow": ShadowSampler([3, 2], num_hops=2),
}


@pytest.mark.parametrize(
    "cache_bytes", [0, 3000, *(pytest.param(n, marks=pytest.mark.slow) for n in (40_000, WIDE - 1))]
)
@pytest.mark.parametrize("name", ["neighbors", "in time"])
def test_batches_are_those_of_the_graph(folder: Path, name: str, cache_bytes: int) -> None:
    graph, sampler = Graph.open(folder), SAMPLERS[name]
    rows = DiskRows.of(graph, cache_bytes)
    assert rows is not None
    found = passes(FileSource(graph, rows, sampler, Loading()), num_threads=2)
    check_same(found, passes(GraphSource(of_widths(), sampler, all_labels=False), 0))
    assert (rows.cache.hits > 0) == (cache_bytes > 0) and rows.fetched_bytes > 0
    held = {kind: len(table.cache._ids) for kind, table in zip(COUNTS, rows.of_nodes, strict=True)}
    assert sum(held[kind] * OF_ROWS[kind] for kind in COUNTS) <= cache_bytes
    assert held["venue"] == rows.of_nodes[2].cache.asked == 0
    rows.close()


@pytest.mark.parametrize(
    "name", ["of types", "shadow", *(pytest.param(n, marks=pytest.mark.slow) for n in ("all", "latest"))]
)
def test_samplers_draw_what_they_draw_in_ram(folder: Path, name: str) -> None:
    graph, sampler = Graph.open(folder), SAMPLERS[name]
    rows = DiskRows.of(graph, 9000)
    assert rows is not None
    source = FileSource(graph, rows, sampler, Loading())
    expected = passes(GraphSource(of_widths(), sampler, all_labels=False), 0)
    check_same(passes(source, 1), expected)
    rows.close()


# A fit on a typed graph whose rows are read from files is the fit in RAM, on ranks and resumed within a pass.


CACHE = 4000  # bytes: papers have 32 for each in int8, authors 64, words 32, and venues learn theirs
IN_TIME = TemporalSampler([4, 3], "time")


def graph_of_papers() -> Graph:
    data = typed_graph_of_papers().to_pyg()
    del data["venue"].x
    data["venue"].num_nodes = 4
    data["paper"].x, data["paper"].x_scale = quantize_rows(data["paper"].x)
    return Graph.from_pyg(data, time="time")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("typed") / "graph"
    graph_of_papers().save(folder)
    return str(folder)


class LearnsVenues(HeteroSAGE):
    """Venues have rows that are learned."""

    def __init__(self, edge_types: list[EdgeType]) -> None:
        super().__init__(edge_types)
        self.venues = torch.nn.Embedding(4, 4, sparse=True)

    def forward(self, batch: Any) -> Tensor:
        batch["venue"].x = self.venues(batch["venue"].n_id)
        return super().forward(batch)


class Fit:
    """A fit of 12 batches a pass, or half as many on two ranks, and what its data module logs."""

    def __init__(self, where: Graph | str, world_size: int, strategy: str, loading: Loading, **options: Any) -> None:
        pl.seed_everything(0)
        settings: dict[str, Any] = {"boundary": Isolated() if strategy == "llcg" else Fetch(), "batch_size": 20}
        settings["global_batching"] = GlobalBatching(batch_size=40)
        self.data = PartitionedDataModule(where, sampler=options.pop("sampler"), loading=loading, **settings)
        edge_types = (where if isinstance(where, Graph) else Graph.open(where)).types.edge_types
        self.module, self.figures = LearnsVenues(list(edge_types)), dict[str, float]()
        data, figures = self.data, self.figures

        class Figures(pl.Callback):
            def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
                figures.update(data.figures)
                if keeps is not None and trainer.global_step == 5:
                    trainer.save_checkpoint(keeps)

        resumed, keeps = options.pop("ckpt_path", None), options.pop("keeps", None)
        made = GrappaStrategy(**PATIENCE) if strategy == "grappa" else strategy_of(strategy)
        self.trainer = trainer(world_size, made, callbacks=[Figures()], **options)
        self.trainer.fit(self.module, self.data, ckpt_path=resumed)
        self.weights = torch.nn.utils.parameters_to_vector(self.module.parameters()).detach()


@pytest.mark.parametrize(
    "sampler", [pytest.param(NeighborSampler([4, 3]), marks=pytest.mark.slow), IN_TIME], ids=["neighbors", "in time"]
)
def test_a_fit_goes_on_within_a_pass(saved: str, tmp_path: Path, sampler: Sampler) -> None:
    options: dict[str, Any] = {"sampler": sampler, "limit_val_batches": 0}
    expected = Fit(graph_of_papers(), 1, "one", Loading(), max_epochs=2, **options)
    some = Loading(cache_bytes=CACHE, bulk_size=2)
    stopped = Fit(saved, 1, "one", some, max_steps=7, keeps=tmp_path / "last.ckpt", **options)
    assert not stopped.weights.equal(expected.weights)
    resumed = Fit(saved, 1, "one", some, max_epochs=2, ckpt_path=tmp_path / "last.ckpt", **options)
    assert resumed.weights.equal(expected.weights) and resumed.figures["data/fetched_bytes"] > 0
    assert resumed.trainer.global_step == expected.trainer.global_step == 24


@pytest.mark.parametrize("timed", [False, True])
def test_links_are_learned_from_files(tmp_path: Path, timed: bool) -> None:
    how: dict[str, Any] = {"time": "time"} if timed else {}
    split = split_edges(graph_of_papers(), 0.1, 0.1, edge_type=CITES, negatives=3, **how)
    split.save(tmp_path / "split")
    sampler, phases = IN_TIME if timed else NeighborSampler([4, 3]), list[list[dict[str, Any]]]()
    for where, loading in ((split, Loading()), (tmp_path / "split", Loading(cache_bytes=CACHE))):
        data = LinkDataModule(where, sampler=sampler, batch_size=64, loading=loading)
        data.setup("fit")
        phases.append([contents(batch) for batch in (*data.train_dataloader(), *data.val_dataloader())])
        figures = data.figures
        data.teardown("fit")
    check_same(phases[1], phases[0])
    assert figures["data/fetched_bytes"] > 0 and 0 < figures["data/cache_hit_rate"] < 1
