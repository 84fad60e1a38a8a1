"""Batches of every sampler in one process: of a graph in RAM and in files, of a part, of links of every kind."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_gnn_dist import (
    Evaluation,
    FastGCNSampler,
    GlobalBatching,
    Graph,
    Holding,
    LadiesSampler,
    Loading,
    NeighborSampler,
    PartitionedDataModule,
    RandomWalkSampler,
    ShadowSampler,
    TemporalSampler,
    WholePartSampler,
)
from lightning_gnn_dist.graph.convert import quantize_rows
from lightning_gnn_dist.sampling.matrix import MatrixSampler
from tests.golden.graphs import AT, BACK, CITES, PRINTS, SPLITS, WRITES, dense, plain, simple, typed
from tests.golden.place import AT_ONCE, Place
from tests.golden.runs import Run
from tests.golden.tally import Tally, content_of
from tests.samplers import SAMPLERS

BY_TIME = TemporalSampler([4, 3], "edge_time", "time")
PLAIN: dict[str, Any] = SAMPLERS | {
    "fastgcn_normalized": FastGCNSampler([40, 30], normalize=True),
    "ladies_normalized": LadiesSampler([40, 30], weight="weight", normalize=True),
    "matrix_ladies": MatrixSampler(LadiesSampler([40, 30])),
    "neighbor_weighted_replaced": NeighborSampler([4, 3], replace=True, weight="weight"),
    "temporal_edges": BY_TIME,
    "temporal_equal": replace(BY_TIME, equal=True),
    "temporal_latest": replace(BY_TIME, pick="latest"),
    "temporal_replaced": replace(BY_TIME, replace=True),
    "temporal_window": replace(BY_TIME, last=9),
    "temporal_all": replace(BY_TIME, num_neighbors=[-1, -1]),
    "walk_weighted": RandomWalkSampler(2, walk_length=3, weight="weight", visits=3),
    "walk_unweighted": RandomWalkSampler(2, visits=0),
}
OF_TYPES = TemporalSampler([3, 2], "time")
TYPED: dict[str, Any] = {
    "neighbor": NeighborSampler([3, 2]),
    "neighbor_all": NeighborSampler([-1, -1]),
    "neighbor_replaced": NeighborSampler([3, 2], replace=True),
    "neighbor_of_types": NeighborSampler({CITES: [4, 0], WRITES: [3, 2], BACK: [0, 2], AT: [1, 1], PRINTS: [1, -1]}),
    "shadow": ShadowSampler([3, 2], num_hops=2),
    "walk": RandomWalkSampler(2, visits=0),
    "whole": WholePartSampler(2),
    "temporal": OF_TYPES,
    "temporal_equal": replace(OF_TYPES, equal=True),
    "temporal_latest": replace(OF_TYPES, pick="latest"),
    "temporal_replaced": replace(OF_TYPES, replace=True),
    "temporal_window": replace(OF_TYPES, last=7),
    "temporal_of_types": TemporalSampler(
        {CITES: [4, 2], WRITES: [3, 2], BACK: [0, 2], AT: [1, 1], PRINTS: [1, 0]}, "time", pick="latest"
    ),
}
LOADINGS: dict[str, Loading] = {
    "bulk_of_3_in_background": Loading(bulk_size=3),
    "two_threads": Loading(num_threads=2),
    "all_labels": Loading(num_threads=0, all_labels=True),
    "not_widened": Loading(num_threads=0, widen=False),
    "cache_of_files": Loading(cache_bytes=20_000),
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


def of_graph(make: Callable[[], Graph], tally: Tally, place: Place) -> None:
    options: dict[str, Any] = {"sampler": NeighborSampler([4, 3]), "batch_size": 32, "loading": AT_ONCE}
    show_batches(tally, PartitionedDataModule(make(), holding=Holding(cache_dir=place.own), **options))


def narrow() -> Graph:
    """Features in int8 with a scale for each row."""
    graph = plain()
    arrays = dict(graph.node_arrays)
    values, scale = quantize_rows(arrays.pop("x"))
    return Graph(graph.indptr, graph.indices, arrays | {"x": values, "x_scale": scale}, graph.edge_arrays)


def half() -> Graph:
    graph = plain()
    arrays = graph.node_arrays | {"x": graph.node_arrays["x"].half()}
    return Graph(graph.indptr, graph.indices, arrays, graph.edge_arrays)


GRAPHS: dict[str, Callable[[], Graph]] = {
    "plain/int8": narrow,
    "plain/float16": half,
    "plain/from_pyg": lambda: Graph.from_pyg(simple().to_pyg()),
    "typed/from_pyg": lambda: Graph.from_pyg(dense()),
    "typed/with_seeds": lambda: typed().with_seeds("paper"),
}


def runs() -> Iterator[Run]:
    for store in ("ram", "files"):
        for name, sampler in PLAIN.items():
            graph = "simple" if isinstance(sampler, MatrixSampler) else "plain"
            yield Run(f"batches/plain/{name}/{store}", partial(of_nodes, graph, store, {"sampler": sampler}))
        for name, sampler in TYPED.items():
            for graph in ("typed", "timed") if name in ("neighbor", "temporal", "temporal_latest") else ("typed",):
                run = partial(of_nodes, graph, store, {"sampler": sampler})
                yield Run(f"batches/{graph}/{name}/{store}", run)
        for split in SPLITS:
            yield Run(f"batches/links/{split}/{store}", partial(of_links, split, store, {}))
    for split in SPLITS:
        more = {"num_negatives": 3} if "label" not in split else {"sampler": NeighborSampler([-1, 2])}
        if "events" not in split:
            yield Run(f"batches/links/{split}/more", partial(of_links, split, "ram", more))
    equal = TemporalSampler([4, 3], "edge_time", equal=True)
    yield Run("batches/links/events/equal", partial(of_links, "events", "ram", {"sampler": equal}))
    equal = TemporalSampler([3, 2], "time", equal=True, pick="latest")
    yield Run("batches/links/typed_events/equal", partial(of_links, "typed_events", "ram", {"sampler": equal}))
    for name, loading in LOADINGS.items():
        for graph in ("plain", "typed"):
            if loading.cache_bytes and graph == "typed":
                continue  # its rows have less than 32 bytes
            store = "files" if loading.cache_bytes else "ram"
            yield Run(f"batches/{graph}/loading/{name}", partial(of_nodes, graph, store, {"loading": loading}))
    estimate = Evaluation(batch_size=20, sampler=NeighborSampler([6, 5]))
    others = {"evaluation": estimate, "global_batching": GlobalBatching(batch_size=50, sampler=NeighborSampler([5, 4]))}
    yield Run("batches/plain/settings", partial(of_nodes, "plain", "ram", others))
    yield Run("batches/typed/settings", partial(of_nodes, "typed", "ram", others))
    for name, make in GRAPHS.items():
        yield Run(f"batches/{name}", partial(of_graph, make))
