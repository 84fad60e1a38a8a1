"""Batches of edges across shards are those of the module that has the whole graph, bit for bit."""

from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from lightning_gnn_dist import (
    Evaluation,
    Fetch,
    GlobalBatching,
    Halo,
    Isolated,
    LinkDataModule,
    LinkSplit,
    Loading,
    NeighborSampler,
    Partition,
    TemporalSampler,
    save_shards,
)
from lightning_gnn_dist.batches.global_batches import GlobalBatches, OwnSeeds
from lightning_gnn_dist.graph.typed.names import have_names
from tests.batch_contents import check_same
from tests.extensions.shards.graphs import joined
from tests.extensions.shards.links.splits import (
    CITES,
    PEERS,
    WRITES,
    as_shards_have_it,
    content,
    directed_split,
    events_split,
    labelled_split,
    of_shards,
    of_whole,
    papers,
    priced_split,
    typed_events_split,
    typed_split,
    undirected_split,
    unequal,
)
from tests.ranks import run_ranks

OPTIONS: dict[str, Any] = {"sampler": NeighborSampler([4, 3]), "batch_size": 48, "seed": 2}
OWN = GlobalBatching(deal="own", batch_size=31)
Made = dict[str, list[dict[str, Any]]]


def made_by(data: Any, corrections: Any) -> Made:
    """Two passes of training batches, corrections, anchors, and the evaluation."""
    made = {"train": list(map(content, islice(data.train_dataloader().stream(0), 2 * data._num_batches())))}
    made["corrections"] = list(map(content, corrections(3)))
    made["anchors"] = list(map(content, data.anchor_batches(2)))
    made["val"] = list(map(content, data.val_dataloader()))
    return made


def on_shards(rank: int, world_size: int, folder: str, options: dict[str, Any]) -> Made:
    with joined(rank, world_size):
        data = of_shards(folder, rank, world_size, global_batching=OWN, **options)
        data.setup("fit")
        made = made_by(data, lambda round_idx: data.correction_batches(round_idx, stop=3))
        data.teardown("fit")
    return made


def own_corrections(data: LinkDataModule, rank: int, num_ranks: int) -> Any:
    """Batches of the whole graph of which each rank deals the edges into its part."""
    graph, owner = data._home.whole, data.partition(num_ranks).assignment
    seeds = data._task.of_corrections()
    receivers = (graph.indptr[1:, None] <= seeds).sum(0)
    own = seeds[owner[receivers] == rank]
    settings = OWN.batch_size, data.seed, 1
    dealt = OwnSeeds(own, own, seeds.numel(), rank, num_ranks)
    return lambda round_idx: GlobalBatches(
        data._home.whole_source(data._task.across(data._running.settings.of_corrections())), dealt, *settings
    ).of_round(round_idx, rank, num_ranks, stop=3)


PER_TYPE = NeighborSampler({kind: [3, 2] for kind in papers().types.edge_types})  # type: ignore[union-attr]
BY_TIME = TemporalSampler([4, 3], "edge_time")
OF_TYPES = TemporalSampler([3, 2], "time", pick="latest")
CASES: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "alone": (1, undirected_split, {}),
    "two": (2, directed_split, {"num_negatives": 2}),
    "three": (3, undirected_split, {"loading": Loading(bulk_size=3, ahead_bytes=0, cache_bytes=0)}),
    "four": (4, undirected_split, {"num_negatives": 3, "loading": Loading(bulk_size=1, cache_bytes=900)}),
    "labels": (2, labelled_split, {}),
    "labels shown": (3, lambda: labelled_split(hide=False), {"loading": Loading(num_threads=0)}),
    "isolated": (2, undirected_split, {"boundary": Isolated(), "num_negatives": 2}),
    "halo": (3, directed_split, {"boundary": Halo(1)}),
    "labels isolated": (2, labelled_split, {"boundary": Isolated()}),
    "labels in halos": (2, labelled_split, {"boundary": Halo(2)}),
    "typed alone": (1, partial(typed_split, WRITES), {}),
    "typed": (3, partial(typed_split, WRITES), {"num_negatives": 2, "sampler": PER_TYPE}),
    "typed, one type": (2, partial(typed_split, CITES), {"loading": Loading(bulk_size=1, cache_bytes=900)}),
    "typed, both ways": (2, partial(typed_split, PEERS), {"batch_size": 3}),
    "typed labels": (2, priced_split, {"loading": Loading(cache_bytes=0)}),
    "typed labels shown": (3, lambda: priced_split(hide=False), {"loading": Loading(ahead_bytes=0)}),
    "typed, isolated": (2, partial(typed_split, WRITES), {"boundary": Isolated()}),
    "typed, halo": (2, partial(typed_split, CITES), {"boundary": Halo(1), "num_negatives": 2}),
    "typed labels in halos": (2, priced_split, {"boundary": Halo(1)}),
    "events alone": (1, events_split, {"sampler": BY_TIME}),
    "events": (3, events_split, {"sampler": BY_TIME, "num_negatives": 3, "loading": Loading(cache_bytes=0)}),
    "events, equal times": (2, events_split, {"sampler": replace(BY_TIME, equal=True)}),
    "events both ways": (3, partial(events_split, both_ways=True), {"sampler": replace(BY_TIME, equal=True)}),
    "events, isolated": (2, events_split, {"sampler": BY_TIME, "boundary": Isolated()}),
    "events in halos": (2, events_split, {"sampler": BY_TIME, "boundary": Halo(1), "num_negatives": 2}),
    "labelled events": (2, partial(events_split, labels="edge_price", negatives=None), {"sampler": BY_TIME}),
    "typed events": (3, typed_events_split, {"sampler": OF_TYPES, "num_negatives": 3}),
    "typed events, equal times": (2, typed_events_split, {"sampler": replace(OF_TYPES, equal=True)}),
    "typed events in halos": (2, typed_events_split, {"sampler": OF_TYPES, "boundary": Halo(1)}),
}


QUICK = ("alone", "typed labels shown", "typed events")


@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in CASES])
def test_batches_are_those_of_the_whole_graph(tmp_path: Path, case: str) -> None:
    world_size, make, options = CASES[case]
    split: LinkSplit = make()
    partition = unequal(split.graph, world_size)
    save_shards(split, partition, tmp_path / "shards")
    whole, parts = as_shards_have_it(split, partition)
    options = OPTIONS | {"evaluation": Evaluation(batch_size=20)} | options
    results = run_ranks(on_shards, world_size, str(tmp_path / "shards"), options)
    for rank, found in enumerate(results):
        expected = by_one_host(whole, parts, rank, world_size, options)
        for kind, batches in expected.items():
            assert batches, kind
            check_same(found[kind], batches)


def by_one_host(split: LinkSplit, parts: Partition, rank: int, num_ranks: int, options: dict[str, Any]) -> Made:
    others = {name: value for name, value in options.items() if name != "loading"}
    boundary = options.get("boundary", Fetch())
    data = of_whole(split, parts, rank, num_ranks, **(others | {"boundary": boundary}))
    made = made_by(data, own_corrections(data, rank, num_ranks))
    if (
        not isinstance(boundary, Fetch) and num_ranks > 1 and not have_names(split.graph.types)
    ):  # a part calls nodes by its own ids
        n_id = split.graph.node_arrays["n_id"]
        for batch in (*made["train"], *made["anchors"]):
            batch["n_id"] = n_id[batch["n_id"]]
    return made
