"""What holds for every sampler of nodes."""

import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lightning_gnn_dist as lgd
from lightning_gnn_dist.batches.pool import gather_rows
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine import sample as sample_module
from lightning_gnn_dist.engine.sample import BatchKey, Sample
from lightning_gnn_dist.graph.graph_report import report_of
from lightning_gnn_dist.sampling.base import Sampler
from tests.samplers import SAMPLERS, graph_for_all, of_extensions
from tests.sampling.neighborhoods import CHANGES, assert_same, damaged, edge_index_of
from tests.sampling.reference import random_graph

SEEDS = [torch.randperm(400, generator=torch.Generator().manual_seed(i))[: 9 + i] for i in range(6)]
KEYS = [BatchKey(1, 2, 3 * i) for i in range(6)]
of_all = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


@pytest.fixture(scope="module")
def graph() -> lgd.Graph:
    return graph_for_all()


def test_the_list_has_every_sampler_of_nodes_that_the_package_offers() -> None:
    offered = {getattr(lgd, name) for name in vars(lgd)["__all__"] if name.endswith("Sampler")}
    assert offered - {Sampler} <= {type(sampler) for sampler in SAMPLERS.values()}


@of_all
def test_a_batch_depends_on_its_key_alone(sampler: Sampler, graph: lgd.Graph) -> None:
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
def test_a_batch_is_a_piece_of_the_graph_with_its_seeds_first(sampler: Sampler, graph: lgd.Graph) -> None:
    edges = set(zip(*edge_index_of(graph).tolist(), strict=True))
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
def test_no_seeds_are_an_empty_batch(sampler: Sampler, graph: lgd.Graph) -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    alone, first, second = sampler.sample_bulk(graph, [nobody, SEEDS[0], nobody], KEYS[:3])
    assert_same([first], sampler.sample_bulk(graph, [SEEDS[0]], KEYS[1:2]))
    for sample in (alone, second):
        assert sample.num_sampled_nodes[0] == 0
        assert assemble(graph, sample).batch_size == 0
    assert sampler.sample_bulk(graph, [], []) == []


@of_all
def test_nodes_without_edges_are_alone(sampler: Sampler, graph: lgd.Graph) -> None:
    bare = lgd.Graph(torch.zeros(401, dtype=torch.int64), graph.indices[:0], graph.node_arrays)
    bare.edge_arrays["weight"] = torch.empty(0)
    sample = sampler.sample_bulk(bare, [SEEDS[0]], KEYS[:1])[0]
    others = bare.num_nodes if isinstance(sampler, lgd.ClusterSampler | lgd.WholePartSampler) else SEEDS[0].numel()
    assert sample.nodes[:9].sort().values.equal(SEEDS[0].sort().values) and sample.nodes.numel() <= others
    assert sample.indices.numel() == 0 == sum(sample.num_sampled_edges)


@of_all
def test_batches_without_a_key_and_seeds_that_are_none_are_refused(sampler: Sampler, graph: lgd.Graph) -> None:
    with pytest.raises(ValueError, match="Each batch needs a key, got 1 lists of seeds and 0 keys"):
        sampler.sample_bulk(graph, SEEDS[:1], [])
    apart = tuple(map(type, of_extensions("APART")))  # every seed has a neighbourhood of its own
    for seeds in ([400], [-1], *[[3, 3]] * (not isinstance(sampler, apart))):
        with pytest.raises(ValueError, match=r"must lie in \[0, 400\)|must be distinct"):
            sampler.sample_bulk(graph, [torch.tensor(seeds)], KEYS[:1])


@of_all
def test_edges_that_point_out_of_the_graph_are_refused(sampler: Sampler) -> None:
    for change in CHANGES:
        with pytest.raises(ValueError, match=r"indptr|indices"):
            sampler.sample_bulk(damaged(graph_for_all(), *change), [torch.arange(400)], KEYS[:1])


FULL = [lgd.NeighborSampler([20, 20]), lgd.LadiesSampler([900, 700, 300]), lgd.FastGCNSampler([900, 700, 300])]
FULL += [lgd.ClusterSampler(2), *of_extensions("LARGE")]


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


