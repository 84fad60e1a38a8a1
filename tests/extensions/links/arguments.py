"""Valid calls of what links bring."""

from collections.abc import Callable
from functools import cache
from typing import Any

from lightning_gnn_dist import LinkDataModule, LinkSplit, Loading, split_edges
from tests.arguments import Calls, World

RIGHT_OF: dict[tuple[str, str], set[str]] = {("LinkSplit", "edges"): set()}


@cache
def split_of(world: World) -> LinkSplit:
    split = split_edges(world.graph, negatives=2)
    split.save(world.folder / "split")
    return split


def instances(world: World) -> dict[str, Callable[[], Any]]:
    links = LinkDataModule(split_of(world), batch_size=8, loading=Loading(num_threads=0))
    return {"LinkSplit": lambda: split_of(world), "LinkDataModule": lambda: links}


def calls(world: World) -> Calls:
    split = split_of(world)
    return {
        "LinkDataModule": lambda: {"split": split},
        "LinkSplit": lambda: {"graph": split.graph, "edges": split.edges, "negatives": split.negatives},
        "LinkSplit.open": lambda: {"path": world.folder / "split"},
        "LinkSplit.save": lambda: {"path": world.new()},
        "split_edges": lambda: {"graph": world.graph, "negatives": 2},
    }
