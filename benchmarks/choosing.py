"""What ``lightning-gnn-dist choose`` chooses, beside eight named choices: time to accuracy on real graphs and wires.

    python benchmarks/choosing.py DIRECTORY curves --out choosing.jsonl        # accuracy after so many steps
    sudo python benchmarks/choosing.py DIRECTORY seconds --out choosing.jsonl  # of a step on each wire; and the choice
    python benchmarks/choosing.py DIRECTORY show --out choosing.jsonl

DIRECTORY is that of ``accuracy.py``. What a run learns does not depend on the wire, so the accuracy after so many local
steps is measured once for each graph, choice and seed, and the seconds of a step on each wire by themselves, between
two network namespaces, where a loss takes a stated time as in ``two_sites.py``, with a fan-out of 1, so that what else
the machine does weighs little. Two ranks, a two-layer GraphSAGE of hidden size 64, Adam 0.01, fan-out 15 and 10,
batches of 1024 nodes, the default boundary and partitioners. Runs that the file holds are not run again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import Curve, load
from harness import keep, machine
from recipe import Module
from torch import Tensor

from lightning_gnn_dist import AutoStrategy, Graph, Launch, Loading, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.strategies.choosing.choices import CHOICES, SHORT, Choice
from lightning_gnn_dist.strategies.choosing.costs import choose
from lightning_gnn_dist.strategies.choosing.probe import QUIET, probe

ROOT = Path(__file__).resolve().parents[1]
RANKS = 2
WIRES: dict[str, dict[str, str]] = {
    "loopback": {},
    "1 Gbit/s": {"RATE": "1gbit"},
    "100 Mbit/s, 20 ms": {"RATE": "100", "ROUND_TRIP": "20"},
}


class StepsCurve(Curve):
    """After every meeting, or as many steps where there is none."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, RoundStrategy):
            super().on_train_epoch_end(trainer, pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if not isinstance(trainer.strategy, RoundStrategy) and trainer.global_step % SHORT == 0:
            super().on_train_epoch_end(trainer, pl_module)


class Outcome(pl.Callback):
    """Hands rank 0's curve to the process that forked it."""

    def __init__(self, curve: Curve, file: Path) -> None:
        self.curve, self.file = curve, file

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            self.file.write_text(json.dumps(self.curve.points))


class Watch(pl.Callback):
    """Notes when steps have ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends.append(time.monotonic())


class Timed(Module):
    """Its losses take a stated time."""

    seconds = 0.0

    def training_step(self, batch: Any) -> Tensor:
        start = time.monotonic()
        loss = super().training_step(batch)
        time.sleep(max(0.0, start + self.seconds - time.monotonic()))
        return loss


def data_of(graph: Graph, seed: int, fanout: int = 15) -> PartitionedDataModule:
    sampler = NeighborSampler([fanout, min(10, fanout)])
    return PartitionedDataModule(graph, sampler=sampler, batch_size=1024, seed=seed, loading=Loading(num_threads=0))


def sizes_of(graph: Graph) -> list[int]:
    return [graph.node_arrays["x"].shape[1], 64, int(graph.node_arrays["y"].max()) + 1]


def length_of(choice: Choice, steps: int) -> dict[str, int]:
    if choice.steps is None:
        return {"max_epochs": 10**6, "max_steps": steps}
    return {"max_epochs": -(-steps // choice.steps)}


def curves(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # before anything is forked
    for name, seed, choice in product(options.graphs, range(options.seeds), CHOICES):
        settings = {"curve": choice, "graph": name, "seed": seed, "steps": options.steps}
        if not kept(options.out, settings):
            graph = Graph.from_pyg(load(options.directory, name, seed))
            points = curve_of(graph, CHOICES[choice], seed, options)
            keep(options.out, settings | {"points": points})
            print(name, seed, choice, f"{max(points)[1]:.3f}", flush=True)


def curve_of(graph: Graph, choice: Choice, seed: int, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return accuracy on validation and test nodes after every round, or every 16 steps."""
    pl.seed_everything(seed, verbose=False)
    curve = StepsCurve(graph, every=1)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=RANKS,
        strategy=choice.strategy(Launch(start_method="fork")),
        callbacks=[curve, Outcome(curve, options.scratch)],
        **QUIET,
        **length_of(choice, options.steps),  # type: ignore[arg-type]
    )
    trainer.fit(Module(sizes_of(graph), dropout=0.0), data_of(graph, seed))
    found: list[tuple[float, float]] = json.loads(options.scratch.read_text())
    return found


def seconds(options: argparse.Namespace) -> None:
    print(machine(), flush=True)
    for name, wire in product(options.graphs, options.wires):
        settings = {"wire": wire, "graph": name, "milliseconds": options.milliseconds}
        if not kept(options.out, settings):
            keep(options.out, settings | on_two_hosts(name, WIRES[wire], options))


