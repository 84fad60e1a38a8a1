"""Plans say in bytes what lies on a device, and rows that are read most come first."""

import math
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.source import GraphSource
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.larger_than_memory.files import FileSource
from lightning_gnn_dist.extensions.larger_than_memory.memory import BESIDE, Needs
from lightning_gnn_dist.extensions.larger_than_memory.placement import MemoryPlan, Sizes, expected_reads, most_read
from lightning_gnn_dist.graph.graph import bytes_of_part
from lightning_gnn_dist.homes import run as run_module
from tests.data_fitting import trainer
from tests.extensions.inductive.test_inductive import Net, whole
from tests.memory import Peak, reads_memory
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.typed_sage import HeteroSAGE, typed_graph_of_papers

SIZES = Sizes(edges=1000, widths=(40,), rows=2000)


@pytest.mark.parametrize(
    ("room", "draws", "draws_there", "row_bytes"),
    [
        (3000, True, True, 2000),
        (4000, True, True, 2000),
        (2999, True, True, 1999),
        (1000, True, True, 0),
        (999, True, False, 999),
        (39, True, False, 39),
        (0, True, False, 0),
        (-5, True, False, 0),
        (3000, False, False, 2000),
    ],
)
def test_edges_come_first_then_rows(room: int, draws: bool, draws_there: bool, row_bytes: int) -> None:
    plan = MemoryPlan.within(room, SIZES, draws=draws)
    assert (plan.draws_there, plan.row_bytes) == (draws_there, row_bytes)
    assert plan.holds_all_rows == (row_bytes == 2000)
    assert plan.is_all_there == (draws_there and row_bytes == 2000)
    assert plan.is_all_in_ram == (not draws_there and row_bytes < 40)
    assert plan.num_bytes == row_bytes + 1000 * draws_there <= max(room, 0)


def test_sizes_of_a_graph() -> None:
    nodes = {
        "x": torch.zeros(6, 40, dtype=torch.int8),  # wide
        "y": torch.zeros(6, 9),  # labels of any width go with the edges
        "n_id": torch.arange(6),
    }
    graph = lgd.Graph.from_edge_index(torch.tensor([[0, 1, 2], [1, 2, 3]]), 6, nodes, {"edge_attr": torch.zeros(3, 16)})
    rest = 7 * 8 + 3 * 4 + 3 * 64 + 6 * 36 + 6 * 8
    assert Sizes.of(graph) == Sizes(rest, (40,), 6 * 40)
    assert graph.num_bytes == rest + 6 * 40


def reads_by_hand(graph: lgd.Graph, seeds: list[int], sizes: list[int], num_batches: int) -> list[float]:
    def batches_with(drawn: float) -> float:
        return num_batches * (1 - math.exp(-drawn / num_batches))

    held = [float(v in seeds) for v in range(graph.num_nodes)]
    total = list(held)
    for size in sizes:
        drawn = [0.0] * graph.num_nodes
        for v in range(graph.num_nodes):
            senders = graph.indices[int(graph.indptr[v]) : int(graph.indptr[v + 1])].tolist()
            for u in senders:
                drawn[u] += held[v] * (1 if size < 0 else min(1, size / len(senders)))
        held = [batches_with(of) for of in drawn]
        total = [a + b for a, b in zip(total, drawn, strict=True)]
    return [batches_with(of) for of in total]


@pytest.mark.parametrize(
    ("sampler", "sizes"),
    [
        (lgd.NeighborSampler([3, 2]), [3, 2]),
        (lgd.NeighborSampler([-1, 4, 1]), [-1, 4, 1]),
        (lgd.LadiesSampler([9, 9]), [1, 1]),
    ],
    ids=repr,
)
def test_expected_reads_are_those_by_hand(sampler: object, sizes: list[int]) -> None:
    graph = lgd.communities(70, 3, num_features=3, train_share=0.4, seed=2)
    seeds = graph.split("train").tolist()
    found = expected_reads(graph, sampler, 6)  # type: ignore[arg-type]
    expected = reads_by_hand(graph, seeds, sizes, math.ceil(len(seeds) / 6))
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), atol=1e-12)


