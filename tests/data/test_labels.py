"""Batches have labels of their seeds alone, whoever made them, or of all nodes where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Fetch,
    Graph,
    LinkDataModule,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    communities,
    split_edges,
)
from lightning_gnn_dist.sampling.base import Sampler
from tests.samplers import SAMPLERS, graph_for_all

LABELS = {
    "classes": torch.randint(5, (200,)),
    "small": torch.randint(5, (200, 3)).to(torch.uint8),
    "several": torch.rand(200, 4) < 0.5,
    "targets": torch.rand(200, 2),
    "halves": torch.rand(200, 2).half(),
}


def batches_of(data: Any) -> Iterator[Any]:
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader(), data.predict_dataloader()):
        yield from loader
    yield from data.anchor_batches(0)
    yield from data.correction_batches(0, stop=2)
    data.teardown("fit")


def check(batch: Any, y: Tensor, *, all_labels: bool) -> None:
    nodes = batch.n_id if all_labels else batch.n_id[: batch.batch_size]
    assert batch.y.equal(y[nodes])
    assert len(batch.get("val_mask", batch.x)) == batch.num_nodes


REFUSES_ALL = "temporal"  # would show a seed labels that come after its time
CASES = [(sampler, wanted) for name, sampler in SAMPLERS.items() for wanted in (False, name != REFUSES_ALL)]


@pytest.mark.parametrize(("sampler", "all_labels"), dict.fromkeys(CASES), ids=repr)
def test_batches_of_all_samplers(sampler: Sampler, all_labels: bool) -> None:
    graph = graph_for_all()
    loading = Loading(all_labels=all_labels, num_threads=0)
    data = PartitionedDataModule(graph, sampler=sampler, batch_size=60, loading=loading)
    sizes = set()
    for batch in batches_of(data):
        check(batch, graph.node_arrays["y"], all_labels=all_labels)
        sizes.add(len(batch.y) < batch.num_nodes)
    assert (True in sizes) != all_labels


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_any_type(kind: str, tmp_path: Any) -> None:
    plain = communities(200, 4, num_features=4)
    y = LABELS[kind]
    graph = Graph(plain.indptr, plain.indices, {**plain.node_arrays, "y": y})
    graph.save(tmp_path / "graph")
    for source in (graph, tmp_path / "graph"):
        data = PartitionedDataModule(source, sampler=NeighborSampler([3]), batch_size=20, boundary=Fetch())
        for batch in batches_of(data):
            check(batch, y.float() if y.is_floating_point() else y, all_labels=False)


def test_batches_of_links() -> None:
    split = split_edges(communities(200, 4, num_features=4), 0.1, 0.1, negatives=2)
    for batch in batches_of(LinkDataModule(split, sampler=NeighborSampler([3, 2]), batch_size=30)):
        check(batch, split.graph.node_arrays["y"], all_labels=False)
