"""What holds for every sampler of nodes."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import lightning.pytorch as pl
import pytest
import torch

from lightning_gnn_dist import (
    ClusterSampler,
    FastGCNSampler,
    Graph,
    LadiesSampler,
    NeighborSampler,
    PartitionedDataModule,
    RandomWalkSampler,
    ShadowSampler,
    WholePartSampler,
)
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine import sample as sample_module
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.larger_than_memory.device_sampler import DeviceSampler
from lightning_gnn_dist.sampling.base import Sampler
from lightning_gnn_dist.sampling.layer_wise import LayerSampler
from tests.pages import public
from tests.sage import SAGE
from tests.samplers import SAMPLERS, graph_for_all
from tests.sampling.neighborhoods import CHANGES, assert_same, damaged
from tests.sampling.reference import random_graph

SEEDS = [torch.randperm(400, generator=torch.Generator().manual_seed(i))[: 9 + i] for i in range(6)]
KEYS = [BatchKey(1, 2, 3 * i) for i in range(6)]
of_all = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


@pytest.fixture(scope="module")
def graph() -> Graph:
    return graph_for_all()


def test_the_list_has_every_sampler_of_nodes_that_the_package_offers() -> None:
    offered = {kind for name, kind in public().items() if name.endswith("Sampler")}
    assert offered - {Sampler, DeviceSampler} == {type(sampler) for sampler in SAMPLERS.values()}


@of_all
def test_a_batch_depends_on_its_key_alone(sampler: Sampler, graph: Graph) -> None:
    assert isinstance(sampler, Sampler)
    bulk = sampler.sample_bulk(graph, SEEDS, KEYS)
    with ThreadPoolExecutor(3) as threads:
        alone = list(threads.map(lambda ids, key: sampler.sample_bulk(graph, [ids], [key])[0], SEEDS, KEYS))
    copy = pickle.loads(pickle.dumps(sampler))
    assert copy == sampler
    assert hash(copy) == hash(sampler)
    assert_same(bulk, alone)
    assert_same(bulk, copy.sample_bulk(graph_for_all(), SEEDS, KEYS))


@of_all
def test_a_batch_is_a_piece_of_the_graph_with_its_seeds_first(sampler: Sampler, graph: Graph) -> None:
    rows = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
    edges = set(zip(graph.indices.tolist(), rows.tolist(), strict=True))
    for seeds, sample in zip(SEEDS, sampler.sample_bulk(graph, SEEDS, KEYS), strict=True):
        first = sample.nodes[: seeds.numel()]
        assert first.equal(seeds) or (type(sampler).__name__ == "WholePartSampler" and first.equal(seeds.sort().values))
        assert len(sample.num_sampled_nodes) == sampler.num_hops + 1
        assert sum(sample.num_sampled_nodes) == sample.nodes.numel()
        assert sum(sample.num_sampled_edges) == sample.indices.numel() == int(sample.indptr[-1])
        batch = assemble(graph, sample)
        assert len(batch.blocks) == sampler.num_hops
        assert batch.x.equal(graph.node_arrays["x"][batch.n_id])
        senders, receivers = batch.n_id[batch.edge_index].tolist()
        assert set(zip(senders, receivers, strict=True)) <= edges
        assert "edge_weight" in batch or batch.weight.numel() == len(senders)


@of_all
def test_no_seeds_are_an_empty_batch(sampler: Sampler, graph: Graph) -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    alone, first, second = sampler.sample_bulk(graph, [nobody, SEEDS[0], nobody], KEYS[:3])
    assert_same([first], sampler.sample_bulk(graph, [SEEDS[0]], KEYS[1:2]))
    for sample in (alone, second):
        assert sample.num_sampled_nodes[0] == 0
        assert assemble(graph, sample).batch_size == 0
    assert sampler.sample_bulk(graph, [], []) == []


@of_all
def test_nodes_without_edges_are_alone(sampler: Sampler, graph: Graph) -> None:
    bare = Graph(torch.zeros(401, dtype=torch.int64), graph.indices[:0], graph.node_arrays)
    bare.edge_arrays["weight"] = torch.empty(0)
    sample = sampler.sample_bulk(bare, [SEEDS[0]], KEYS[:1])[0]
    others = bare.num_nodes if isinstance(sampler, ClusterSampler | WholePartSampler) else SEEDS[0].numel()
    assert sample.nodes[:9].sort().values.equal(SEEDS[0].sort().values) and sample.nodes.numel() <= others
    assert sample.indices.numel() == 0 == sum(sample.num_sampled_edges)


@of_all
def test_every_batch_needs_a_key(sampler: Sampler, graph: Graph) -> None:
    with pytest.raises(ValueError, match="Each batch needs a key, got 1 lists of seeds and 0 keys"):
        sampler.sample_bulk(graph, SEEDS[:1], [])


@of_all
@pytest.mark.parametrize("seeds", [[400], [-1], [3, 3]])
def test_seeds_that_are_none_are_refused(sampler: Sampler, graph: Graph, seeds: list[int]) -> None:
    if seeds == [3, 3] and isinstance(sampler, ShadowSampler):
        pytest.skip("every seed has a neighbourhood of its own")
    with pytest.raises(ValueError, match=r"must lie in \[0, 400\)|must be distinct"):
        sampler.sample_bulk(graph, [torch.tensor(seeds)], KEYS[:1])


@pytest.mark.parametrize(
    "sampler",
    [*SAMPLERS.values(), DeviceSampler(NeighborSampler([-1, -1])), DeviceSampler(LadiesSampler([40]))],
    ids=repr,
)
@pytest.mark.parametrize("change", CHANGES)
def test_edges_that_point_out_of_the_graph_are_refused(sampler: Sampler, change: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match=r"indptr|indices"):
        sampler.sample_bulk(damaged(graph_for_all(), *change), [torch.arange(400)], KEYS[:1])


@pytest.mark.parametrize("sampler", [sampler for sampler in SAMPLERS.values() if sampler.num_hops == 2], ids=repr)
def test_a_model_learns_from_its_batches(sampler: Sampler, graph: Graph) -> None:
    data = PartitionedDataModule(graph, sampler=sampler, batch_size=60)
    blocks = not isinstance(sampler, LayerSampler | RandomWalkSampler)  # those give weights, and SAGE takes means
    model = SAGE(graph.node_arrays["x"].shape[1], int(graph.node_arrays["y"].max()) + 1, blocks=blocks)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False
    ).fit(model, data)
    assert torch.cat(model.trained).sort().values.equal(graph.split("train"))
    assert any(not value.equal(before[name]) for name, value in model.state_dict().items())
    assert model.evaluated[-1][1].isfinite().all()


FULL = [NeighborSampler([20, 20]), LadiesSampler([900, 700, 300]), FastGCNSampler([900, 700, 300]), ClusterSampler(2)]
FULL += [RandomWalkSampler(2, walk_length=3, visits=0), ShadowSampler([12, 5], 2)]


@pytest.mark.parametrize("sampler", FULL, ids=repr)
def test_both_tables_and_any_room_give_the_same_batch(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, samples = random_graph(3000, 90_000, seed=9), []
    graph.node_arrays["chunk"] = torch.arange(3000) * 7 % 5
    seeds = torch.randperm(3000, generator=torch.Generator().manual_seed(0))[:1000]
    for limit in (sample_module.DIRECT_NODES, 0):
        sample_module._THREAD.__dict__.clear()
        monkeypatch.setattr(sample_module, "DIRECT_NODES", limit)
        samples += [sampler.sample_bulk(graph, [seeds], KEYS[:1]) for _ in range(2)]
    for again in samples[1:]:
        assert_same(samples[0], again)
    assert samples[0][0].indices.numel() > 3000
