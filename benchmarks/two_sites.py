"""Steps a second of strategies on two hosts, joined by a fast wire and by one of 100 Mbit/s and a round trip of 20 ms.

    sudo python benchmarks/two_sites.py two_sites.jsonl          # runs what the file does not hold yet
    python benchmarks/two_sites.py two_sites.jsonl --show

A model of 6 MB: GraphSAGE 768 - 512 - 512 - 172 with Adam, on a generated graph, in rounds of 16 steps. Each host is a
network namespace with one rank of one thread. The wire is that of ``relay.py``, which is measured by itself before; the
fast one is a pair of veth. A loss, of a local step, a correction or an anchor, takes as many milliseconds as asked for:
the batch is small, and the step sleeps for the rest, so that what else the machine does weighs little. Seconds are
those from the end of the second round to the end of the last.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import SAGE
from harness import keep, machine
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.nn import functional

from lightning_gnn_dist import (
    Correction,
    EverySteps,
    GrappaStrategy,
    LLCGStrategy,
    Loading,
    LocalSGDStrategy,
    NeighborSampler,
    Overlapped,
    PartitionedDataModule,
    Rounded,
    communities,
)

ROOT = Path(__file__).resolve().parents[1]
STEPS = 16
SIZES = [768, 512, 512, 172]
WIRES = {"fast": {}, "100 Mbit/s, 20 ms": {"RATE": "100", "ROUND_TRIP": "20"}}
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "Grappa": GrappaStrategy,
    "Grappa, 8 bits": lambda: GrappaStrategy(reducer=Rounded(8)),
    "averaging": lambda: LocalSGDStrategy(EverySteps(STEPS)),
    "averaging, overlap": lambda: LocalSGDStrategy(EverySteps(STEPS), reducer=Overlapped()),
    "LLCG": lambda: LLCGStrategy(EverySteps(STEPS)),
    "LLCG, overlap": lambda: LLCGStrategy(EverySteps(STEPS), reducer=Overlapped()),
    "LLCG, one correction, overlap": lambda: LLCGStrategy(
        EverySteps(STEPS), correction=Correction(1), reducer=Overlapped()
    ),
}


class Module(SAGE):
    """Its losses take a stated time."""

    seconds = 0.0

    def training_step(self, batch: Any) -> Tensor:
        start = time.monotonic()
        loss = functional.cross_entropy(self(batch), batch.y[: batch.batch_size])
        time.sleep(max(0.0, start + self.seconds - time.monotonic()))
        return loss


class Watch(pl.Callback):
    """Notes when so many steps are done."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.steps = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1
        if self.steps % STEPS == 0:
            self.times.append(time.monotonic())


def train(name: str, options: argparse.Namespace) -> None:
    """Be a rank; rank 0 says how many steps a second it took."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    graph = communities(4_000, SIZES[-1], num_features=SIZES[0], train_share=0.5, seed=0)
    data = PartitionedDataModule(
        graph,
        sampler=NeighborSampler([2, 2, 2]),
        batch_size=4,
        loading=Loading(num_threads=0),
        seed=0,
    )
    watch, strategy = Watch(), STRATEGIES[name]()
    epochs = {"max_epochs": 1, "limit_train_batches": STEPS * options.rounds}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        strategy=strategy,
        callbacks=[watch],
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(epochs if "Grappa" in name else {"max_epochs": options.rounds}),  # type: ignore[arg-type]
    )
    module = Module(SIZES, dropout=0.0)
    module.seconds = options.milliseconds / 1000
    trainer.fit(module, data)
    if trainer.is_global_zero:
        seconds = (watch.times[-1] - watch.times[1]) / (len(watch.times) - 2)
        print(json.dumps({"steps": STEPS / seconds}), flush=True)


def measure(options: argparse.Namespace) -> None:
    print(machine(), flush=True)
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "relay.py"), "--verify"], check=True)
    lines = options.file.read_text().splitlines() if options.file.exists() else []
    done = [{key: value for key, value in json.loads(line).items() if key != "steps"} for line in lines]
    for turn, name, wire in product(range(options.turns), options.strategies, WIRES):
        settings = {"strategy": name, "wire": wire, "milliseconds": options.milliseconds, "turn": turn}
        if settings not in done:
            keep(options.file, settings | on_two_hosts(name, WIRES[wire], options))


def on_two_hosts(name: str, variables: dict[str, str], options: argparse.Namespace) -> dict[str, float]:
    command = [str(ROOT / "benchmarks" / "two_hosts.sh"), __file__, "-", "--train", name]
    command += [f"--rounds={options.rounds}", f"--milliseconds={options.milliseconds}"]
    more = {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=os.environ | more | variables, capture_output=True, text=True, check=False)
    rows = [line for line in said.stdout.splitlines() if line.startswith("{")]
    if said.returncode or not rows:
        raise SystemExit(said.stderr)
    found: dict[str, float] = json.loads(rows[0])
    print(name, *variables.values(), found, flush=True)
    return found


def show(path: Path) -> None:
    steps: dict[tuple[str, float, str], float] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        key = row["strategy"], row["milliseconds"], row["wire"]
        steps[key] = max(row["steps"], steps.get(key, 0.0))
    print(
        f"| | ms of a step | {' | '.join(f'{wire}, steps a second' for wire in WIRES)} | share |\n|---|---|---|---|---|"
    )
    for name, milliseconds in dict.fromkeys(key[:2] for key in steps):
        fast, slow = (steps.get((name, milliseconds, wire), math.nan) for wire in WIRES)
        print(f"| {name} | {milliseconds:g} | {fast:.2f} | {slow:.2f} | {slow / fast:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="the runs, one JSON object a line")
    parser.add_argument("--strategies", nargs="+", default=[*STRATEGIES], choices=[*STRATEGIES])
    parser.add_argument("--turns", type=int, default=2, help="runs of each; the fastest counts")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=100.0, help="that a loss takes")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options)
    elif options.show:
        show(options.file)
    else:
        measure(options)


if __name__ == "__main__":
    main()
