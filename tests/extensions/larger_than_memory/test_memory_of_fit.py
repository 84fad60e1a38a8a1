"""What a fit takes of a host's memory, against sums by hand, and what is said where it does not suffice."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Graph,
    Holding,
    Loading,
    NeighborSampler,
    Partition,
    PartitionedDataModule,
    Sweep,
    citations,
)
from lightning_gnn_dist.extensions.larger_than_memory.memory import BESIDE, Needs
from lightning_gnn_dist.layers import budget
from tests.data_fitting import trainer

NODES, DEGREE, WIDTH, BATCH = 4000, 4, 32, 10
ROWS = 4 * WIDTH * NODES
BYTES = 8 * (NODES + 1) + 4 * NODES * DEGREE + ROWS + 9 * NODES  # starts, senders, x, y and a mask


@pytest.fixture
def path(tmp_path: Path) -> Path:
    indices = torch.randint(NODES, (NODES * DEGREE,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    arrays = {"x": torch.ones(NODES, WIDTH), "y": torch.zeros(NODES, dtype=torch.int64)}
    arrays["train_mask"] = torch.ones(NODES, dtype=torch.bool)
    Graph(torch.arange(NODES + 1) * DEGREE, indices, arrays).save(tmp_path / "graph")
    return tmp_path / "graph"


def data_of(graph: Path | Graph, chunks: int | None = None, loading: Loading | None = None) -> PartitionedDataModule:
    """Eight parts for good, or so many of eight chunks at a time."""
    return PartitionedDataModule(
        graph,
        partitioner=Partition(torch.arange(NODES, dtype=torch.int32) % 8, 8),
        holding=Holding() if chunks is None else Holding(Sweep(chunks=chunks, of=8)),
        sampler=NeighborSampler([2, -1]),
        batch_size=BATCH,
        coverage=None,
        loading=loading or Loading(),
    )


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any) -> Tensor:
        return self.layer(batch.x).mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(data: PartitionedDataModule) -> None:
    trainer(1, max_steps=1, max_epochs=1, limit_val_batches=0).fit(Model(), data)


def batches(share: float, bulks: int = 2 * 4) -> float:
    """Rows of batches: a seed draws 2 of its 4 neighbours, and these all 4; nodes that are drawn twice count once."""
    held, drawn = share * NODES, BATCH * (1 + 2 + 2 * 4)
    return bulks * held * (1 - math.exp(-drawn / held)) * (4 * WIDTH + 9)


def needs(data: PartitionedDataModule, ranks: int, *, is_cut: bool = True) -> Needs:
    return Needs.of_plan(data._home.plan_for(ranks), data._running.settings, is_cut=is_cut)  # type: ignore[attr-defined]


def test_what_parts_and_chunks_take(path: Path) -> None:
    lists, beside = 4 * NODES, 22 * NODES
    of_sweep, of_ranks = needs(data_of(path, 1), 2), needs(data_of(path), 8)
    for found, share, copies, ranks in ((of_sweep, 1 / 8, 2, 2), (of_ranks, 1 / 8, 1, 8)):
        assert found.held == lists + int(copies * share * (BYTES + beside))
        assert found.least == lists + int(copies * share * (ROWS + 9 * NODES + beside))
        assert found.batches == pytest.approx(batches(copies * share), abs=1)
        assert found.of_host(ranks) == ranks * (found.held + found.batches + BESIDE)


def test_what_files_take_that_all_ranks_share(path: Path) -> None:
    found = needs(data_of(path, loading=Loading(bulk_size=1, num_threads=0)), 2, is_cut=False)
    assert (found.held, found.mapped) == (0, BYTES)
    assert found.batches == pytest.approx(batches(1.0, bulks=1), abs=1)
    assert found.of_host(3) == 3 * (found.batches + BESIDE) + BYTES
    cached = needs(data_of(path, loading=Loading(cache_bytes=1000)), 2, is_cut=False)
    assert (cached.held, cached.mapped) == (1000, BYTES - ROWS)
    in_ram = Graph.open(path)
    arrays = {name: array.clone() for name, array in in_ram.node_arrays.items()}
    assert needs(data_of(Graph(in_ram.indptr.clone(), in_ram.indices.clone(), arrays)), 2, is_cut=False).mapped == 0


@pytest.mark.parametrize(
    ("chunks", "ways"),
    [
        (None, ["Sweep(bytes=", "Loading(cache_bytes=", "float16", "take more hosts"]),
        (1, ["Sweep(bytes=", "float16", "take more hosts"]),
    ],
)
def test_a_fit_that_will_be_slow_says_so(
    chunks: int | None, ways: list[str], path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    needed = needs(data_of(path, chunks), 1, is_cut=chunks is not None).of_host(1)
    for free, count in ((needed - 1, 1), (needed, 0)):
        logged.clear()
        monkeypatch.setattr(budget, "free_bytes", lambda free=free: free)
        fit(data_of(path, chunks))
        said = [text for text in logged if "it will be slow" in text]
        assert len(said) == count
        assert all(way in text for text in said for way in [*ways, " MB on a host: its rank takes ", " MB left"])


def test_a_fit_that_would_be_killed_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = needs(data_of(path, 3), 1).least
    monkeypatch.setattr(budget, "free_bytes", lambda: least - 1)
    with pytest.raises(ValueError, match=r"parts alone take .* it would be killed: save features as float16; or take"):
        fit(data_of(path, 3))


def test_rows_of_all_types_may_be_read_from_files(tmp_path: Path, logged: list[str]) -> None:
    """By hand: 600 papers have 128 bytes of features, 300 authors 64 and 150 words 32."""
    citations(600).save(tmp_path / "typed")
    rows = 600 * 128 + 300 * 64 + 150 * 32
    plain, cached = (
        PartitionedDataModule(tmp_path / "typed", sampler=NeighborSampler([2, 2]), loading=loading)
        for loading in (Loading(), Loading(cache_bytes=1000))
    )
    whole, some, run = needs(plain, 1, is_cut=False), needs(cached, 1, is_cut=False), plain._running
    run = replace(run, hosts=(budget.Host(whole.of_host(1) - 1, 1),))
    assert (some.held, some.mapped) == (1000, whole.mapped - rows)
    Needs.check(plain._home.plan_for(1), run, is_cut=False, sweeps=True)  # type: ignore[attr-defined]
    room = whole.of_host(1) - 1 - whole.mapped + rows - whole.batches // 4 - BESIDE
    (said,) = logged
    assert f"read features from files, Loading(cache_bytes={room}, bulk_size=1)" in said


def test_the_host_that_has_least_counts(path: Path, logged: list[str]) -> None:
    data = data_of(path)
    run, home = data._running, data._home
    whole = needs(data, 1, is_cut=False)
    hosts = budget.Host(whole.of_host(1), 1), budget.Host(whole.of_host(2) - 1, 2), budget.Host(1 << 40, 9)
    run = replace(run, hosts=hosts)
    Needs.check(home.plan_for(1), run, is_cut=False, sweeps=False)  # type: ignore[attr-defined]
    assert "each of its 2 ranks takes" in "".join(logged) and "start fewer ranks" in "".join(logged)
    assert "Sweep" not in "".join(logged)
