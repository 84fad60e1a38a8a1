"""What LLCG loses where it sends less than by default.

    python benchmarks/llcg_bytes.py llcg_bytes.jsonl --seeds 2
    python benchmarks/llcg_bytes.py llcg_bytes.jsonl --show

On generated graphs of ``frontier.py``, with its ranks, steps and METIS parts, in rounds of ten local steps. The first
command runs what the file does not hold yet; the second prints differences in test accuracy from the default, in
points, seed by seed.

    second moments    average_optimizer="variance"; the correction's own live on
    every fourth      moments are averaged in every fourth round, which is no setting; the correction's own live on
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import statistics
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy import Method, run
from frontier import GENERATED, METIS, RANKS, STEPS, around, graph_of, rows_of
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_gnn_dist import Correction, EverySteps, Launch, LLCGStrategy, Rounded
from lightning_gnn_dist.rounds.means import AveragedMoments
from lightning_gnn_dist.rounds.meeting_hook import Fit, MeetingHook

GRAPHS = [name for name in GENERATED if name != "few edges inside"]
LOCAL_STEPS = 10
LASTING = Correction(optimizer="persistent")


class MomentsEveryFourth(AveragedMoments):
    def equal(self) -> list[Tensor]:
        return [] if (self.fit.round.round_idx + 1) % 4 else super().equal()


class EveryFourth(LLCGStrategy):
    def hooks(self, fit: Fit) -> list[MeetingHook]:
        hooks = super().hooks(fit)
        return [MomentsEveryFourth(True) if isinstance(each, AveragedMoments) else each for each in hooks]


def strategy(kind: type[LLCGStrategy], settings: dict[str, Any], steps: int) -> Strategy:
    return kind(EverySteps(steps), reducer=Rounded(8), launch=Launch(start_method="fork"), **settings)


WAYS: dict[str, Any] = {
    "default": partial(strategy, LLCGStrategy, {}),
    "second moments": partial(strategy, LLCGStrategy, {"average_optimizer": "variance", "correction": LASTING}),
    "every fourth": partial(strategy, EveryFourth, {"correction": LASTING}),
}


def measure(options: argparse.Namespace) -> None:
    done = [(row["graph"], row["way"], row["seed"]) for row in rows_of(options.file)]
    settings: dict[str, Any] = {"parts": RANKS, "steps": LOCAL_STEPS, "rounds": STEPS // LOCAL_STEPS, "model": "sage"}
    settings |= {"layers": 2, "dropout": 0.0, "fanout": [10, 10], "batch_size": 64}
    settings["scratch"] = str(options.file.with_suffix(".tmp"))
    for what in ((graph, way, seed) for seed in range(options.seeds) for graph in GRAPHS for way in WAYS):
        if what in done:
            continue
        graph, way, seed = what
        method = Method(WAYS[way], METIS, data=around())
        found = run(graph_of(graph, None, seed, "sage"), method, argparse.Namespace(**settings), seed)
        with options.file.open("a") as file:
            file.write(json.dumps({"graph": graph, "way": way, "seed": seed} | found) + "\n")
        print(*what, f"{found['test']:.3f} {found['bytes'] / 1e6:.1f} MB", flush=True)


def show(path: Path) -> None:
    rows = {(row["way"], row["graph"], row["seed"]): row for row in rows_of(path)}
    print("| what is sent | bytes | mean | standard error | " + " | ".join(GRAPHS) + " |")
    print("|---" * (4 + len(GRAPHS)) + "|")
    for way in WAYS:
        pairs = [(row, rows["default", graph, seed]) for (kind, graph, seed), row in rows.items() if kind == way]
        gains = [100 * (row["test"] - whole["test"]) for row, whole in pairs]
        share = statistics.mean(row["bytes"] / whole["bytes"] for row, whole in pairs)
        of = {g: [x for x, (row, _) in zip(gains, pairs, strict=True) if row["graph"] == g] for g in GRAPHS}
        cells = " | ".join(f"{statistics.mean(of[graph]):+.1f}" for graph in GRAPHS)
        error = statistics.stdev(gains) / math.sqrt(len(gains))
        print(f"| {way} | {share:.2f} | {statistics.mean(gains):+.1f} | {error:.1f} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path, help="the runs, one JSON object a line")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    if options.show:
        show(options.file)
    else:
        measure(options)


if __name__ == "__main__":
    main()
