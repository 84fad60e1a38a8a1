"""A fit on a graph whose rows are read from files ahead is the fit in RAM, and leaves nothing, however it ends."""

import os
import signal
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.data.test_settings import check_copies
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, plain_ddp
from tests.graph.typed.graphs import small
from tests.ranks import run_ranks
from tests.sage import Ending
from tests.slow import slow

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
