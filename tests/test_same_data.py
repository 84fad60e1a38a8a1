"""Ranks that have not the same data are told so when a fit starts, by every strategy."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from lightning_gnn_dist import Graph, Holding, Partition, PartitionedDataModule, Redeal, communities
from tests.data_fitting import model, trainer
from tests.every_strategy import every_strategy
from tests.ranks import run_ranks


@dataclass(frozen=True)
class Undecided:
    """A partitioner whose result depends on who asks."""

    def __call__(self, graph: Graph, num_parts: int, seed: int) -> Partition:
        generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
        return Partition(torch.randint(num_parts, (graph.num_nodes,), generator=generator).int(), num_parts)


STRATEGIES = every_strategy()
OTHERS = {
    "edges": r"Ranks \[1\] have another graph than rank 0",
    "mask": r"Ranks \[1\] have another graph than rank 0",
    "x": r"Ranks \[1\] have other features, labels or further arrays than rank 0",
    "y": r"Ranks \[1\] have other features, labels or further arrays than rank 0",
    "partition": r"Ranks \[1\] deal out the nodes otherwise than rank 0",
    "partitioner": r"Ranks \[1\] deal out the nodes otherwise than rank 0",
    "seed": r"All ranks need the same seed, and theirs are \[0, 1\]: give the same to each\.",
    "last digits": "",
}


def different_data(rank: int, world_size: int, folder: Path) -> dict[tuple[str, str], str]:
    """What each strategy says to ranks that have not the same."""
    said = {}
    for what, strategy in [
        *((what, "local_sgd") for what in OTHERS),
        *product(("y", "partition"), [name for name in STRATEGIES if name != "local_sgd"]),
    ]:
        graph = communities(600, 4, num_features=12, train_share=0.15, seed=3 + rank * (what == "edges"))
        options: dict[str, Any] = {"holding": Holding(cache_dir=folder / f"{what}{rank}")}
        if what == "mask":
            graph.node_arrays["test_mask"][rank] ^= True
        if what in ("x", "y"):
            graph.node_arrays[what] = graph.node_arrays[what].roll(rank, 0)
        if what == "last digits":
            graph.node_arrays["x"] *= 1 + 1e-6 * rank
        if what == "partition":
            options["partitioner"] = Partition(((torch.arange(600) + rank) % 2).int(), 2)
        if what == "partitioner":
            options["partitioner"] = Undecided()
        if what == "seed":
            options |= {"holding": Holding(Redeal(24)), "seed": rank}
        data = PartitionedDataModule(graph, batch_size=100, **options)
        said[what, strategy] = outcome(lambda d=data, s=strategy: fit_once(d, world_size, STRATEGIES[s]()))  # type: ignore[misc]
    return said


def fit_once(data: PartitionedDataModule, world_size: int, strategy: Any) -> None:
    trainer(world_size, strategy, max_epochs=1, limit_val_batches=0).fit(model(), data)


def outcome(function: Callable[[], None]) -> str:
    try:
        function()
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_different_data_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(different_data, 2, tmp_path):
        for (what, strategy), message in said.items():
            assert re.match(OTHERS[what], message) and bool(message) == bool(OTHERS[what]), (what, strategy, message)