def test_rows_of_several_types_fit_together() -> None:
    types = typed_graph_of_papers(200).types
    reads = torch.arange(types.offsets[-1], dtype=torch.float64)
    widths = tuple(0 if i == 0 else 10 * i for i in range(len(types.node_types)))
    found = most_read(reads, types, widths, 1500)
    assert not len(found[0])
    used, expected = 0, [list[int]() for _ in widths]
    for node in reversed(range(types.offsets[-1])):
        kind = int(types.type_of(torch.tensor([node])))
        if widths[kind] and (used := used + widths[kind]) <= 1500:
            expected[kind].insert(0, node - types.offsets[kind])
    assert [ids.tolist() for ids in found] == expected


def test_bytes_of_a_device_need_somebody_who_places() -> None:
    with pytest.raises(ValueError, match=r'device_bytes \(5\) .* sample_on is "cpu": give sample_on="auto"'):
        lgd.Loading(device_bytes=5)
    with pytest.raises(ValueError, match='sample_on is "device"'):
        lgd.Loading(sample_on="device", device_bytes=5)
    with pytest.raises(ValueError, match="device_bytes"):
        lgd.Loading(sample_on="auto", device_bytes=-1)
    assert lgd.Loading(sample_on="auto", device_bytes=0).device_bytes == 0


# What a fit takes of a host's memory, against sums by hand, and what is said where it does not suffice.


NODES, DEGREE, WIDTH, BATCH = 4000, 4, 32, 10
ROWS = 4 * WIDTH * NODES
BYTES = 8 * (NODES + 1) + 4 * NODES * DEGREE + ROWS + 9 * NODES  # starts, senders, x, y and a mask


