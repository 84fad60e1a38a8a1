"""The README's recipe, and others, on real graphs against one process: accuracy after as many passes over the labels.

    python benchmarks/recipe.py DIRECTORY --graphs cora dblp --ranks 2 4 --seeds 3 --passes 50

DIRECTORY is that of ``accuracy.py``. A two-layer GraphSAGE of hidden size 64, Adam 0.01, fan-out 15 and 10, batches of
1024 nodes on every rank. One process takes as many passes over the training nodes, in batches of 1024 from the whole
graph: the same data module with ``devices=1``. The accuracy is that of the weights at the end, on all test nodes of the
whole graph; in brackets the mean difference from one process in points, seed by seed, and the same with the weights of
the best of five validations.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import SAGE, Curve, load
from harness import keep
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch import Tensor
from torch.nn import functional

from lightning_gnn_dist import (
    Correction,
    EverySteps,
    Graph,
    GrappaStrategy,
    Halo,
    Isolated,
    Launch,
    LLCGStrategy,
    Loading,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    Overlapped,
    PartitionedDataModule,
    RandomPartitioner,
    StreamingPartitioner,
    SuperNodePartitioner,
)

ALONE = "one process"
SEEDS_OF_A_BATCH = 1024
STEPS_OF_A_ROUND = 16
FORK = Launch(start_method="fork")
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "local": lambda: LocalSGDStrategy(EverySteps(STEPS_OF_A_ROUND), launch=FORK),
    "llcg": lambda: LLCGStrategy(EverySteps(STEPS_OF_A_ROUND), launch=FORK),
    "local-overlap": lambda: LocalSGDStrategy(EverySteps(STEPS_OF_A_ROUND), reducer=Overlapped(), launch=FORK),
    "llcg-overlap": lambda: LLCGStrategy(EverySteps(STEPS_OF_A_ROUND), reducer=Overlapped(), launch=FORK),
    "llcg-share": lambda: LLCGStrategy(
        EverySteps(STEPS_OF_A_ROUND), correction=Correction(0.5, lr="local"), launch=FORK
    ),
    "grappa": lambda: GrappaStrategy(launch=FORK),
}
CUTS: dict[str, Callable[[int], Any]] = {
    "metis": lambda ranks: MetisPartitioner(),
    "supernodes": lambda ranks: SuperNodePartitioner(50 * ranks),
    "random": lambda ranks: RandomPartitioner(),
    "streaming": lambda ranks: StreamingPartitioner(),
    "streaming-supernodes": lambda ranks: SuperNodePartitioner(50 * ranks, StreamingPartitioner()),
}


class Module(SAGE):
    """That of the quick start, with a plain mean over the seeds as its loss."""

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])


class Outcome(pl.Callback):
    """Hands rank 0's accuracies to the process that forked it."""

    def __init__(self, curve: Curve, file: Path) -> None:
        self.curve, self.file = curve, file

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            points = self.curve.points
            best = max(points, key=lambda point: point[0])
            self.file.write_text(json.dumps({"test": points[-1][1], "best": best[1]}))


def run(graph: Graph, arm: str, ranks: int, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """One training. An arm is ``strategy:cut`` or ``strategy:cut:halo``."""
    strategy, cut, *halo = arm.split(":") if arm != ALONE else ("", "metis")
    pl.seed_everything(seed, verbose=False)
    data = PartitionedDataModule(
        graph,
        partitioner=CUTS[cut](ranks),
        sampler=NeighborSampler([15, 10]),
        batch_size=SEEDS_OF_A_BATCH,
        boundary=Halo() if halo else Isolated(),
        seed=seed,
        loading=Loading(num_threads=0),
    )
    epochs = options.passes
    if strategy not in ("", "grappa"):  # an epoch is a round
        train = graph.split("train")
        most = int(torch.bincount(data.partition(ranks).assignment[train]).max())
        steps = math.ceil(most / SEEDS_OF_A_BATCH) * options.passes
        epochs = 5 * math.ceil(steps / STEPS_OF_A_ROUND / 5)
    curve = Curve(graph, every=epochs // 5)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=STRATEGIES[strategy]() if strategy else SingleDeviceStrategy(torch.device("cpu")),
        max_epochs=epochs,
        callbacks=[curve, Outcome(curve, options.scratch)],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sizes = [graph.node_arrays["x"].shape[1], 64, int(graph.node_arrays["y"].max()) + 1]
    trainer.fit(Module(sizes, dropout=0.0), data)
    outcome: dict[str, float] = json.loads(options.scratch.read_text())
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["cora"])
    parser.add_argument("--arms", nargs="+", default=["grappa:metis:halo"], help="strategy:cut or strategy:cut:halo")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=50, help="over the training nodes, a multiple of 5")
    parser.add_argument("--scratch", type=Path, default=Path("recipe.tmp.json"), help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    arms = [(ALONE, 1), *((arm, ranks) for arm in options.arms for ranks in options.ranks)]
    titles = ["graph", "passes", "seeds", ALONE, *(f"{arm}, {ranks} ranks" for arm, ranks in arms[1:])]
    print(f"| {' | '.join(titles)} |\n|{' --- |' * len(titles)}")
    for name in options.graphs:
        found: dict[tuple[str, int], list[dict[str, float]]] = {arm: [] for arm in arms}
        for seed in range(options.seeds):
            graph = Graph.from_pyg(load(options.directory, name, seed))
            for arm, ranks in arms:
                settings = {"graph": name, "arm": arm, "ranks": ranks, "seed": seed, "passes": options.passes}
                found[arm, ranks].append(kept(options.out, settings) or run(graph, arm, ranks, seed, options))
                if not kept(options.out, settings):
                    keep(options.out, settings | found[arm, ranks][-1])
        cells = [cell(outcomes, found[ALONE, 1]) for outcomes in found.values()]
        print(f"| {' | '.join([name, str(options.passes), str(options.seeds), *cells])} |", flush=True)
    options.scratch.unlink(missing_ok=True)


def kept(file: Path | None, settings: dict[str, Any]) -> dict[str, float]:
    """The outcome of these settings in the file of an earlier call; empty if they are not there."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file and file.exists() else []
    return next(({"test": row["test"], "best": row["best"]} for row in rows if settings.items() <= row.items()), {})


def cell(outcomes: list[dict[str, float]], alone: list[dict[str, float]]) -> str:
    """The mean accuracy over the seeds, and the mean differences from one process with the same seeds."""
    accuracy = f"{statistics.mean(outcome['test'] for outcome in outcomes):.3f}".lstrip("0")
    if outcomes is alone:
        return accuracy
    at_end, at_best = (
        statistics.mean(100 * (outcome[key] - other[key]) for outcome, other in zip(outcomes, alone, strict=True))
        for key in ("test", "best")
    )
    return f"{accuracy} ({at_end:+.1f}, {at_best:+.1f})"


if __name__ == "__main__":
    main()
