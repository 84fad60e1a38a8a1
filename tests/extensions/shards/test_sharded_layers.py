"""Layers of a graph that no host holds say what those of the whole graph say, and each halo is sent once."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv, SAGEConv

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.passes import layer_pass, row_table
from lightning_gnn_dist.extensions.passes.prediction import Prediction
from lightning_gnn_dist.extensions.shards.index import Bounds, Shard
from lightning_gnn_dist.extensions.shards.nodes import Division, ShardNodes
from lightning_gnn_dist.graph.rows import bytes_per_row
from lightning_gnn_dist.layers.layer_pass import Work
from lightning_gnn_dist.wire.channel import CPU, Channel
from lightning_gnn_dist.wire.collectives import traffic
from tests.data_fitting import trainer
from tests.every_strategy import plain_ddp
from tests.extensions.passes.test_prediction import Bipartite, Deep, at_most
from tests.extensions.temporal.temporal_graphs import plain
from tests.graph.parted import small_graph, some_partition
from tests.layers.models import MODELS, graph_of, uneven_data
from tests.layers.test_lightning import SLOW, check_cases, evaluate
from tests.layers.test_sight import check_ranks, on_two_ranks, sparse_data
from tests.memory import Peak, give_back_at_once, reads_memory
from tests.placing import placed
from tests.ranks import RankError, join, run_ranks
from tests.slow import slow


def deep(model: type[Deep] = Deep) -> Deep:
    """Three layers."""
    return model(SAGEConv, sizes=(5, 8, 8, 3))


def weighted() -> Deep:
    return Deep(partial(GCNConv, normalize=False), edges="edge_weight", sizes=(5, 8, 8, 3))


def weighted_graph() -> lgd.Graph:
    """With weights of edges, and ten nodes without any edge."""
    edges, generator = small_graph(), torch.Generator().manual_seed(2)
    ends = torch.stack([edges.indices.long(), torch.arange(300).repeat_interleave(edges.degrees())])
    nodes = {"n_id": torch.arange(310), "x": torch.randn(310, 5, generator=generator).half()}
    return lgd.Graph.from_edge_index(ends, 310, nodes, {"edge_weight": torch.rand(3000, generator=generator) / 10})


def uneven(num_parts: int) -> lgd.Partition:
    """The nodes without any edge are a part of their own, and another part is small."""
    assignment = torch.randint(0, num_parts - 1, (310,), generator=torch.Generator().manual_seed(1))
    if num_parts > 2:
        assignment[(assignment == 1) & (torch.arange(310) > 40)] = 0
    assignment[300:] = num_parts - 1
    return lgd.Partition(assignment.int(), num_parts)


def quiet(world_size: int) -> pl.Trainer:
    return trainer(world_size, plain_ddp() if world_size > 1 else "auto")


def in_small_pieces() -> None:
    """Batches of 7 nodes, and rounds of a few rows."""
    layer_pass.bytes_foreseen = at_most(7)
    row_table._COPIES_SENT = 1 << 15


def predict(rank: int, world_size: int, folder: Path) -> list[Tensor]:
    in_small_pieces()
    seen: list[Tensor] = []

    def evaluate(batch: Data, rows: Tensor) -> None:
        seen.append(torch.cat([batch.n_id[: batch.batch_size, None], rows], 1))

    options: dict[str, Any] = {"on_rows": evaluate, "budget_bytes": 16 << 20}
    lgd.predict_by_layer(quiet(world_size), weighted(), folder / "shares", folder / "rows.npy", **options)
    return seen


PLACES = {"two": (2, 2), "one copy": (4, 4), "two copies": (4, 2), "alone": (1, 1)}


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "shards"), PLACES.values(), ids=PLACES)
def test_layers_of_shards_are_those_of_the_whole(tmp_path: Path, world_size: int, shards: int) -> None:
    graph = weighted_graph()
    lgd.save_shards(graph, uneven(shards) if shards > 1 else some_partition(graph, 1), tmp_path / "shares")
    lgd.predict_by_layer(quiet(1), weighted(), graph, tmp_path / "alone.npy")
    results = run_ranks(predict, world_size, tmp_path)
    expected, found = np.load(tmp_path / "alone.npy"), np.load(tmp_path / "rows.npy")
    np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-6)
    seen = torch.cat([torch.cat(rows) for rows in results])
    assert seen[:, 0].sort().values.tolist() == list(range(310))
    assert np.array_equal(seen[seen[:, 0].argsort(), 1:].numpy(), found)
    assert {file.name for file in tmp_path.iterdir()} == {"shares", "alone.npy", "rows.npy"}


@torch.inference_mode()
def count(rank: int, world_size: int, folder: Path, shards: int) -> tuple[float, float, int]:
    """Bytes sent for three layers, what the formula says, and exchanges."""
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=30))
    row_table._COPIES_SENT, exchanges = 1 << 15, []
    exchange = Channel.exchange
    Channel.exchange = lambda self, *args: exchanges.append(0) or exchange(self, *args)  # type: ignore[func-returns-value, method-assign]
    shard = Shard.open(folder / "shares", rank % shards)
    own = Division(shard.bounds.types, world_size).nodes(rank)
    ends = shard.rows.indptr[[own.start - shard.first_node, own.stop - shard.first_node]].tolist()
    senders = shard.rows.indices[slice(*ends)].unique()
    halo = int(((senders < own.start) | (senders >= own.stop)).sum())
    before = traffic.bytes_sent
    Prediction(deep(), folder / "shares", None, Work(CPU, None, True, 1 << 24), None, "").step(torch.zeros(1))
    spent = traffic.bytes_sent - before
    dist.destroy_process_group()
    return spent, halo * (2 * 8 + bytes_per_row(shard.rows.node_arrays) + 2 * 4 * 8), len(exchanges)


@pytest.mark.slow
@pytest.mark.parametrize("shards", [4, 2], ids=["one copy", "two copies"])
def test_a_halo_is_sent_once(tmp_path: Path, shards: int) -> None:
    graph = small_graph(4000, 20_000)
    lgd.save_shards(graph, some_partition(graph, shards), tmp_path / "shares")
    spent, formula, exchanges = zip(*run_ranks(count, 4, tmp_path, shards), strict=True)
    assert abs(sum(spent) / sum(formula) - 1) < 0.1
    assert len(set(exchanges)) == 1 and exchanges[0] > 100


def test_more_ranks_than_nodes_are_refused(tmp_path: Path) -> None:
    lgd.save_shards(small_graph(), some_partition(small_graph(), 2), tmp_path / "shares")
    with pytest.raises(ValueError, match=r"Shard 0 has .* nodes, which 400 ranks are to compute"):
        Division(Bounds.read(tmp_path / "shares").types, 800)


def test_what_keeps_nothing_is_refused(tmp_path: Path) -> None:
    lgd.save_shards(weighted_graph(), uneven(2), tmp_path / "shares")
    with pytest.raises(ValueError, match="path=None keeps nothing: name a file"):
        lgd.predict_by_layer(quiet(1), deep(), tmp_path / "shares", None)
    seen = list[int]()
    lgd.predict_by_layer(quiet(1), deep(), weighted_graph(), None, on_rows=lambda batch, rows: seen.append(len(rows)))
    assert sum(seen) == 310


def most_memory(rank: int, world_size: int, folder: Path, budget_bytes: int) -> tuple[int, int]:
    """Bytes of this process alone, beyond what it has after a first and small prediction; and nodes of its halo."""
    give_back_at_once()
    model, running = deep(Bipartite), quiet(world_size)
    lgd.predict_by_layer(running, model, folder / "small", folder / "small.npy")
    held, prepare = [], ShardNodes.prepare
    ShardNodes.prepare = lambda self, nodes, seeds: held.append(len(nodes)) or prepare(self, nodes, seeds)  # type: ignore[func-returns-value, method-assign]
    with Peak("RssAnon") as peak:
        lgd.predict_by_layer(running, model, folder / "shares", folder / "rows.npy", budget_bytes=budget_bytes)
    return peak.added_bytes, held[0] - Bounds.read(folder / "shares").nodes.diff()[rank]


@pytest.mark.slow
@reads_memory
def test_neither_a_shard_nor_its_halo_is_held(tmp_path: Path) -> None:
    nodes, budget = 2_000_000, 64 << 20
    graph = lgd.Graph.from_edge_index(torch.randint(nodes, (2, 2 * nodes)), nodes, {"x": torch.rand(nodes, 5)})
    graph.node_arrays["z"] = torch.rand(nodes, 15)
    for name, whole in (("shares", graph), ("small", small_graph())):
        lgd.save_shards(whole, some_partition(whole, 2), tmp_path / name)
    for most, halo_nodes in run_ranks(most_memory, 2, tmp_path, budget, timeout=600):
        assert budget / 8 < most < 0.8 * budget
        assert min(nodes // 2, halo_nodes) * 4 * 20 > 0.7 * budget  # beside either, no batch would have fitted


# Evaluations of shards by layers are those of one process on the whole graph.


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_rows_of_shards(world_size: int, tmp_path: Path) -> None:
    graph = graph_of(uneven_data())
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, seed=0), tmp_path / "shards")
    depths = (3,) if world_size == 2 else (2, 4)
    names = [name for name in MODELS if name != "GraphNorm" and (world_size > 2 or name not in SLOW)]
    cases = [(name, num_layers) for name in names for num_layers in depths]
    found = run_ranks(evaluate, world_size, str(tmp_path / "shards"), "shards", cases)
    check_cases(cases, found)
    assert all(kinds == {"SeedBatch"} for _, _, kinds in found[0])


def sparse_shards(folder: Path) -> str:
    graph = graph_of(sparse_data())
    lgd.save_shards(graph, lgd.RandomPartitioner()(graph, 2, seed=0), folder / "shards")
    return str(folder / "shards")


def test_rows_of_layers_that_count_degrees(tmp_path: Path) -> None:
    where = sparse_shards(tmp_path)
    check_ranks([(name, where) for name in ("GCN 2", "APPNP")])


@pytest.mark.slow
def test_two_ranks_look_alike(tmp_path: Path) -> None:
    first, second = run_ranks(on_two_ranks, 2, sparse_shards(tmp_path))
    assert first == [(1, True), (0, False)]  # rank 0 tells
    assert second == [(0, True), (0, False)]


# By time: batches are compared in test_datamodule.py.


def begun(rank: int, world_size: int, folder: str) -> None:
    join(rank, world_size)
    by_time = lgd.TemporalSampler([3, 2], "edge_time", "time")
    data = placed(lgd.PartitionedDataModule(folder, sampler=by_time, batch_size=8), rank, world_size)
    data.setup("fit")


def one_is_missing(graph: lgd.Graph) -> None:
    last = some_partition(graph, 2).assignment.argsort(stable=True)[-1]
    graph.edge_arrays["edge_time"][graph.indptr[last]] = -(2**63)


def seeds_come_first(graph: lgd.Graph) -> None:
    graph.node_arrays["time"] -= 5000


SPOILT = [(one_is_missing, r"Shard 1: edge_time of edge \d+ is -2\*\*63"), (seeds_come_first, "No seed sees an event")]


@pytest.mark.parametrize(("spoil", "message"), SPOILT)
def test_what_is_wrong_with_one_shard_or_all_is_said_by_every_rank(tmp_path: Path, spoil: Any, message: str) -> None:
    graph = plain(0, "edges")
    graph.node_arrays |= {"y": torch.zeros(40), "train_mask": torch.ones(40, dtype=torch.bool)}
    spoil(graph)
    lgd.save_shards(graph, some_partition(graph, 2), tmp_path / "shards")
    with pytest.raises(RankError, match=message) as caught:
        run_ranks(begun, 2, str(tmp_path / "shards"))
    assert len(caught.value.failures) == 2
