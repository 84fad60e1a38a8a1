"""Batches of every sampler in one process: of a graph in RAM and in files, of a part, of links of every kind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

import lightning_gnn_dist as lgd
from tests.golden.graphs import AT, BACK, CITES, PRINTS, SPLITS, WRITES, dense, plain, simple, typed
from tests.golden.place import AT_ONCE, Place
from tests.golden.runs import Run
from tests.golden.tally import Tally, content_of
from tests.samplers import SAMPLERS

BY_TIME = lgd.TemporalSampler([4, 3], "edge_time", "time")
PLAIN: dict[str, Any] = SAMPLERS | {
    "fastgcn_normalized": lgd.FastGCNSampler([40, 30], normalize=True),
    "ladies_normalized": lgd.LadiesSampler([40, 30], weight="weight", normalize=True),
    "neighbor_weighted_replaced": lgd.NeighborSampler([4, 3], replace=True, weight="weight"),
    "temporal_edges": BY_TIME,
    "temporal_equal": replace(BY_TIME, equal=True),
    "temporal_latest": replace(BY_TIME, pick="latest"),
    "temporal_all": replace(BY_TIME, num_neighbors=[-1, -1]),
    "walk_weighted": lgd.RandomWalkSampler(2, walk_length=3, weight="weight", visits=3),
    "walk_unweighted": lgd.RandomWalkSampler(2, visits=0),
}
OF_TYPES = lgd.TemporalSampler([3, 2], "time")
OF_EACH = {CITES: [4, 2], WRITES: [3, 2], BACK: [0, 2], AT: [1, 1], PRINTS: [1, 0]}
TYPED: dict[str, Any] = {
    "neighbor": lgd.NeighborSampler([3, 2]),
    "neighbor_all": lgd.NeighborSampler([-1, -1]),
    "neighbor_replaced": lgd.NeighborSampler([3, 2], replace=True),
    "neighbor_of_types": lgd.NeighborSampler(OF_EACH | {CITES: [4, 0], PRINTS: [1, -1]}),
    "shadow": lgd.ShadowSampler([3, 2], num_hops=2),
    "walk": lgd.RandomWalkSampler(2, visits=0),
    "whole": lgd.WholePartSampler(2),
    "temporal": OF_TYPES,
    "temporal_equal": replace(OF_TYPES, equal=True),
    "temporal_latest": replace(OF_TYPES, pick="latest"),
    "temporal_of_types": lgd.TemporalSampler(OF_EACH, "time", pick="latest"),
}
EQUAL = {
    "events": lgd.TemporalSampler([4, 3], "edge_time", equal=True),
    "typed_events": lgd.TemporalSampler([3, 2], "time", equal=True, pick="latest"),
}
LOADINGS: dict[str, lgd.Loading] = {
    "bulk_of_3_in_background": lgd.Loading(bulk_size=3),
    "two_threads": lgd.Loading(num_threads=2),
    "all_labels": lgd.Loading(num_threads=0, all_labels=True),
    "not_widened": lgd.Loading(num_threads=0, widen=False),
    "cache_of_files": lgd.Loading(cache_bytes=20_000),
}
OTHERS = {
    "evaluation": lgd.Evaluation(batch_size=20, sampler=lgd.NeighborSampler([6, 5])),
    "global_batching": lgd.GlobalBatching(batch_size=50, sampler=lgd.NeighborSampler([5, 4])),
}


def show_batches(tally: Tally, data: Any, *, predicts: bool = True) -> None:
    """Two passes of training, evaluation, predictions, corrections and anchors."""
    data.setup("fit")
    loader = data.train_dataloader()
    phases = {"train": [*loader, *loader], "val": data.val_dataloader(), "test": data.test_dataloader()}
    if predicts:
        phases["predict"] = data.predict_dataloader()
    phases |= {"corrections": data.correction_batches(1, stop=3), "anchors": data.anchor_batches(1)}
    for phase, batches in phases.items():
        for batch in batches:
            tally.add(phase, content_of(batch))
    data.teardown("fit")


def of_nodes(graph: str, store: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    show_batches(tally, place.nodes(graph, store, **options))


def of_links(split: str, store: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    show_batches(tally, place.links(split, store, **options), predicts="events" not in split)


def of_graph(make: Callable[[], lgd.Graph], tally: Tally, place: Place) -> None:
    options: dict[str, Any] = {"sampler": lgd.NeighborSampler([4, 3]), "batch_size": 32, "loading": AT_ONCE}
    show_batches(tally, lgd.PartitionedDataModule(make(), holding=lgd.Holding(cache_dir=place.own), **options))


def changed(arrays: dict[str, Tensor]) -> lgd.Graph:
    graph = plain()
    return lgd.Graph(graph.indptr, graph.indices, graph.node_arrays | arrays, graph.edge_arrays)


GRAPHS: dict[str, Callable[[], lgd.Graph]] = {
    "plain/float16": lambda: changed({"x": plain().node_arrays["x"].half()}),
    "plain/from_pyg": lambda: lgd.Graph.from_pyg(simple().to_pyg()),
    "typed/from_pyg": lambda: lgd.Graph.from_pyg(dense()),
    "typed/with_seeds": lambda: typed().with_seeds("paper"),
}


def runs() -> Iterator[Run]:
    for store in ("ram", "files"):
        for name, sampler in PLAIN.items():
            yield Run(f"batches/plain/{name}/{store}", partial(of_nodes, "plain", store, {"sampler": sampler}))
        for name, sampler in TYPED.items():
            for graph in ("typed", "timed") if name in ("neighbor", "temporal", "temporal_latest") else ("typed",):
                run = partial(of_nodes, graph, store, {"sampler": sampler})
                yield Run(f"batches/{graph}/{name}/{store}", run)
        for split in SPLITS:
            yield Run(f"batches/links/{split}/{store}", partial(of_links, split, store, {}))
    for split in SPLITS:
        more = {"num_negatives": 3} if "label" not in split else {"sampler": lgd.NeighborSampler([-1, 2])}
        if "events" not in split:
            yield Run(f"batches/links/{split}/more", partial(of_links, split, "ram", more))
    for split, equal in EQUAL.items():
        yield Run(f"batches/links/{split}/equal", partial(of_links, split, "ram", {"sampler": equal}))
    for name, loading in LOADINGS.items():
        for graph in ("plain", "typed"):
            if loading.cache_bytes and graph == "typed":
                continue  # its rows have less than 32 bytes
            store = "files" if loading.cache_bytes else "ram"
            yield Run(f"batches/{graph}/loading/{name}", partial(of_nodes, graph, store, {"loading": loading}))
    for graph in ("plain", "typed"):
        yield Run(f"batches/{graph}/settings", partial(of_nodes, graph, "ram", OTHERS))
    for name, make in GRAPHS.items():
        yield Run(f"batches/{name}", partial(of_graph, make))
