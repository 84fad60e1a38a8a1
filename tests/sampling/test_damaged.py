"""Arrays that are changed after the graph was checked: no loop reads out of bounds, and a sentence says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_gnn_dist import (
    ClusterSampler,
    Graph,
    MetisPartitioner,
    NeighborSampler,
    Partition,
    StreamingPartitioner,
    WholePartSampler,
    communities,
    save_shards,
    split_edges,
)
from lightning_gnn_dist.batches.pool import gather_rows
from lightning_gnn_dist.engine.rng import key
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.extensions.links.negatives import draw_receivers, has_edges
from lightning_gnn_dist.graph.graph_report import report_of
from tests.sampling.neighborhoods import CHANGES, damaged

NUM_NODES = 400


def halves(graph: Graph) -> Partition:
    return Partition((torch.arange(NUM_NODES) % 2).to(torch.int32), 2)


WHOLE: dict[str, Callable[[Graph], Any]] = {
    "METIS": lambda graph: MetisPartitioner()(graph, 2, 0),
    "streaming": lambda graph: StreamingPartitioner()(graph, 2, 0),
    "a report": lambda graph: halves(graph).report(graph),
    "a graph's report": report_of,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", WHOLE.values(), ids=WHOLE)
def test_what_reads_all_edges_looks_first(use: Callable[[Graph], Any], change: tuple[str, int, int]) -> None:
    with pytest.raises(ValueError, match=r"indptr|indices"):
        use(damaged(communities(NUM_NODES), *change))


@pytest.mark.parametrize("change", CHANGES)
def test_negatives_stay_in_the_graph(change: tuple[str, int, int]) -> None:
    graph, nodes = damaged(communities(NUM_NODES), *change), torch.arange(NUM_NODES)
    receivers, _ = draw_receivers(graph, nodes[None], nodes, 3, key(0, 0, 0, 0))
    assert int(receivers.min()) >= 0 and int(receivers.max()) < NUM_NODES
    has_edges(graph, torch.stack([nodes, nodes]))


def test_edges_are_checked_whatever_is_said_of_them() -> None:
    with pytest.raises(ValueError, match=r"indices must lie in \[0, 2\), got 0 to 5"):
        Graph(torch.tensor([0, 1, 2]), torch.tensor([0, 5]), fingerprint="00")


def test_rows_that_an_array_lacks_are_refused() -> None:
    with pytest.raises(IndexError, match=r"Rows 0 to 400 are asked for of an array that has 400"):
        gather_rows(torch.zeros(400, 1000), torch.arange(401))


ROWS = Graph(torch.tensor([0, 1, 2]), torch.tensor([5, 6]), num_senders=10)
NEED_ALL_ROWS: dict[str, Callable[[], Any]] = {
    "sampler": lambda: WholePartSampler(2).sample_bulk(ROWS, [torch.tensor([0])], [BatchKey(0, 0, 0)]),
    "partitioner": lambda: MetisPartitioner()(ROWS, 2, 0),
    "report": lambda: Partition(torch.tensor([0, 1], dtype=torch.int32), 2).report(ROWS),
    "links": lambda: split_edges(ROWS, 0.5, 0.0),
    "shards": lambda: save_shards(ROWS, Partition(torch.tensor([0, 1], dtype=torch.int32), 2), "nowhere"),
}


@pytest.mark.parametrize("call", NEED_ALL_ROWS.values(), ids=NEED_ALL_ROWS)
def test_rows_of_a_larger_graph_are_no_graph(call: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="has rows for 2 nodes, and edges from 10: it is a shard"):
        call()


@pytest.mark.parametrize(
    ("seeds", "message"),
    [
        (torch.ones(2, dtype=torch.int64, device="meta"), "lies on the device 'meta'"),
        (torch.tensor([1], dtype=torch.uint64), "uint64, which cannot be computed with"),
    ],
)
def test_seeds_of_no_known_kind_are_refused(seeds: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"The seeds of a batch .*{message}"):
        NeighborSampler([2]).sample_bulk(communities(40, 2), [seeds], [BatchKey(0, 0, 0)])


def test_as_many_chunks_as_no_machine_holds_are_refused() -> None:
    graph = communities(40, 2)
    graph.node_arrays["chunk"] = torch.full((40,), 2**40)
    with pytest.raises(ValueError, match="chunk holds the number 1099511627776"):
        ClusterSampler(1).sample_bulk(graph, [torch.tensor([0])], [BatchKey(0, 0, 0)])
