"""What ``lightning-gnn-dist choose`` chooses, beside eight named choices: time to accuracy on real graphs and wires.

    python benchmarks/choosing.py DIRECTORY curves --out choosing.jsonl        # accuracy after so many steps
    python benchmarks/choosing.py DIRECTORY progress --out choosing.jsonl      # of averaged steps, as a probe finds it
    python benchmarks/choosing.py DIRECTORY count --out choosing.jsonl         # seconds of a step, from bytes and wires
    sudo python benchmarks/choosing.py DIRECTORY seconds --out choosing.jsonl  # the same by the clock; and the choice
    python benchmarks/choosing.py DIRECTORY show --out choosing.jsonl

DIRECTORY is that of ``accuracy.py``. What a run learns does not depend on the wire, so the accuracy after so many local
steps is measured once for each graph, choice and seed, and the seconds of a step on each wire by themselves: ``count``
has them from the bytes of the model, the wire and the stated time of a loss, whatever else the machine does, and
``seconds`` between two network namespaces, where a loss takes that time as in ``two_sites.py``, with a fan-out of 1.
Two ranks, a two-layer GraphSAGE of hidden size 64, Adam 0.01, fan-out 15 and 10, batches of 1024 nodes, the default
boundary and partitioners. Runs that the file holds are not run again. ``show --without_own`` chooses on each graph by
the passes that choices needed on all others.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from accuracy import Curve, load
from harness import keep, machine
from recipe import Module
from torch import Tensor

from lightning_gnn_dist import AutoStrategy, Graph, Launch, Loading, NeighborSampler, PartitionedDataModule
from lightning_gnn_dist.rounds.round_strategy import RoundStrategy
from lightning_gnn_dist.strategies.choosing.choices import CHOICES, SHORT, Choice
from lightning_gnn_dist.strategies.choosing.costs import Measured, Priced, Steps, taken
from lightning_gnn_dist.strategies.choosing.probe import QUIET, probe

ROOT = Path(__file__).resolve().parents[1]
GRAPHS = ["citeseer", "minesweeper", "coauthor_cs", "dblp", "cora", "amazon_computers"]
RANKS = 2
ALONE = "one process"
ARMS = [ALONE, *CHOICES]
BATCH = 1024
BYTES_IN_8_BITS = 0.3  # of those in 32, with the scales
SLOWER = 2.0  # an exchange is than its bytes alone, as measured (docs/wire.md)
SITES = {"RATE": "100", "ROUND_TRIP": "20"}


class Wire(NamedTuple):
    """A wire, as ``two_hosts.sh`` makes it, and as it is counted.

    Attributes:
        variables: Those of the environment of ``two_hosts.sh``.
        gigabits: In a second.
        round_trip: In seconds.
    """

    variables: dict[str, str]
    gigabits: float
    round_trip: float


WIRES = {
    "loopback": Wire({}, 10.0, 0.0001),
    "1 Gbit/s": Wire({"RATE": "1gbit"}, 1.0, 0.0002),
    "100 Mbit/s, 20 ms": Wire(SITES, 0.1, 0.02),
}
LOSSY = {  # which cannot be counted
    f"100 Mbit/s, 20 ms, {loss} % lost": Wire(SITES | {"LOSS": str(loss / 100), "CONGESTION": "reno"}, math.nan, 0.02)
    for loss in (0.01, 1.0)
}


class StepsCurve(Curve):
    """After every meeting, or as many steps where there is none.

    Accuracy is that of the whole graph. Rows are first multiplied by weights and then averaged over neighbours, which
    is the same for a mean, and takes a fiftieth of the time where features are sparse.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph, every=1)
        self.data = graph.to_pyg()
        self.x = self.data.x.to_sparse_csr()
        sender, receiver = self.data.edge_index
        shares = 1 / torch.bincount(receiver, minlength=graph.num_nodes).clamp(min=1)[receiver]
        size = (graph.num_nodes, graph.num_nodes)
        self.mean = torch.sparse_coo_tensor(torch.stack([receiver, sender]), shares, size).to_sparse_csr()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if isinstance(trainer.strategy, RoundStrategy) and trainer.is_global_zero:
            self.judge(pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        every_step = not isinstance(trainer.strategy, RoundStrategy)
        if every_step and trainer.global_step % SHORT == 0 and trainer.is_global_zero:
            self.judge(pl_module)

    @torch.no_grad()
    def judge(self, module: pl.LightningModule) -> None:
        x = self.x
        for conv in module.convs:
            rows = self.mean @ (x @ conv.lin_l.weight.T) + conv.lin_l.bias + x @ conv.lin_r.weight.T
            x = rows.relu()
        right = (rows.argmax(1) == self.data.y).float()
        self.points.append(tuple(float(right[self.data[f"{k}_mask"]].mean()) for k in ("val", "test")))  # type: ignore[arg-type]


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
    return PartitionedDataModule(graph, sampler=sampler, batch_size=BATCH, seed=seed, loading=Loading(num_threads=0))


def sizes_of(graph: Graph) -> list[int]:
    return [graph.node_arrays["x"].shape[1], 64, int(graph.node_arrays["y"].max()) + 1]


def length_of(choice: Choice, steps: int) -> dict[str, int]:
    if choice.steps is None:
        return {"max_epochs": 10**6, "max_steps": steps}
    return {"max_epochs": -(-steps // choice.steps)}


def curves(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # before anything is forked
    for name, seed in product(options.graphs, range(options.seeds)):
        settings = {"graph": name, "seed": seed, "steps": options.steps}
        left = [arm for arm in options.arms if not kept(options.out, {"curve": arm, **settings})]
        graph = Graph.from_pyg(load(options.directory, name, seed)) if left else None
        for arm in left:
            points = curve_of(graph, arm, seed, options)
            keep(options.out, {"curve": arm, **settings, "points": points})
            print(name, seed, arm, f"{max(points)[1]:.3f}", flush=True)


def curve_of(graph: Graph, arm: str, seed: int, options: argparse.Namespace) -> list[tuple[float, float]]:
    """Return accuracy on validation and test nodes after every round, or every 16 steps."""
    pl.seed_everything(seed, verbose=False)
    curve, choice = StepsCurve(graph), CHOICES["Grappa" if arm == ALONE else arm]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if arm == ALONE else RANKS,
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
        settings = {"wire": wire, "graph": name, "milliseconds": options.milliseconds, "counted": False}
        if not kept(options.out, settings):
            keep(options.out, settings | on_two_hosts(name, (WIRES | LOSSY)[wire].variables, options))


def on_two_hosts(name: str, variables: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    command = [str(ROOT / "benchmarks" / "two_hosts.sh"), __file__, str(options.directory), "rank", "--graphs", name]
    command += [f"--milliseconds={options.milliseconds}"]
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=os.environ | more | variables, capture_output=True, text=True, check=False)
    rows = [line for line in said.stdout.splitlines() if line.startswith("{")]
    if said.returncode or not rows:
        raise SystemExit(said.stdout + said.stderr)
    found: dict[str, Any] = json.loads(rows[0])
    print(name, *variables.values(), found["seconds"], flush=True)
    return found


def progress(options: argparse.Namespace) -> None:
    """Keep what a probe finds of the progress that averaged steps make: it does not depend on the wire."""
    for name in options.graphs:
        if not kept(options.out, {"progress_of": name}):
            ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
            command = [*ranks, __file__, str(options.directory), "probe", "--graphs", name]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            rows = [line for line in said.stdout.splitlines() if line.startswith("{")]
            if said.returncode or not rows:
                raise SystemExit(said.stdout + said.stderr)
            keep(options.out, {"progress_of": name, **json.loads(rows[0])})


def be_probe(options: argparse.Namespace) -> None:
    """Be a rank that probes a fit; rank 0 says how much progress averaged steps make."""
    torch.set_num_threads(1)
    graph = Graph.from_pyg(load(options.directory, options.graphs[0], 0))
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(accelerator="cpu", devices=RANKS, strategy=AutoStrategy(), **QUIET)
    measured = probe(trainer, Module(sizes_of(graph), dropout=0.0), data_of(graph, 0), Launch()).measured
    if trainer.is_global_zero:
        print(json.dumps({"progress": measured.progress}), flush=True)


def count(options: argparse.Namespace) -> None:
    """Keep what steps take by arithmetic: all ranks are alike, and gradients travel when a loss is there."""
    step = options.milliseconds / 1000
    for name in options.graphs:
        graph = Graph.from_pyg(load(options.directory, name, 0))
        size = sum(each.numel() * each.element_size() for each in Module(sizes_of(graph), dropout=0.0).parameters())
        in_pass = math.ceil(int(graph.node_arrays["train_mask"].sum()) / RANKS / BATCH)
        for wire_name, wire in WIRES.items():
            settings = {"wire": wire_name, "graph": name, "milliseconds": options.milliseconds, "counted": True}
            seconds = SLOWER * 2 * (RANKS - 1) / RANKS * size * 8e-9 / wire.gigabits
            exchange, rounded = wire.round_trip + seconds, wire.round_trip + BYTES_IN_8_BITS * seconds
            steps = Steps(step + exchange, in_pass), Steps(step, in_pass)
            found = Measured(*steps, wire.round_trip, exchange, rounded, step)
            if not kept(options.out, settings):
                keep(options.out, settings | described(found))


def described(found: Measured) -> dict[str, Any]:
    """Return the seconds of steps, as the cost model has them, and what else a choice goes by."""
    predicted = {name: found.seconds_of_step(choice) for name, choice in CHOICES.items()}
    possible = {name: found.why_not(choice) is None for name, choice in CHOICES.items()}
    return {"predicted": predicted, "possible": possible, "in_pass": [found.gradients.in_pass, found.local.in_pass]}


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
        print(json.dumps({"seconds": found} | described(measured)), flush=True)


def seconds_of_step(choice: Choice, module: Module, data: PartitionedDataModule, ranks: dict[str, Any]) -> float:
    """Return the seconds of a step with its share of a meeting, without the first round, which begins everything."""
    first = choice.steps or SHORT
    watch, rounds = Watch(), 3 if first == SHORT else 2
    length = length_of(choice, first * rounds)
    pl.Trainer(strategy=choice.strategy(), callbacks=[watch], **QUIET, **ranks, **length).fit(module, data)
    return (watch.ends[-1] - watch.ends[first - 1]) / (len(watch.ends) - first)


def show(options: argparse.Namespace) -> None:
    rows = [json.loads(line) for line in options.out.read_text().splitlines()]
    found = {name: to_accuracy([row for row in rows if row.get("graph") == name]) for name in options.graphs}
    seen = {row["progress_of"]: row["progress"] for row in rows if "progress_of" in row}
    titles = ["graph", "wire", "seconds", "chosen", "times the fastest", "points from the best", *ARMS]
    print(f"| {' | '.join(titles)} |")
    print("|---" * len(titles) + "|")
    for row in (row for row in rows if "wire" in row and row["graph"] in options.graphs):
        steps, best = found[row["graph"]]
        others = {name: steps for name, (steps, _) in found.items() if name != row["graph"]}
        passes = passes_of(others, seen) if options.without_own else {name: CHOICES[name].passes for name in CHOICES}
        chosen = chosen_of(row, passes, seen[row["graph"]])
        seconds = {ALONE: row["milliseconds"] / 1000, **row.get("seconds", row["predicted"])}
        times = {arm: steps.get(arm, math.nan) * seconds[arm] for arm in ARMS}
        least = min(times[name] for name in CHOICES)
        points = 100 * (best[chosen] - max(best[name] for name in CHOICES))
        cells = [row["graph"], row["wire"], "counted" if row["counted"] else "by the clock", chosen]
        cells += [f"{times[chosen] / least:.2f}", f"{points:+.1f}", *(f"{each:.1f} s" for each in times.values())]
        print(f"| {' | '.join(cells)} |")
    every = {name: steps for name, (steps, _) in found.items()}
    print(f"\nPasses, Grappa is 1 (of averaging with all progress): {passes_of(every, seen)}\nProgress: {seen}")
    print("\nSteps to accuracy, and accuracy at its best validation:\n")
    for name, arm in product(options.graphs, ARMS):
        steps, best = found[name]
        print(f"| {name} | {arm} | {steps.get(arm, math.nan):.0f} | {best.get(arm, math.nan):.3f} |")


def chosen_of(row: dict[str, Any], passes: dict[str, float], seen: float) -> str:
    """Return what is chosen by these passes, as the cost model does."""
    prices = []
    for name, choice in CHOICES.items():
        if row["possible"][name]:
            seconds = row["in_pass"][choice.steps is not None] * row["predicted"][name]
            prices.append(Priced(name, seconds, replace(choice, passes=passes[name]).passes_at(seen) * seconds))
    return taken(prices).name


def passes_of(graphs: dict[str, dict[str, float]], seen: dict[str, float]) -> dict[str, float]:
    """Return how many steps each choice takes for one of Grappa, the median over graphs, at a progress of 1."""
    return {
        name: statistics.median(
            steps[name] / steps["Grappa"] / replace(choice, passes=1.0).passes_at(seen[graph])
            for graph, steps in graphs.items()
        )
        for name, choice in CHOICES.items()
    }


def to_accuracy(rows: list[dict[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return for each choice the steps until it is within a point of the most accurate choice, and its accuracy.

    Accuracy is the mean over seeds of that at the best validation so far, so that one lucky run is no measure. What
    never comes so far counts as if it came after twice the steps.
    """
    curves: dict[str, list[list[float]]] = {}
    rows = [row for row in rows if "curve" in row]
    for seed in {row["seed"] for row in rows}:
        of_seed = {row["curve"]: row["points"] for row in rows if row["seed"] == seed}
        if of_seed.keys() >= CHOICES.keys():  # it is done
            for name, points in of_seed.items():
                curves.setdefault(name, []).append([test for _, test in accumulate(points, better)])
    means = {name: [statistics.mean(tests) for tests in zip(*each, strict=True)] for name, each in curves.items()}
    target = max(mean[-1] for name, mean in means.items() if name in CHOICES) - 0.01
    every = {name: rows[0]["steps"] / len(mean) for name, mean in means.items()}
    steps = {name: next(reached(mean, target, every[name]), 2.0 * rows[0]["steps"]) for name, mean in means.items()}
    return steps, {name: mean[-1] for name, mean in means.items()}


def better(best: tuple[float, float], new: tuple[float, float]) -> tuple[float, float]:
    return new if new[0] > best[0] else best


def reached(accuracy: list[float], target: float, every: float) -> Iterator[float]:
    return (every * number for number, each in enumerate(accuracy, 1) if each >= target)


def kept(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The run with these settings in the file; empty if it is not there."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return next((row for row in rows if settings.items() <= row.items()), {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    whats = {"curves": curves, "progress": progress, "count": count, "seconds": seconds, "show": show}
    whats |= {"rank": be_rank, "probe": be_probe}  # what others start
    parser.add_argument("what", choices=whats)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS)
    parser.add_argument("--wires", nargs="+", default=[*WIRES], choices=[*WIRES, *LOSSY])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--steps", type=int, default=320, help="local steps of a curve, a multiple of 64")
    parser.add_argument("--milliseconds", type=float, default=100.0, help="that a loss takes where steps are timed")
    parser.add_argument("--without_own", action="store_true", help="choose by the passes of the other graphs")
    parser.add_argument("--scratch", type=Path, default=Path("choosing.tmp.json"), help="may be overwritten")
    parser.add_argument("--out", type=Path, default=Path("choosing.jsonl"), help="the runs, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    whats[options.what](options)


if __name__ == "__main__":
    main()
