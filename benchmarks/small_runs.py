"""CPU seconds of small fits, and what of them is this package's own, in turns with another checkout of it.

    git worktree add ../before COMMIT
    python benchmarks/small_runs.py --against ../before --pairs 6

The graph and the model of ``lightning-gnn-dist demo``, four forked ranks, 240 steps, 60 rounds of four. The ranks'
seconds are those from the first step to the last. "Own" are the seconds of rank 1's main thread in meetings and in what
strategies do at a step, less the forward and backward passes in them, and its collections of garbage.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

STRATEGIES = ("llcg", "local_sgd", "grappa")
RANKS, ROUNDS, STEPS = 4, 60, 4


class Own:
    """Adds up the seconds of some functions in this thread, each counted once, with a sign."""

    def __init__(self) -> None:
        self.seconds, self._depth, self._start = 0.0, 0, 0.0
        gc.callbacks.append(self._collect)

    def watch(self, owner: Any, name: str, sign: int) -> None:
        """Count a function (+1), or leave it out of those that call it (-1)."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if sign < 0 and not self._depth:
                return function(*args, **kwargs)
            start, self._depth = time.thread_time(), self._depth + sign
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += sign * (time.thread_time() - start)
                self._depth -= sign

        setattr(owner, name, timed)

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._start = time.thread_time()
        elif not self._depth:  # else it is counted already
            self.seconds += time.thread_time() - self._start


def fit(name: str, folder: Path) -> None:
    """Train by a strategy; every rank leaves its seconds in the folder."""
    import lightning.pytorch as pl
    import torch

    from lightning_gnn_dist import (
        EverySteps,
        GrappaStrategy,
        Launch,
        LLCGStrategy,
        LocalSGDStrategy,
        NeighborSampler,
        PartitionedDataModule,
        communities,
    )
    from lightning_gnn_dist.cli.demo import SAGE
    from lightning_gnn_dist.rounds import correction_gradients, meeting
    from lightning_gnn_dist.strategies import grappa, in_step

    own = Own()
    for owner, function in (
        (meeting.MeetingCallback, "on_train_batch_end"),
        (meeting.MeetingCallback, "on_before_optimizer_step"),
        (grappa.GrappaStrategy, "on_train_batch_start"),
        (grappa.GrappaStrategy, "backward"),
        (in_step.StepCallback, "on_train_batch_end"),
        (in_step.StepCallback, "on_train_epoch_end"),
    ):
        own.watch(owner, function, 1)
    for owner, function in (
        (correction_gradients, "_of_any_size"),
        (torch.autograd, "grad"),
        (torch.Tensor, "backward"),
    ):
        own.watch(owner, function, -1)

    class Clock(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.start, own.seconds = time.process_time(), 0.0

        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            weights = float(sum(each.detach().double().abs().sum() for each in pl_module.parameters()))
            found = {"cpu": time.process_time() - self.start, "own": own.seconds, "weights": weights}
            (folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))

    torch.set_num_threads(1)
    launch, clock = Launch(start_method="fork"), EverySteps(STEPS)
    strategies: dict[str, Callable[[], Any]] = {
        "llcg": lambda: LLCGStrategy(clock, launch=launch),
        "local_sgd": lambda: LocalSGDStrategy(clock, launch=launch),
        "grappa": lambda: GrappaStrategy(launch=launch),
    }
    graph = communities(10_000)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=256, seed=0)
    pl.seed_everything(0, verbose=False)
    length = {"max_epochs": -1, "max_steps": ROUNDS * STEPS} if name == "grappa" else {"max_epochs": ROUNDS}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    options: dict[str, Any] = {"accelerator": "cpu", "devices": RANKS, "callbacks": [Clock()], **quiet, **length}
    trainer = pl.Trainer(strategy=strategies[name](), **options)
    trainer.fit(SAGE(graph.node_arrays["x"].shape[1], int(graph.node_arrays["y"].max()) + 1), data)


def measured(name: str, checkout: Path) -> dict[str, float]:
    """The seconds of one fit with the package of a checkout, in processes of its own."""
    variables = os.environ | {"PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", name, "--folder", folder]
        done = subprocess.run(command, env=variables, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    return {"cpu": sum(rank["cpu"] for rank in ranks), "own": ranks[1]["own"], "weights": ranks[0]["weights"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).parents[1]
    parser.add_argument("--against", type=Path, default=here, help="the checkout from before a change")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--one", choices=STRATEGIES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        warnings.simplefilter("ignore")
        for logger in ("lightning.pytorch", "lightning.fabric"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        fit(options.one, options.folder)
        return
    pairs: dict[str, list[tuple[dict[str, float], dict[str, float]]]] = {name: [] for name in STRATEGIES}
    start = os.getloadavg()[0]
    for _ in range(options.pairs):
        for name, found in pairs.items():
            found.append((measured(name, options.against), measured(name, here)))
    print(f"{options.pairs} pairs, load {start:.0f} to {os.getloadavg()[0]:.0f}")
    print(
        "| | CPU-s of four ranks, before | after | ratio | own CPU-s of a rank, before | after | ratio | same weights |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, found in pairs.items():
        cells = []
        for key in ("cpu", "own"):
            cells += [f"{statistics.median(pair[at][key] for pair in found):.2f}" for at in (0, 1)]
            ratios = sorted(after[key] / before[key] for before, after in found)
            cells.append(f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})")
        same = all(before["weights"] == after["weights"] for before, after in found)
        print(f"| {name} | {' | '.join(cells)} | {'yes' if same else 'no'} |")


if __name__ == "__main__":
    main()
