"""Where METIS is not installed another partitioner is the default, and what needs METIS says so."""

import importlib.util
import re
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.cli.cutting import partition_of, partitioner_of
from lightning_gnn_dist.cli.options import add_partitioner
from lightning_gnn_dist.graph.graph import bytes_of_part
from lightning_gnn_dist.partition import default, metis
from lightning_gnn_dist.partition.default import default_partitioner
from lightning_gnn_dist.partition.partition_report import advice, beyond_chance


def take_metis_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    default._tell.cache_clear()


@pytest.fixture
def without_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    take_metis_away(monkeypatch)


def test_metis_is_the_default() -> None:
    assert default_partitioner(100, 1 << 40) == lgd.MetisPartitioner()
    assert default_partitioner(100, 1 << 40, look_alike=True) == lgd.SuperNodePartitioner()


ALIKE, UNLIKE = lgd.SuperNodePartitioner(), lgd.MetisPartitioner()


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        (lgd.LocalSGDStrategy(), {}, ALIKE),
        (lgd.LLCGStrategy(lgd.EverySteps(4)), {"holding": lgd.Holding(extra_nodes=0.1)}, ALIKE),
        (lgd.LLCGStrategy(lgd.EverySteps(4)), {"holding": lgd.Holding(lgd.Redeal(8))}, UNLIKE),
        (lgd.LLCGStrategy(lgd.EverySteps(4)), {"partitioner": UNLIKE}, UNLIKE),
        (lgd.GrappaStrategy(), {}, UNLIKE),
    ],
    ids=["averaging", "LLCG", "chunks dealt anew", "named", "gradients"],
)
def test_ranks_that_average_models_get_parts_that_look_alike(strategy, options, expected, monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", [__file__])  # a script that starts ranks
    graph = lgd.communities(400, 4, num_features=4)
    data = lgd.PartitionedDataModule(graph, sampler=lgd.NeighborSampler([2]), **options)
    assert data.partitioner == UNLIKE  # before anybody knows the strategy
    data.trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    assert data.partitioner == expected
    chunks = data.holding.residency.num_chunks(2)
    assert torch.equal(data.partition(2).assignment, expected(graph, chunks, 0).assignment)


@pytest.mark.usefixtures("without_metis")
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_without_metis_another_cuts_and_one_line_of_a_host_says_so(local_rank, logged, monkeypatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    graph, sampler = lgd.communities(60, 2, num_features=4), lgd.NeighborSampler([2])
    modules = [lgd.PartitionedDataModule(graph, sampler=sampler) for _ in range(2)]
    assert [module.partitioner for module in modules] == [lgd.StreamingPartitioner()] * 2
    assert modules[0].part(0, 2).num_nodes < 60
    assert not logged  # one process cuts nothing
    alike = [default_partitioner(100, 1 << 40, look_alike=True) for _ in range(2)]
    assert alike == [lgd.SuperNodePartitioner(clusters=lgd.StreamingPartitioner())] * 2
    said = logged
    assert len(said) == (local_rank == "0")
    assert all("METIS is not installed" in line and "lightning-gnn-dist[metis]" in line for line in said)


@pytest.mark.usefixtures("without_metis")
@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (lgd.MetisPartitioner, "StreamingPartitioner()"),
        (lambda: lgd.SuperNodePartitioner(8), "SuperNodePartitioner(clusters=StreamingPartitioner())"),
    ],
    ids=["metis", "super-nodes"],
)
def test_who_asks_for_metis_is_told_the_way_out(make: Callable[[], object], instead: str) -> None:
    with pytest.raises(ValueError, match=rf"needs METIS, .*gnn-dist\[metis\].* or take {re.escape(instead)}, which"):
        make()


SMALL = lgd.communities(60, 2, num_features=4)


def options_of(*words: str) -> Namespace:
    command = ArgumentParser()
    add_partitioner(command)
    return command.parse_args(words)


def on_the_command_line(*words: str) -> object:
    options = options_of(*words)
    return partitioner_of(options.partitioner, options, SMALL)


