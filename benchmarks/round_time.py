"""What a correction costs in time: seconds a round with each strategy over seconds with averaging alone, in one run.

    python benchmarks/round_time.py --repeats 3
    python benchmarks/round_time.py --graph DIRECTORY        # a graph saved by Graph.save

Two ranks, METIS parts, two-layer GraphSAGE of hidden size 256, fan-out 15 and 10, batches of 1024, K = 64 local steps
a round. "Waiting" is the share of a rank's time inside collectives: for the slower one, and for the bytes. Strategies
take turns, so that other work on the machine falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import SAGE
from harness import machine
from lightning.pytorch.strategies import Strategy

from lightning_gnn_dist import (
    Correction,
    EverySteps,
    Graph,
    Isolated,
    Launch,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    communities,
)
from lightning_gnn_dist.wire.collectives import traffic

LAUNCH = Launch(start_method="fork")
STRATEGIES: dict[str, Callable[[EverySteps], Strategy]] = {
    "averaging": lambda clock: LocalSGDStrategy(clock, launch=LAUNCH),
    "LLCG, paper, S=1, rank 0": lambda clock: LLCGStrategy.as_published(
        clock, correction=Correction.as_published(way="rank0"), launch=LAUNCH
    ),
    "LLCG, paper, S=1, sliced": lambda clock: LLCGStrategy.as_published(clock, launch=LAUNCH),
    "LLCG, default": lambda clock: LLCGStrategy(clock, launch=LAUNCH),
    "LLCG, S=K/10": lambda clock: LLCGStrategy(clock, correction=Correction(0.1, lr="local"), launch=LAUNCH),
}


class Clock(pl.Callback):
    """Each rank's seconds a round, and what of them it spent in collectives, without the first round."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.start = time.perf_counter(), traffic.seconds

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        seconds, waited = time.perf_counter() - self.start[0], traffic.seconds - self.start[1]
        rounds = trainer.current_epoch - 1
        own = {"seconds": seconds / rounds, "waiting": waited / seconds}
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(own))


def measure(graph: Graph, name: str, options: argparse.Namespace) -> tuple[float, list[float]]:
    folder = Path(tempfile.mkdtemp())
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=STRATEGIES[name](EverySteps(options.steps)),
        max_epochs=options.rounds + 1,
        callbacks=[Clock(folder)],
        limit_val_batches=0,
        enable_checkpointing=False,
        **quiet,
    )
    data = PartitionedDataModule(graph, sampler=NeighborSampler([15, 10]), batch_size=1024, boundary=Isolated())
    sizes = [graph.node_arrays["x"].shape[1], 256, int(graph.node_arrays["y"].max()) + 1]
    trainer.fit(SAGE(sizes, dropout=0.5), data)
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    return max(rank["seconds"] for rank in ranks), [rank["waiting"] for rank in ranks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--graph", type=Path)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(machine())
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    graph = communities(200_000, 40, num_features=128) if options.graph is None else Graph.open(options.graph)
    runs: dict[str, list[tuple[float, list[float]]]] = {name: [] for name in STRATEGIES}
    for _ in range(options.repeats):
        for name in STRATEGIES:
            runs[name].append(measure(graph, name, options))
    averaging = [seconds for seconds, _ in runs["averaging"]]
    print(f"{'strategy':26} seconds a round  over averaging  waiting, by rank")
    for name, outcomes in runs.items():
        ratio = statistics.median(s / base for (s, _), base in zip(outcomes, averaging, strict=True))
        waiting = [statistics.median(shares) for shares in zip(*(shares for _, shares in outcomes), strict=True)]
        seconds = statistics.median(s for s, _ in outcomes)
        print(f"{name:26} {seconds:14.2f} {ratio:15.2f}  {', '.join(f'{share:.1%}' for share in waiting)}")


if __name__ == "__main__":
    main()
