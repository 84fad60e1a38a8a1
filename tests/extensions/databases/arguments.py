"""Valid calls of what recommends by a task of a database."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_gnn_dist import LinkDataModule, prepare_graph
from lightning_gnn_dist.extensions.links.ranking import Recommended
from tests.arguments import Calls, World
from tests.extensions.databases.folders import write_shop

RIGHT_OF: dict[tuple[str, str], set[str]] = {}


@cache
def shop_of(world: World) -> Path:
    write_shop(world.folder / "shop", 24, 6)
    prepare_graph(world.folder / "shop", world.folder / "shop_graph")
    return world.folder / "shop_graph"


def instances(world: World) -> dict[str, Callable[[], Any]]:
    return {"LinkDataModule.named": lambda: LinkDataModule(shop_of(world), task="buys")}


def calls(world: World) -> Calls:
    ids = torch.tensor([0])
    return {"LinkDataModule.named": lambda: {"found": Recommended(ids, ids[:, None], torch.ones(1, 1))}}