def test_commands_cut_by_the_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_the_command_line("--balance=train") == lgd.MetisPartitioner(balance="train")
    monkeypatch.setattr(metis, "pymetis", None)
    assert on_the_command_line() == lgd.StreamingPartitioner()
    with pytest.raises(ValueError, match=r"train is for METIS, and StreamingPartitioner evens out nodes"):
        partition_of(options_of("--balance=train"), SMALL, 2)
    with pytest.raises(ValueError, match="needs METIS"):
        on_the_command_line("--partitioner=metis")
    streamed = lgd.SuperNodePartitioner(20, lgd.StreamingPartitioner())
    assert on_the_command_line("--partitioner=streaming-supernodes", "--supernodes=20") == streamed


def test_the_module_is_imported_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)  # an import of it fails
    spec = importlib.util.spec_from_file_location("metis_again", metis.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "metis_again", again)
    spec.loader.exec_module(again)
    assert not again.is_available()


# What follows from the figures of a partition: the cases that were measured, and memory to the byte.


def finding(graph: lgd.Graph, partitioner: Any, parts: int = 8) -> str:
    return advice(graph, partitioner(graph, parts, 0).report(graph))


@pytest.mark.parametrize(
    ("name", "partitioner", "differ", "lost"),
    [
        ("cora.npz", lgd.MetisPartitioner(), True, False),
        ("cora.npz", lgd.RandomPartitioner(), False, True),
        ("cora.npz", lgd.SuperNodePartitioner(400), False, False),
        ("amazon_computers.npz", lgd.MetisPartitioner(), True, False),
        ("amazon_computers.npz", lgd.RandomPartitioner(), False, True),
        ("amazon_computers.npz", lgd.SuperNodePartitioner(400), False, False),
        ("minesweeper.npz", lgd.MetisPartitioner(), False, False),
    ],
)
def test_measured_cases_are_told_apart(name, partitioner, differ, lost, to_pyg) -> None:
    found = finding(lgd.Graph.from_pyg(to_pyg(name, split=0)), partitioner)
    assert ("hold different labels" in found, "lost all their neighbours" in found) == (differ, lost)


def test_the_strategy_follows() -> None:
    said = finding(lgd.communities(2000, 2, homophily=1.0), lgd.MetisPartitioner(), 2)
    assert "The parts hold different labels" in said
    assert "GrappaStrategy()" in said and "LLCGStrategy(clock), which corrects" in said
    said = finding(lgd.communities(2000, mean_degree=2.0), lgd.RandomPartitioner(), 4)
    assert "correction=Correction(0.5" in said and "SuperNodePartitioner()" in said
    said = finding(lgd.communities(2000, mean_degree=40.0), lgd.RandomPartitioner(), 2)
    assert "The parts look alike" in said and "LocalSGDStrategy(EverySteps(16)) is enough" in said


def test_chance_is_not_taken_for_a_difference() -> None:
    graph = lgd.communities(4000, train_share=0.02)  # ten training nodes a part
    report = lgd.RandomPartitioner()(graph, 8, 0).report(graph)
    excess = beyond_chance(graph, report.label_skew, report.train_nodes, report.nodes)
    assert report.worst_label_skew is not None and report.worst_label_skew > 0.3
    assert excess is not None and abs(excess) < 0.1


def test_without_labels_it_is_said_that_parts_may_differ() -> None:
    graph = lgd.communities(2000)
    said = finding(lgd.Graph(graph.indptr, graph.indices, {}), lgd.MetisPartitioner(), 2)
    assert "Without labels" in said and "GrappaStrategy() loses nothing where they differ" in said


def test_memory_is_that_of_the_part() -> None:
    graph = lgd.communities(1000)
    graph = lgd.Graph(graph.indptr, graph.indices, graph.node_arrays, {"edge_weight": torch.rand(graph.num_edges)})
    partition = lgd.MetisPartitioner()(graph, 3, 0)
    report = partition.report(graph)
    ram = bytes_of_part(graph, report.nodes, report.inside_edges)
    data = lgd.PartitionedDataModule(graph, partitioner=partition, boundary=lgd.Isolated())
    assert ram.tolist() == [data.part(rank, 3).num_bytes for rank in range(3)]