def on_two_hosts(name: str, variables: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    command = [str(ROOT / "benchmarks" / "two_hosts.sh"), __file__, str(options.directory), "rank", "--graphs", name]
    command += [f"--milliseconds={options.milliseconds}"]
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=os.environ | more | variables, capture_output=True, text=True, check=False)
    rows = [line for line in said.stdout.splitlines() if line.startswith("{")]
    if said.returncode or not rows:
        raise SystemExit(said.stdout + said.stderr)
    found: dict[str, Any] = json.loads(rows[0])
    print(name, *variables.values(), found["chosen"], found["seconds"], flush=True)
    return found


def be_rank(options: argparse.Namespace) -> None:
    """Be a rank, which probes the fit and then times each choice; rank 0 says what it has found."""
    torch.set_num_threads(1)
    graph = Graph.from_pyg(load(options.directory, options.graphs[0], 0))
    data, module = data_of(graph, 0, fanout=1), Timed(sizes_of(graph), dropout=0.0)
    module.seconds = options.milliseconds / 1000
    ranks = {"accelerator": "cpu", "devices": 1, "num_nodes": RANKS}
    trainer = pl.Trainer(strategy=AutoStrategy(), **QUIET, **ranks)
    measured = probe(trainer, module, data, Launch()).measured
    found = {name: seconds_of_step(choice, module, data, ranks) for name, choice in CHOICES.items()}
    if trainer.is_global_zero:
        predicted = {name: measured.seconds_of_step(choice) for name, choice in CHOICES.items()}
        print(json.dumps({"chosen": choose(measured).name, "seconds": found, "predicted": predicted}), flush=True)


def seconds_of_step(choice: Choice, module: Module, data: PartitionedDataModule, ranks: dict[str, Any]) -> float:
    """Return the seconds of a step with its share of a meeting, without the first round, which begins everything."""
    first = choice.steps or SHORT
    watch, rounds = Watch(), 3 if first == SHORT else 2
    length = length_of(choice, first * rounds)
    pl.Trainer(strategy=choice.strategy(), callbacks=[watch], **QUIET, **ranks, **length).fit(module, data)
    return (watch.ends[-1] - watch.ends[first - 1]) / (len(watch.ends) - first)


def show(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    steps, best = {}, {}
    for name in options.graphs:
        steps[name], best[name] = to_accuracy([row for row in rows if "curve" in row and row["graph"] == name])
    titles = ["graph", "wire", "chosen", "times the fastest", "points from the best", *CHOICES]
    print(f"| {' | '.join(titles)} |")
    print("|---" * (5 + len(CHOICES)) + "|")
    for row in (row for row in rows if "wire" in row and row["graph"] in options.graphs):
        name, chosen = row["graph"], row["chosen"]
        times = {choice: steps[name][choice] * row["seconds"][choice] for choice in CHOICES}
        points = 100 * (best[name][chosen] - max(best[name].values()))
        cells = [name, row["wire"], chosen, f"{times[chosen] / min(times.values()):.2f}", f"{points:+.1f}"]
        cells += [f"{each:.0f} s" for each in times.values()]
        print(f"| {' | '.join(cells)} |")
    print("\nSteps to accuracy, and accuracy at its best validation:\n")
    for name, choice in product(options.graphs, CHOICES):
        print(f"| {name} | {choice} | {steps[name][choice]:.0f} | {best[name][choice]:.3f} |")


def to_accuracy(rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return for each choice the steps until a point below the median choice's best accuracy, and its own best.

    Both are means over seeds. What never comes so far counts as if it came after twice the steps.
    """
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CHOICES}
    for seed in {row["seed"] for row in rows}:
        of_seed = {row["curve"]: row for row in rows if row["seed"] == seed}
        if of_seed.keys() != CHOICES.keys():
            continue
        best = {name: max(row["points"])[1] for name, row in of_seed.items()}
        target = statistics.median(best.values()) - 0.01
        for name, row in of_seed.items():
            found[name].append((next(reached(row, target), 2 * row["steps"]), best[name]))
    means = {name: [statistics.mean(column) for column in zip(*pairs, strict=True)] for name, pairs in found.items()}
    return {name: mean[0] for name, mean in means.items()}, {name: mean[1] for name, mean in means.items()}


def reached(row: dict[str, Any], target: float) -> Iterator[float]:
    points = row["points"]
    return (row["steps"] / len(points) * number for number, (_, test) in enumerate(points, 1) if test >= target)


def kept(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The run with these settings in the file; empty if it is not there."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((row for row in rows if settings.items() <= row.items()), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    whats = {"curves": curves, "seconds": seconds, "show": show, "rank": be_rank}
    parser.add_argument("what", choices=whats)
    parser.add_argument("--graphs", nargs="+", default=["cora", "amazon_computers", "dblp"])
    parser.add_argument("--wires", nargs="+", default=[*WIRES], choices=[*WIRES])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=320, help="local steps of a curve, a multiple of 64")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="that a loss takes where steps are timed")
    parser.add_argument("--scratch", type=Path, default=Path("choosing.tmp.json"), help="may be overwritten")
    parser.add_argument("--out", type=Path, default=Path("choosing.jsonl"), help="the runs, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    whats[options.what](options)


if __name__ == "__main__":
    main()
