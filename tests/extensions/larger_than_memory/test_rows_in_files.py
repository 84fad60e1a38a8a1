"""A fit on a graph whose rows are read from files ahead is the fit in RAM, and leaves nothing, however it ends."""

import os
import signal
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch_geometric.data import HeteroData

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import BatchSource, GraphSource
from lightning_gnn_dist.extensions.larger_than_memory.files import DiskRows, FileSource
from lightning_gnn_dist.graph.typed.types import EdgeType
from lightning_gnn_dist.sampling.base import Sampler
from tests.batch_contents import check_same, contents
from tests.data.test_settings import check_copies
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.graph.typed.graphs import small
from tests.loaders import over
from tests.ranks import run_ranks
from tests.sage import Ending
from tests.slow import slow
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

SAMPLER = lgd.NeighborSampler([4, 3])
CACHE = 5000  # bytes, of 32,000


def strategy_of(name: str) -> Strategy:
    if name == "llcg":
        return lgd.LLCGStrategy(lgd.EverySteps(3), correction=lgd.Correction(2), drift=lgd.Drift("global"), **PATIENCE)
    return plain_ddp() if name == "ddp" else SingleDeviceStrategy(torch.device("cpu"))


def fit(
    graph: lgd.Graph | str, world_size: int, strategy: str, loading: lgd.Loading, how: str = "", **options: Any
) -> tuple[list[Tensor], dict[str, float], str]:
    """The weights, what the data module logs, and what was raised."""
    pl.seed_everything(0)
    data = lgd.PartitionedDataModule(
        graph,
        sampler=SAMPLER,
        batch_size=20,
        loading=loading,
        boundary=lgd.Isolated() if strategy == "llcg" else lgd.Fetch(),
        global_batching=lgd.GlobalBatching(batch_size=40),
    )
    model, said, figures = Ending(16, 4, how), "", dict[str, float]()

    class Figures(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            figures.update(data.figures)

    options = {"max_epochs": 1, "limit_val_batches": 0} | options
    options["callbacks"] = [Figures(), *options.pop("more", [])]
    try:
        trainer(world_size, strategy_of(strategy), **options).fit(model, data)
    except BaseException as error:
        said = type(error).__name__
    return [weight.detach().clone() for weight in model.parameters()], figures, said


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("graph") / "graph"
    lgd.communities(500, 4, num_features=16).save(folder)
    return str(folder)


def fits(rank: int, world_size: int, folder: str, strategy: str) -> list[Any]:
    settings = [lgd.Loading(), lgd.Loading(cache_bytes=CACHE, bulk_size=2)]
    max_epochs = 1 if world_size < 4 else 4  # so that rows come again
    return [fit(folder, world_size, strategy, loading, max_epochs=max_epochs)[:2] for loading in settings]


@pytest.mark.parametrize(("world_size", "strategy"), [(1, "one"), (2, "llcg"), *(slow(size, "ddp") for size in (2, 4))])
def test_a_fit_is_the_one_in_ram(saved: str, world_size: int, strategy: str) -> None:
    for (expected, plain), (found, figures) in run_ranks(fits, world_size, saved, strategy):
        assert "data/fetched_bytes" not in plain
        assert figures["data/fetched_bytes"] > 0 and 0 < figures["data/cache_hit_rate"] < 1
        assert all(ours.equal(theirs) for ours, theirs in zip(found, expected, strict=True))


ENDS: dict[str, dict[str, Any]] = {
    "max_steps": {"max_steps": 3},
    "limit": {"limit_train_batches": 2},
    "stopping": {"more": [pl.callbacks.EarlyStopping("loss", patience=1, mode="max", min_delta=1e9)]},
    "exception": {},
    "SIGTERM": {},
}


def reported(rank: int, world_size: int, folder: str) -> tuple[lgd.RunReport, dict[str, float]]:
    report = lgd.RunReport()
    loading = lgd.Loading(cache_bytes=CACHE, bulk_size=2)
    figures = fit(folder, world_size, "one", loading, max_epochs=3, more=[report])[1]
    return report, figures


def test_the_report_says_what_was_read_and_held(saved: str) -> None:
    ((report, figures),) = run_ranks(reported, 1, saved)
    assert "MB fetched  held" in report.table
    (rank,) = report.ranks
    assert 0 < figures["data/fetched_bytes"] <= rank["fetched_bytes"]  # some are read behind the last step
    assert rank["held"] == pytest.approx(figures["data/cache_hit_rate"], abs=0.05)


def left(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, int, int]]:
    """What each fit raises, and the threads and open files that it leaves beyond those of the first one."""
    graph, found, loading = lgd.Graph.open(folder), {}, lgd.Loading(cache_bytes=CACHE, bulk_size=2)
    fit(graph, world_size, "one", loading, max_steps=1)
    before = threading.active_count(), open_files(folder)
    for how, options in ENDS.items():
        validates = {"limit_val_batches": 1.0, "val_check_interval": 2} if how == "stopping" else {}
        said = fit(graph, world_size, "one", loading, how, **options, **validates)[2]
        with suppress(AttributeError):  # Lightning leaves the handler of a fit that a signal has ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        found[how] = said, threading.active_count() - before[0], open_files(folder) - before[1]
    return found


