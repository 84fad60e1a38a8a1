"""Where METIS is not installed another partitioner is the default, and what needs METIS says so."""

import importlib.util
import re
import sys
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import Strategy

from lightning_gnn_dist import (
    EverySteps,
    GrappaStrategy,
    Holding,
    Isolated,
    LinkDataModule,
    LLCGStrategy,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    Redeal,
    StreamingPartitioner,
    SuperNodePartitioner,
    communities,
    split_edges,
)
from lightning_gnn_dist.cli.options import parser
from lightning_gnn_dist.cli.partitioners import partitioner_of
from lightning_gnn_dist.partition import default, kaminpar, metis
from lightning_gnn_dist.partition.base import Partitioner
from lightning_gnn_dist.partition.default import default_partitioner


@pytest.fixture
def without_metis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metis, "pymetis", None)
    monkeypatch.setattr(kaminpar, "kaminpar", None)
    default._tell.cache_clear()


def test_metis_is_the_default() -> None:
    assert default_partitioner(100, 1 << 40) == MetisPartitioner()
    assert default_partitioner(100, 1 << 40, look_alike=True) == SuperNodePartitioner()


ALIKE, UNLIKE = SuperNodePartitioner(), MetisPartitioner()


@pytest.mark.parametrize(
    ("strategy", "options", "expected"),
    [
        (LocalSGDStrategy(), {}, ALIKE),
        (LLCGStrategy(EverySteps(4)), {"holding": Holding(extra_nodes=0.1)}, ALIKE),
        (LLCGStrategy(EverySteps(4)), {"holding": Holding(Redeal(8))}, UNLIKE),
        (LLCGStrategy(EverySteps(4)), {"partitioner": UNLIKE}, UNLIKE),
        (GrappaStrategy(), {}, UNLIKE),
    ],
    ids=["averaging", "LLCG", "chunks dealt anew", "named", "gradients"],
)
def test_ranks_that_average_models_get_parts_that_look_alike(
    strategy: Strategy, options: dict[str, Any], expected: Partitioner
) -> None:
    graph = communities(400, 4, num_features=4)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([2]), **options)
    assert data.partitioner == UNLIKE  # before anybody knows the strategy
    data.trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, logger=False)
    assert data.partitioner == expected
    chunks = data.holding.residency.num_chunks(2)
    assert torch.equal(data.partition(2).assignment, expected(graph, chunks, 0).assignment)


@pytest.mark.usefixtures("without_metis")
@pytest.mark.parametrize("local_rank", ["0", "1"])
def test_without_metis_another_cuts_and_one_line_of_a_host_says_so(
    local_rank: str, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    graph, sampler = communities(60, 2, num_features=4), NeighborSampler([2])
    links = LinkDataModule(split_edges(graph), sampler=sampler, boundary=Isolated())
    modules = [PartitionedDataModule(graph, sampler=sampler), links]
    assert [module.partitioner for module in modules] == [StreamingPartitioner()] * 2
    assert modules[0].part(0, 2).num_nodes < 60
    assert not logged  # one process cuts nothing
    alike = [default_partitioner(100, 1 << 40, look_alike=True) for _ in range(2)]
    assert alike == [SuperNodePartitioner(clusters=StreamingPartitioner())] * 2
    said = logged
    assert len(said) == (local_rank == "0")
    assert all("METIS is not installed" in line and "lightning-gnn-dist[metis]" in line for line in said)


@pytest.mark.usefixtures("without_metis")
@pytest.mark.parametrize(
    ("make", "instead"),
    [
        (MetisPartitioner, "StreamingPartitioner()"),
        (lambda: SuperNodePartitioner(8), "SuperNodePartitioner(clusters=StreamingPartitioner())"),
    ],
    ids=["metis", "super-nodes"],
)
def test_who_asks_for_metis_is_told_the_way_out(make: Callable[[], object], instead: str) -> None:
    with pytest.raises(ValueError, match=rf"needs METIS, .*gnn-dist\[metis\].* or take {re.escape(instead)}, which"):
        make()


def on_the_command_line(*words: str) -> object:
    options: Namespace = parser().parse_args(["divide", "graph", "shards", "--parts=2", *words])
    return partitioner_of(options.partitioner, options, communities(60, 2, num_features=4))


def test_commands_cut_by_the_default_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert on_the_command_line("--balance=train") == MetisPartitioner(balance="train")
    monkeypatch.setattr(metis, "pymetis", None)
    monkeypatch.setattr(kaminpar, "kaminpar", None)
    assert on_the_command_line() == StreamingPartitioner()
    with pytest.raises(ValueError, match="needs METIS"):
        on_the_command_line("--partitioner=metis")
    streamed = SuperNodePartitioner(20, StreamingPartitioner())
    assert on_the_command_line("--partitioner=streaming-supernodes", "--supernodes=20") == streamed


def test_the_module_is_imported_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pymetis", None)  # an import of it fails
    spec = importlib.util.spec_from_file_location("metis_again", metis.__file__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "metis_again", again)
    spec.loader.exec_module(again)
    assert not again.is_available()
