"""A data module may be pickled and copied, before and after a fit: the copy is one at rest, with the same batches."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import (
    LinkDataModule,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    TemporalSampler,
    WholePartSampler,
    save_shards,
    split_edges,
)
from tests.batch_contents import contents, is_same
from tests.data_fitting import model, small_graph, trainer
from tests.typed_sage import typed_graph_of_papers


def pickled(data: Any) -> Any:
    return pickle.loads(pickle.dumps(data))


def modules(folder: Path) -> dict[str, Any]:
    graph, whole = small_graph(), RandomPartitioner()
    split = split_edges(graph)
    graph.save(folder / "graph")
    split.save(folder / "split")
    save_shards(graph, whole(graph, 1, 0), folder / "shards")
    save_shards(split, whole(split.graph, 1, 0), folder / "link_shards")
    return {
        "graph": PartitionedDataModule(graph, batch_size=30),
        "saved graph": PartitionedDataModule(folder / "graph", batch_size=30, loading=Loading(cache_bytes=1 << 12)),
        "split": LinkDataModule(split, batch_size=500),
        "saved split": LinkDataModule(folder / "split", batch_size=500),
        "shards": PartitionedDataModule(folder / "shards", batch_size=30),
        "shards of a split": LinkDataModule(folder / "link_shards", batch_size=500),
    }


def of_a_run(data: Any) -> list[Any]:
    """Batches of training and validation, in the midst of which nothing is torn down."""
    data.setup("fit")
    return [batch.n_id.tolist() for load in (data.train_dataloader, data.val_dataloader) for batch in load()]


def test_copies_have_the_same_batches(tmp_path: Path) -> None:
    for name, data in modules(tmp_path).items():
        fresh = pickled(data)
        there = of_a_run(data)
        running = copy.deepcopy(data)
        data.teardown("fit")
        for made in (fresh, running, pickled(data)):
            assert of_a_run(made) == there, name
            made.teardown("fit")


PAPERS = typed_graph_of_papers(200)
MADE: dict[str, Callable[..., Any]] = {
    "nodes": partial(PartitionedDataModule, small_graph(), batch_size=30),
    "types": partial(PartitionedDataModule, PAPERS, sampler=NeighborSampler([4, 3]), batch_size=32),
    "times": partial(PartitionedDataModule, PAPERS, sampler=TemporalSampler([4, 3], "time"), batch_size=32),
    "links": partial(LinkDataModule, split_edges(small_graph()), batch_size=500),
    "links of whole parts": partial(LinkDataModule, split_edges(small_graph()), sampler=WholePartSampler(2)),
    "typed links": partial(LinkDataModule, split_edges(PAPERS, edge_type=("author", "writes", "paper")), batch_size=99),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_threads_and_bulks_change_nothing(make: Callable[..., Any]) -> None:
    def made(loading: Loading, **options: Any) -> list[Any]:
        loader = make(loading=loading, **options).train_dataloader()
        return [contents(batch) for batch in (*loader, *islice(loader.stream(3), 3))]

    plain = made(Loading(num_threads=0, bulk_size=1))
    assert is_same(made(Loading(num_threads=2, bulk_size=4)), plain)
    assert not is_same(made(Loading(), seed=1), plain)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
def test_after_a_fit_a_copy_has_neither_trainer_nor_model() -> None:
    data = PartitionedDataModule(small_graph(), batch_size=30)
    trainer(1, max_epochs=1).fit(model(), data)
    assert data.figures["data/waited_seconds"] > 0  # of the fit that is over
    again = pickle.loads(written := pickle.dumps(data))
    assert b"SAGE" not in written and again.trainer is None and again.figures["data/waited_seconds"] == 0
    trainer(1, max_epochs=1).fit(model(), again)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:You defined a `validation_step`", "ignore:The '.*_dataloader' does not have many")
def test_lightning_spawns_ranks_with_it() -> None:
    module = model()
    before = [weight.clone() for weight in module.parameters()]
    fit = trainer(2, "ddp_spawn", max_epochs=1, limit_val_batches=0)
    fit.fit(module, PartitionedDataModule(small_graph(), partitioner=RandomPartitioner(), batch_size=30))
    assert not all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))