def open_files(folder: str) -> int:
    """How many files of a graph are open; each array that is mapped is one."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the one of this listing
            names.append(os.readlink(entry))
    return sum(name.startswith(folder) for name in names)


def test_a_fit_leaves_nothing_however_it_ends(saved: str) -> None:
    (found,) = run_ranks(left, 1, saved)
    said = dict.fromkeys(ENDS, "") | {"exception": "ZeroDivisionError", "SIGTERM": "SIGTERMException"}
    assert found == {how: (said[how], 0, 0) for how in ENDS}


def test_what_has_no_rows_in_files_is_refused(saved: str, tmp_path: Path) -> None:
    some = lgd.Loading(cache_bytes=CACHE)
    graph = lgd.communities(100, 4, num_features=16)
    with pytest.raises(ValueError, match=r"Loading\(cache_bytes=5000\) is for a graph in files"):
        lgd.PartitionedDataModule(graph, loading=some)
    lgd.Graph(graph.indptr, graph.indices, {"y": graph.node_arrays["y"]}).save(tmp_path / "narrow")
    with pytest.raises(ValueError, match="no array with at least 32 bytes a node, but labels, lies in a file"):
        lgd.PartitionedDataModule(tmp_path / "narrow", loading=some)
    with pytest.raises(ValueError, match="a WholePartSampler has one batch of all rows"):
        lgd.PartitionedDataModule(saved, loading=some, sampler=lgd.WholePartSampler(2))
    with pytest.raises(ValueError, match="sample_on is 'auto': leave one of them out"):
        lgd.PartitionedDataModule(saved, loading=lgd.Loading(cache_bytes=CACHE, sample_on="auto"))


def test_copies_have_the_same_batches(tmp_path: Path) -> None:
    small_graph().save(tmp_path / "graph")
    some = lgd.Loading(cache_bytes=1 << 12)
    check_copies(lgd.PartitionedDataModule(tmp_path / "graph", batch_size=30, loading=some))


def test_types_are_not_drawn_on_a_device() -> None:
    with pytest.raises(ValueError, match='sample_on="device" is for graphs without types'):
        lgd.PartitionedDataModule(lgd.Graph.from_pyg(small()), loading=lgd.Loading(sample_on="device"))


# With types, batches are those of the graph in RAM, whatever is held, and so is a fit that is resumed within a pass.


COUNTS = {"author": 150, "paper": 300, "venue": 9, "word": 80}
CITES, WRITES, BACK = ("paper", "cites", "paper"), ("author", "writes", "paper"), ("paper", "rev_writes", "author")
PRINTS, USES = ("venue", "prints", "paper"), ("word", "describes", "paper")
OF_ROWS = {"author": 37, "paper": 2 * 40 + 4 * 15, "venue": 0, "word": 4 * 9}  # bytes that are read of a node
WIDE = sum(OF_ROWS[kind] * count for kind, count in COUNTS.items())
SEEDS = torch.arange(150, 450)  # the papers


@cache
def of_widths() -> lgd.Graph:
    """Papers with two wide arrays, one float16, authors in int8, words with few numbers, venues without."""
    draw, data = torch.Generator().manual_seed(4), HeteroData()
    data["author"].x = torch.randint(-99, 99, (150, 37), dtype=torch.int8, generator=draw)
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
    return lgd.Graph.from_pyg(data, time="time")


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
    "neighbors": lgd.NeighborSampler([4, 3]),
    "all": lgd.NeighborSampler([-1, -1]),
    "of types": lgd.NeighborSampler({CITES: [4, 0], WRITES: [3, 2], BACK: [0, 2], PRINTS: [1, 1], USES: [0, 3]}),
    "in time": lgd.TemporalSampler([4, 3], "time"),
    "latest": lgd.TemporalSampler([3, 2], "time", pick="latest"),
    "shadow": lgd.ShadowSampler([3, 2], num_hops=2),
}


CASES = [case for name in ("neighbors", "in time") for case in ((name, 0), (name, 3000), slow(name, 40_000))]
CASES += [slow("neighbors", WIDE - 1), ("of types", 9000), ("shadow", 9000), slow("all", 9000), slow("latest", 9000)]


@pytest.mark.parametrize(("name", "cache_bytes"), CASES)
def test_batches_are_those_of_the_graph(folder: Path, name: str, cache_bytes: int) -> None:
    graph, sampler = lgd.Graph.open(folder), SAMPLERS[name]
    rows = DiskRows.of(graph, cache_bytes)
    assert rows is not None
    found = passes(FileSource(graph, rows, sampler, lgd.Loading()), num_threads=2)
    check_same(found, passes(GraphSource(of_widths(), sampler, all_labels=False), 0))
    assert (rows.cache.hits > 0) == (cache_bytes > 0) and rows.fetched_bytes > 0
    held = {kind: len(table.cache._ids) for kind, table in zip(COUNTS, rows.of_nodes, strict=True)}
    assert sum(held[kind] * OF_ROWS[kind] for kind in COUNTS) <= cache_bytes
    assert held["venue"] == rows.of_nodes[2].cache.asked == 0
    rows.close()


# A fit on a typed graph whose rows are read from files is the fit in RAM, also when it is resumed within a pass.


TYPED_CACHE = 4000  # bytes: papers and authors have 64 for each, words 32, and venues learn theirs
IN_TIME = lgd.TemporalSampler([4, 3], "time")


def graph_of_papers() -> lgd.Graph:
    data = typed_graph_of_papers().to_pyg()
    del data["venue"].x
    data["venue"].num_nodes = 4
    data["paper"].x = data["paper"].x.half()
    return lgd.Graph.from_pyg(data, time="time")


@pytest.fixture(scope="module")
def saved_types(tmp_path_factory: pytest.TempPathFactory) -> str:
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


class Watch(pl.Callback):
    """Keeps what the data module logs, and a checkpoint of the fifth step."""

    def __init__(self, data: Any, keeps: Path | None) -> None:
        self.data, self.keeps, self.figures = data, keeps, dict[str, float]()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.figures.update(self.data.figures)
        if self.keeps is not None and trainer.global_step == 5:
            trainer.save_checkpoint(self.keeps)


def fit_types(
    graph: lgd.Graph, sampler: Sampler, loading: lgd.Loading, keeps: Path | None = None, start: Any = None, **limit: int
) -> tuple[Tensor, int, dict[str, float]]:
    """The weights, steps and figures of a fit of 12 batches a pass."""
    pl.seed_everything(0)
    data = lgd.PartitionedDataModule(graph, sampler=sampler, loading=loading, boundary=lgd.Fetch(), batch_size=20)
    module, watch = LearnsVenues(list(graph.types.edge_types)), Watch(data, keeps)
    running = trainer(1, callbacks=[watch], limit_val_batches=0, **limit)
    running.fit(module, data, ckpt_path=start)
    weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    return weights, running.global_step, watch.figures


@pytest.mark.parametrize("sampler", [slow(lgd.NeighborSampler([4, 3])), IN_TIME], ids=["neighbors", "in time"])
def test_a_fit_goes_on_within_a_pass(saved_types: str, tmp_path: Path, sampler: Sampler) -> None:
    expected, steps, _ = fit_types(graph_of_papers(), sampler, lgd.Loading(), max_epochs=2)
    opened, some, path = (
        lgd.Graph.open(saved_types),
        lgd.Loading(cache_bytes=TYPED_CACHE, bulk_size=2),
        tmp_path / "last.ckpt",
    )
    stopped, *_ = fit_types(opened, sampler, some, path, max_steps=7)
    assert not stopped.equal(expected)
    resumed, all_steps, figures = fit_types(opened, sampler, some, start=path, max_epochs=2)
    assert resumed.equal(expected) and figures["data/fetched_bytes"] > 0
    assert all_steps == steps == 24


@pytest.mark.parametrize("timed", [False, True])
def test_links_are_learned_from_files(tmp_path: Path, timed: bool) -> None:
    how: dict[str, Any] = {"time": "time"} if timed else {}
    split = lgd.split_edges(graph_of_papers(), 0.1, 0.1, edge_type=CITES, negatives=3, **how)
    split.save(tmp_path / "split")
    sampler, phases = IN_TIME if timed else lgd.NeighborSampler([4, 3]), list[list[dict[str, Any]]]()
    for where, loading in ((split, lgd.Loading()), (tmp_path / "split", lgd.Loading(cache_bytes=TYPED_CACHE))):
        data = lgd.LinkDataModule(where, sampler=sampler, batch_size=64, loading=loading)
        data.setup("fit")
        phases.append([contents(batch) for batch in (*data.train_dataloader(), *data.val_dataloader())])
        figures = data.figures
        data.teardown("fit")
    check_same(phases[1], phases[0])
    assert figures["data/fetched_bytes"] > 0 and 0 < figures["data/cache_hit_rate"] < 1