# Arrays that are changed after the graph was checked: no loop reads out of bounds, and a sentence says so.


def halves(graph: lgd.Graph) -> lgd.Partition:
    return lgd.Partition((torch.arange(graph.num_nodes) % 2).to(torch.int32), 2)


WHOLE: dict[str, Callable[[lgd.Graph], Any]] = {
    "METIS": lambda graph: lgd.MetisPartitioner()(graph, 2, 0),
    "streaming": lambda graph: lgd.StreamingPartitioner()(graph, 2, 0),
    "a report": lambda graph: halves(graph).report(graph),
    "a graph's report": report_of,
}


@pytest.mark.parametrize("use", WHOLE.values(), ids=WHOLE)
def test_what_reads_all_edges_looks_first(use: Callable[[lgd.Graph], Any]) -> None:
    for change in CHANGES:
        with pytest.raises(ValueError, match=r"indptr|indices"):
            use(damaged(lgd.communities(400), *change))


def test_rows_that_an_array_lacks_are_refused() -> None:
    with pytest.raises(IndexError, match=r"Rows 0 to 400 are asked for of an array that has 400"):
        gather_rows(torch.zeros(400, 1000), torch.arange(401))


KEY = BatchKey(0, 0, 0)
ROWS = lgd.Graph(torch.tensor([0, 1, 2]), torch.tensor([5, 6]), num_senders=10)
NEED_ALL_ROWS: dict[str, Callable[[], Any]] = {
    "sampler": lambda: lgd.WholePartSampler(2).sample_bulk(ROWS, [torch.tensor([0])], [KEY]),
    "partitioner": lambda: WHOLE["METIS"](ROWS),
    "report": lambda: WHOLE["a report"](ROWS),
}


@pytest.mark.parametrize("call", NEED_ALL_ROWS.values(), ids=NEED_ALL_ROWS)
def test_rows_of_a_larger_graph_are_no_graph(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="has rows for 2 nodes, and edges from 10: it is a shard"):
        call()


def test_seeds_of_no_known_kind_are_refused() -> None:
    for seeds, message in (
        (torch.ones(2, dtype=torch.int64, device="meta"), "lies on the device 'meta'"),
        (torch.tensor([1], dtype=torch.uint64), "uint64, which cannot be computed with"),
    ):
        with pytest.raises(ValueError, match=f"The seeds of a batch .*{message}"):
            lgd.NeighborSampler([2]).sample_bulk(lgd.communities(40, 2), [seeds], [KEY])


def test_as_many_chunks_as_no_machine_holds_are_refused() -> None:
    graph = lgd.communities(40, 2)
    graph.node_arrays["chunk"] = torch.full((40,), 2**40)
    with pytest.raises(ValueError, match="chunk holds the number 1099511627776"):
        lgd.ClusterSampler(1).sample_bulk(graph, [torch.tensor([0])], [KEY])


@dataclass(frozen=True)
class OfOthers:
    """A sampler of one's own, which changes what another draws."""

    changed: Callable[[list[Sample]], list[Sample]]
    num_hops: int = 1

    def sample_bulk(self, graph: lgd.Graph, seeds: list[torch.Tensor], keys: list[BatchKey]) -> list[Sample]:
        return self.changed(lgd.NeighborSampler([2]).sample_bulk(graph, seeds, keys))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (
            lambda drawn: [each._replace(nodes=each.nodes.sort().values) for each in drawn],
            r"first.*seeds \[1, 0\]",
        ),
        (lambda drawn: [each._replace(num_sampled_nodes=[len(each.nodes), 0]) for each in drawn], "as hop 0"),
        (lambda drawn: [each._replace(num_sampled_edges=[0]) for each in drawn], "and 0 of 4 edges"),
        (lambda drawn: drawn[:1], "a sample for each batch, got 1 for 2"),
    ],
)
def test_a_sampler_of_ones_own_returns_what_batches_are_made_of(changed: Any, words: str, graph: lgd.Graph) -> None:
    lgd.PartitionedDataModule(graph, sampler=OfOthers(list))
    with pytest.raises(ValueError, match=f"OfOthers.sample_bulk.. must .*{words}"):
        lgd.PartitionedDataModule(graph, sampler=OfOthers(changed))