@pytest.fixture
def path(tmp_path: Path) -> Path:
    indices = torch.randint(NODES, (NODES * DEGREE,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    arrays = {"x": torch.ones(NODES, WIDTH), "y": torch.zeros(NODES, dtype=torch.int64)}
    arrays["train_mask"] = torch.ones(NODES, dtype=torch.bool)
    lgd.Graph(torch.arange(NODES + 1) * DEGREE, indices, arrays).save(tmp_path / "graph")
    return tmp_path / "graph"


def data_of(
    graph: Path | lgd.Graph, chunks: int | None = None, loading: lgd.Loading | None = None
) -> lgd.PartitionedDataModule:
    """Eight parts for good, or so many of eight chunks at a time."""
    return lgd.PartitionedDataModule(
        graph,
        partitioner=lgd.Partition(torch.arange(NODES, dtype=torch.int32) % 8, 8),
        holding=lgd.Holding() if chunks is None else lgd.Holding(lgd.Sweep(chunks=chunks, of=8)),
        sampler=lgd.NeighborSampler([2, -1]),
        batch_size=BATCH,
        coverage=None,
        loading=loading or lgd.Loading(),
    )


def fit(data: lgd.PartitionedDataModule) -> None:
    trainer(1, max_steps=1, max_epochs=1, limit_val_batches=0).fit(SAGE(WIDTH, 2), data)


def batches(share: float, bulks: int = 2 * 4) -> float:
    """Rows of batches: a seed draws 2 of its 4 neighbours, and these all 4; nodes that are drawn twice count once."""
    held, drawn = share * NODES, BATCH * (1 + 2 + 2 * 4)
    return bulks * held * (1 - math.exp(-drawn / held)) * (4 * WIDTH + 9)


def needs(data: lgd.PartitionedDataModule, ranks: int, *, is_cut: bool = True) -> Needs:
    return Needs.of_plan(data._home.plan_for(ranks), data._home.running.settings, is_cut=is_cut)  # type: ignore[attr-defined]


def test_what_parts_and_chunks_take(path: Path) -> None:
    lists, beside = 4 * NODES, 22 * NODES
    of_sweep, of_ranks = needs(data_of(path, 1), 2), needs(data_of(path), 8)
    for found, share, copies, ranks in ((of_sweep, 1 / 8, 2, 2), (of_ranks, 1 / 8, 1, 8)):
        assert found.held == lists + int(copies * share * (BYTES + beside))
        assert found.least == lists + int(copies * share * (ROWS + 9 * NODES + beside))
        assert found.batches == pytest.approx(batches(copies * share), abs=1)
        assert found.of_host(ranks) == ranks * (found.held + found.batches + BESIDE)


def test_what_files_take_that_all_ranks_share(path: Path) -> None:
    found = needs(data_of(path, loading=lgd.Loading(bulk_size=1, num_threads=0)), 2, is_cut=False)
    assert (found.held, found.mapped) == (0, BYTES)
    assert found.batches == pytest.approx(batches(1.0, bulks=1), abs=1)
    assert found.of_host(3) == 3 * (found.batches + BESIDE) + BYTES
    cached = needs(data_of(path, loading=lgd.Loading(cache_bytes=1000)), 2, is_cut=False)
    assert (cached.held, cached.mapped) == (1000, BYTES - ROWS)
    in_ram = lgd.Graph.open(path)
    arrays = {name: array.clone() for name, array in in_ram.node_arrays.items()}
    assert needs(data_of(lgd.Graph(in_ram.indptr.clone(), in_ram.indices.clone(), arrays)), 2, is_cut=False).mapped == 0


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
        monkeypatch.setattr(run_module, "free_bytes", lambda free=free: free)
        fit(data_of(path, chunks))
        said = [text for text in logged if "it will be slow" in text]
        assert len(said) == count
        assert all(way in text for text in said for way in [*ways, " MB on a host: its rank takes ", " MB left"])


def test_a_fit_that_would_be_killed_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = needs(data_of(path, 3), 1).least
    monkeypatch.setattr(run_module, "free_bytes", lambda: least - 1)
    with pytest.raises(ValueError, match=r"parts alone take .* it would be killed: save features as float16; or take"):
        fit(data_of(path, 3))


def test_rows_of_all_types_may_be_read_from_files(tmp_path: Path, logged: list[str]) -> None:
    """By hand: 600 papers have 128 bytes of features, 300 authors 64 and 150 words 32."""
    lgd.citations(600).save(tmp_path / "typed")
    rows = 600 * 128 + 300 * 64 + 150 * 32
    plain, cached = (
        lgd.PartitionedDataModule(tmp_path / "typed", sampler=lgd.NeighborSampler([2, 2]), loading=loading)
        for loading in (lgd.Loading(), lgd.Loading(cache_bytes=1000))
    )
    whole, some, run = needs(plain, 1, is_cut=False), needs(cached, 1, is_cut=False), plain._home.running
    run = replace(run, hosts=(run_module.Host(whole.of_host(1) - 1, 1),))
    assert (some.held, some.mapped) == (1000, whole.mapped - rows)
    Needs.check(plain._home.plan_for(1), run, is_cut=False, sweeps=True)  # type: ignore[attr-defined]
    room = whole.of_host(1) - 1 - whole.mapped + rows - whole.batches // 4 - BESIDE
    (said,) = logged
    assert f"read features from files, Loading(cache_bytes={room}, bulk_size=1)" in said


def test_the_host_that_has_least_counts(path: Path, logged: list[str]) -> None:
    data = data_of(path)
    run, home = data._home.running, data._home
    whole = needs(data, 1, is_cut=False)
    hosts = run_module.Host(whole.of_host(1), 1), run_module.Host(whole.of_host(2) - 1, 2), run_module.Host(1 << 40, 9)
    run = replace(run, hosts=hosts)
    Needs.check(home.plan_for(1), run, is_cut=False, sweeps=False)  # type: ignore[attr-defined]
    assert "each of its 2 ranks takes" in "".join(logged) and "start fewer ranks" in "".join(logged)
    assert "Sweep" not in "".join(logged)


# An evaluation of a graph larger than what is free reads rows from its files ahead, and gives the same rows.


SAMPLER = lgd.NeighborSampler([3, 3])


@pytest.fixture
def large_path(tmp_path: Path) -> Path:
    whole().save(tmp_path / "graph")
    return tmp_path / "graph"


def has_free(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "free_bytes", lambda: num_bytes)


def source_of(data: Any) -> Any:
    return data.test_dataloader().learning(0).source


def data_of_large(graph: Path | lgd.Graph, **options: Any) -> lgd.PartitionedDataModule:
    return lgd.PartitionedDataModule(graph, sampler=SAMPLER, batch_size=16, **options)


def test_what_is_free_decides(large_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = lgd.Graph.open(large_path).num_bytes
    has_free(size, monkeypatch)
    assert isinstance(source_of(data_of_large(large_path)), GraphSource)
    has_free(size - 1, monkeypatch)
    data = data_of_large(large_path)
    loader = data.test_dataloader()
    assert isinstance(loader.learning(0).source, FileSource) and loader._bulk_size == 1
    assert data._home._evaluation.rows.cache.num_bytes == (size - 1) // 8  # type: ignore[attr-defined]
    given = data_of_large(large_path, loading=lgd.Loading(cache_bytes=100))
    assert isinstance(source_of(given), FileSource)
    assert given._home._sources.rows.cache.num_bytes == 100  # type: ignore[attr-defined]
    assert isinstance(source_of(data_of_large(whole())), GraphSource)  # in RAM


def predicted(module: Any, data: Any) -> Tensor:
    return torch.cat(trainer(1).predict(module, data))  # type: ignore[arg-type]


@pytest.mark.parametrize("free", [1 << 14, 1 << 12])
def test_rows_are_bitwise_equal(free: int, large_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = typed_graph_of_papers(200)
    types.save(tmp_path / "typed")
    torch.manual_seed(0)
    for module, graph in ((Net("GAT"), large_path), (HeteroSAGE(list(types.types.edge_types)), tmp_path / "typed")):
        rows = []
        for there in (1 << 40, free):
            has_free(there, monkeypatch)
            rows.append(predicted(module, data_of_large(graph, seed=0)))
        assert rows[0].equal(rows[1])


def test_a_fit_validates_and_goes_on_the_same(large_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for free in (1 << 40, 1 << 14):
        has_free(free, monkeypatch)
        module, run = Net("SAGE"), trainer(1, max_epochs=2)
        data = data_of_large(large_path, seed=0)
        run.fit(module, data)
        found.append((run.callback_metrics["val"], module.first.lin_l.weight.detach()))
    assert found[0][0] == found[1][0] and found[0][1].equal(found[1][1])


def test_held_links_are_judged_the_same_way(large_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lgd.split_edges(lgd.Graph.open(large_path)).save(tmp_path / "split")
    has_free(1 << 12, monkeypatch)
    assert isinstance(source_of(lgd.LinkDataModule(tmp_path / "split", sampler=SAMPLER)), FileSource)


def test_a_command_tells_of_a_cut_what_ranks_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lgd.communities(2000).save(tmp_path / "graph")
    main(["inspect", str(tmp_path / "graph"), "--parts", "3", "--partitioner", "random"])
    assert "if batches have 1,024 seeds and draw 15 and 10 neighbours; " in capsys.readouterr().out


# What a rank takes is what is predicted, measured.


def middle_graph(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(1_000_000, (2, 10_000_000), generator=generator)
    x, mask = torch.randn(1_000_000, 64, generator=generator), torch.arange(1_000_000) % 50 == 0
    arrays = {"x": x, "y": torch.randint(4, (1_000_000,), generator=generator), "train_mask": mask}
    lgd.Graph.from_edge_index(edge_index, 1_000_000, arrays).save(path)


def measure_peak(rank: int, world_size: int, path: str) -> int:
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(3), launch=lgd.Launch(timeout=timedelta(seconds=30)))
    sampler = lgd.NeighborSampler([10, 5])
    alone = {"partitioner": lgd.RandomPartitioner(), "boundary": lgd.Isolated()}
    data = lgd.PartitionedDataModule(path, sampler=sampler, batch_size=512, **alone)  # type: ignore[arg-type]
    with Peak("RssAnon") as peak:
        trainer(world_size, strategy, limit_val_batches=0).fit(SAGE(64, 4), data)
    return peak.added_bytes


@pytest.mark.slow
@pytest.mark.alone
@reads_memory
def test_a_rank_takes_no_more_than_is_predicted(tmp_path: Path) -> None:
    middle_graph(tmp_path / "graph")
    graph = lgd.Graph.open(tmp_path / "graph")
    report = lgd.RandomPartitioner()(graph, 2, 0).report(graph)
    of_part = bytes_of_part(graph, report.nodes, report.inside_edges)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([10, 5]), batch_size=512)
    least = int(of_part.min())
    most = Needs.of_part(graph, int(of_part.max()), data._home.running.settings).of_rank
    for peak in run_ranks(measure_peak, 2, str(tmp_path / "graph"), timeout=600):
        assert least < peak < most
        assert peak > 0.5 * most  # and not much less
