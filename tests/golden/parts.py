"""Partitions, the parts that ranks hold, and splits of edges and of nodes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import lightning_gnn_dist as lgd
from tests.golden.graphs import SPLITS
from tests.golden.place import GRAPHS, Place
from tests.golden.runs import Run
from tests.golden.tally import Tally

PARTITIONERS: dict[str, Any] = {
    "metis": lgd.MetisPartitioner(),
    "metis_train": lgd.MetisPartitioner(balance="train"),
    "random": lgd.RandomPartitioner(),
    "supernodes": lgd.SuperNodePartitioner(12),
    "supernodes_default": lgd.SuperNodePartitioner(),
    "streaming": lgd.StreamingPartitioner(),
    "streaming_random": lgd.StreamingPartitioner(order="random"),
    "streaming_supernodes": lgd.SuperNodePartitioner(12, clusters=lgd.StreamingPartitioner()),
}
HELD: dict[str, dict[str, Any]] = {
    "fixed": {"holding": lgd.Holding(lgd.Fixed())},
    "rotate": {"holding": lgd.Holding(lgd.Rotate())},
    "redeal": {"holding": lgd.Holding(lgd.Redeal(12))},
    "extra_nodes": {"holding": lgd.Holding(extra_nodes=0.3)},
    "halo": {"boundary": lgd.Halo()},
    "halo_of_bytes": {"boundary": lgd.Halo(2, bytes=5_000)},
    "coverage_of_batches": {"coverage": lgd.Coverage("batch", shrinkage=2.0, prior=0.5)},
}


def cut(graph: str, name: str, tally: Tally, place: Place) -> None:
    for count in (2, 3, 5):
        partition = PARTITIONERS[name](GRAPHS[graph](), count, 3)
        tally.add(f"{count} parts", partition.assignment)
        tally.say(f"report of {count}", str(partition.report(GRAPHS[graph]())))


def held(graph: str, options: dict[str, Any], tally: Tally, place: Place) -> None:
    data = place.nodes(graph, "ram", **options)
    for rank in range(3):
        for super_epoch in range(3):
            show_graph(tally, f"rank {rank}", data.part(rank, 3, super_epoch))


def show_graph(tally: Tally, name: str, graph: lgd.Graph) -> None:
    """All arrays, whether there are types or not; a part of a typed graph has arrays of all nodes beside them."""
    tally.add(name, graph)
    tally.add(f"{name} {graph.num_nodes > 0} sizes", [graph.num_nodes, graph.num_edges, graph.num_bytes])
    tally.say(f"{name} said", str(graph))


def split(name: str, tally: Tally, place: Place) -> None:
    made = SPLITS[name]()
    show_graph(tally, "graph", made.graph)
    tally.add("edges", made.edges)
    tally.add("negatives", made.negatives)
    tally.add("held arrays", made.held_arrays)
    tally.say("said", f"{made.undirected} {made.edge_type} {made.reverse} {made.labels} True {made.time}")


def built(make: Any, tally: Tally, place: Place) -> None:
    show_graph(tally, "graph", make())


def runs() -> Iterator[Run]:
    for graph in ("plain", "typed"):
        for name in PARTITIONERS:
            yield Run(f"parts/{graph}/{name}", partial(cut, graph, name))
        for name, options in HELD.items():
            yield Run(f"held/{graph}/{name}", partial(held, graph, options))
        yield Run(f"graphs/{graph}/in_time", partial(built, lambda graph=graph: lgd.split_by_time(GRAPHS[graph]())))
        yield Run(f"graphs/{graph}", partial(built, GRAPHS[graph]))
    yield Run("graphs/timed", partial(built, GRAPHS["timed"]))
    yield Run("graphs/communities", partial(built, lambda: lgd.communities(500, 3, num_features=4)))
    yield Run("graphs/citations", partial(built, lambda: lgd.citations(300, 2)))
    for name in SPLITS:
        yield Run(f"splits/{name}", partial(split, name))
