"""Test accuracy over bytes, for all strategies with their settings, on graphs of many kinds.

    python benchmarks/frontier.py frontier.jsonl --directory DIRECTORY --seeds 3
    python benchmarks/frontier.py frontier.jsonl --show frontier.svg    # by matplotlib: pip install ".[plots]"

The first command runs what the file does not hold yet, and appends to it; it can be stopped and started again. The
second prints the table and draws the picture. DIRECTORY holds real graphs, as ``accuracy.py`` reads them; without it
there are generated ones only. ``--whole`` takes each part as one batch, and ``--width 256`` turns wider features into
256 numbers. ``--train_share 0.6`` trains on that share of a real graph's nodes, and not on the masks of its file. Eight
ranks, two layers of hidden size 64, Adam 0.01, fan-out 10 and 10, 64 seeds in a rank's batch, 200 local steps; one
process takes as many steps with batches eight times as large. Accuracy is that of test nodes at the best round for
validation nodes; differences are taken seed by seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import warnings
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accuracy import Method, averaging, grappa, load, methods, run
from accuracy import llcg as exact_llcg
from lightning.pytorch.strategies import Strategy
from torch_geometric.transforms import GCNNorm

from lightning_gnn_dist import (
    Correction,
    Coverage,
    Drift,
    EverySteps,
    Graph,
    Halo,
    History,
    Isolated,
    Launch,
    MetisPartitioner,
    Outer,
    Rounded,
    SuperNodePartitioner,
    TMAStrategy,
    communities,
)

RANKS, STEPS = 8, 200
METIS, SUPER = MetisPartitioner(), SuperNodePartitioner()
OUTER: dict[str, Any] = {"outer": Outer.diloco(), "reducer": Rounded(8), "average_optimizer": "variance"}
PAPER: dict[str, Any] = {"drift": None, "weights": "uniform"}
EARLIER: dict[str, Any] = {"drift": Drift("global", decay=0.8), "correction": Correction(1)}
FIXED: dict[str, Any] = {"outer": Outer(momentum=0.3), "reducer": Rounded(8), **EARLIER}
SHORT: dict[str, Any] = {"outer": Outer(lr=0.7, momentum=0.8, adaptive=True), "reducer": Rounded(8)}
FADING: dict[str, Any] = {"drift": Drift("global", decay=0.8)}
ONE: dict[str, Any] = {"drift": Drift("global", anchor_steps=1)}
EXACT: dict[str, Any] = {"outer": Outer(), "reducer": None, "average_optimizer": True, **EARLIER}


def tma(steps: int, **settings: Any) -> Strategy:
    return TMAStrategy(EverySteps(steps), launch=Launch(start_method="fork"), **settings)


def around(boundary: Any = "auto", coverage: Coverage | None = None) -> dict[str, Any]:
    return {"boundary": boundary, "coverage": coverage}


def llcg(settings: dict[str, Any], *others: Any) -> Any:
    """Make LLCG with means in 8 bits, unless ``settings`` say otherwise."""
    return exact_llcg({"reducer": Rounded(8)} | settings, *others)


def every_step(reducer: Any = None, boundary: Any = "auto") -> Method:
    return Method(partial(grappa, reducer=reducer), METIS, every_step=True, data=around(boundary, Coverage()))


# As users get them, unless their names say otherwise: Grappa on METIS parts, the others on super-nodes.
SETTINGS: dict[str, Method] = {
    "one process": methods(1)["full"],
    "Grappa": every_step(),
    "Grappa, 8 bits": every_step(reducer=Rounded(8)),
    "Grappa, isolated": every_step(boundary=Isolated()),
    "LLCG": Method(partial(llcg, {}), SUPER, data=around()),
    "LLCG, one anchor": Method(partial(llcg, ONE), SUPER, data=around()),
    "LLCG, earlier default": Method(partial(llcg, EARLIER), SUPER, data=around()),
    "LLCG, fixed momentum": Method(partial(llcg, FIXED), SUPER, data=around()),
    "LLCG, fixed momentum, isolated": Method(partial(llcg, FIXED), SUPER, data=around(Isolated())),
    "LLCG, METIS": Method(partial(llcg, {}), METIS, data=around()),
    "LLCG, METIS, one anchor": Method(partial(llcg, ONE), METIS, data=around()),
    "LLCG, METIS, earlier default": Method(partial(llcg, EARLIER), METIS, data=around()),
    "LLCG, METIS, fixed momentum": Method(partial(llcg, FIXED), METIS, data=around()),
    "LLCG, METIS, fixed momentum, isolated": Method(partial(llcg, FIXED), METIS, data=around(Isolated())),
    "LLCG, METIS, exact averages": Method(partial(llcg, EXACT), METIS, data=around()),
    "LLCG, as in the paper": Method(partial(llcg, PAPER), METIS, data=around(Isolated())),
    "LLCG, METIS, short outer steps": Method(partial(llcg, SHORT), METIS, data=around()),
    "LLCG, METIS, shift of 0.8": Method(partial(llcg, FADING), METIS, data=around()),
    "LLCG, METIS, isolated, shift of 0.8": Method(partial(llcg, FADING), METIS, data=around(Isolated())),
    "LLCG, METIS, isolated": Method(partial(llcg, {}), METIS, data=around(Isolated())),
    "LLCG, isolated": Method(partial(llcg, {}), SUPER, data=around(Isolated())),
    "LLCG, METIS, one hop": Method(partial(llcg, {}), METIS, data=around(Halo(1))),
    "LLCG, METIS, history": Method(partial(llcg, {}), METIS, data=around(History())),
    "averaging": Method(averaging, SUPER, data=around()),
    "averaging, METIS": Method(averaging, METIS, data=around()),
    "averaging, METIS, outer optimizer": Method(partial(averaging, **OUTER), METIS, data=around()),
    "TMA": Method(tma, SUPER, data=around()),
    "TMA, METIS, outer optimizer": Method(partial(tma, **OUTER), METIS, data=around()),
}
# Also with rounds of 50 and 200 local steps.
LONG = (
    "LLCG",
    "LLCG, one anchor",
    "LLCG, earlier default",
    "LLCG, fixed momentum",
    "LLCG, METIS",
    "LLCG, METIS, one anchor",
    "LLCG, METIS, earlier default",
    "LLCG, METIS, fixed momentum",
    "averaging",
    "averaging, METIS",
    "averaging, METIS, outer optimizer",
)
REAL = ("cora", "citeseer", "amazon_computers", "minesweeper", "dblp")
GENERATED: dict[str, dict[str, Any]] = {
    "plain": {"homophily": 0.7, "noise": 4.0},
    "few edges inside": {"homophily": 0.3, "mean_degree": 12.0, "noise": 3.0},
    "dense": {"homophily": 0.4, "mean_degree": 40.0, "noise": 8.0},
    "many classes": {"num_classes": 24, "homophily": 0.8, "noise": 3.0},
    "few labels": {"homophily": 0.7, "noise": 4.0, "train_share": 0.02},
}
# By which no default was chosen. They are run if they are named.
UNSEEN: dict[str, dict[str, Any]] = {
    "unseen, sparse": {"num_nodes": 7650, "mean_degree": 31.0, "homophily": 0.8, "num_features": 128, "noise": 6.0},
    "unseen, dense": {"num_nodes": 5196, "mean_degree": 66.0, "homophily": 0.4, "num_classes": 6, "noise": 5.0},
    "unseen, two classes": {"num_nodes": 11758, "mean_degree": 88.0, "homophily": 0.3, "num_classes": 2, "noise": 4.0},
}


def graph_of(
    name: str,
    directory: Path | None,
    seed: int,
    model: str,
    width: int | None = None,
    train_share: float | None = None,
) -> Graph:
    if (own := (GENERATED | UNSEEN).get(name)) is not None:
        usual: dict[str, Any] = {"num_nodes": 4000, "num_classes": 8, "num_features": 32, "mean_degree": 8.0}
        graph = communities(seed=seed, **(usual | own))
        return Graph.from_pyg(GCNNorm()(graph.to_pyg())) if model == "gcn" else graph
    assert directory is not None
    data = load(directory, name, seed)
    if train_share is not None:
        place = torch.randperm(data.num_nodes, generator=torch.Generator().manual_seed(seed)).argsort()
        data.train_mask = place < int(train_share * data.num_nodes)
        data.test_mask = place >= int((1 + train_share) / 2 * data.num_nodes)
        data.val_mask = ~(data.train_mask | data.test_mask)
    if width is not None and data.x.size(1) > width:
        drawn_at_random = torch.randn(data.x.size(1), width, generator=torch.Generator().manual_seed(0))
        data.x = (data.x @ torch.linalg.qr(drawn_at_random)[0]).contiguous()
    return Graph.from_pyg(GCNNorm()(data) if model == "gcn" else data)


def wanted(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """What is to be run, the first seed of everything first."""
    graphs = [*GENERATED, *(REAL if options.directory else ())]
    for seed in range(options.seeds):
        for graph in options.graphs or graphs:
            for setting in options.settings or SETTINGS:
                for steps in options.steps if setting in LONG else (10,):
                    yield {"graph": graph, "model": options.model, "setting": setting, "steps": steps, "seed": seed}


def measure(options: argparse.Namespace) -> None:
    done = [{key: row[key] for key in ("graph", "model", "setting", "steps", "seed")} for row in rows_of(options.file)]
    for what in wanted(options):
        if what in done:
            continue
        settings = argparse.Namespace(
            parts=RANKS,
            steps=what["steps"],
            rounds=STEPS // what["steps"],
            model=what["model"],
            layers=2,
            dropout=0.0,
            fanout=None if options.whole else [10, 10],
            batch_size=10**6 if options.whole else options.batch_size,
            scratch=str(options.file.with_suffix(f".{os.getpid()}.tmp")),
        )
        graph = graph_of(
            what["graph"], options.directory, what["seed"], what["model"], options.width, options.train_share
        )
        outcome = run(graph, SETTINGS[what["setting"]], settings, what["seed"])
        Path(settings.scratch).unlink()
        with options.file.open("a") as file:
            file.write(json.dumps(what | outcome) + "\n")
        print(*what.values(), f"{outcome['test']:.3f} {outcome['bytes'] / 1e6:.1f} MB", flush=True)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def name_of(row: dict[str, Any]) -> str:
    return row["setting"] + (f", rounds of {row['steps']}" if row["setting"] in LONG else "")


def show(options: argparse.Namespace) -> None:
    rows = [row for row in rows_of(options.file) if row["model"] == options.model]
    whole = {where(row): row["test"] for row in rows if row["setting"] == "one process"}
    sent = {row["graph"]: row["bytes"] for row in rows if row["setting"] == options.unit}  # the same for all seeds
    rows = [row for row in rows if where(row) in whole and row["graph"] in sent]
    graphs = list(dict.fromkeys(row["graph"] for row in rows))
    rows.sort(key=lambda row: (list(SETTINGS).index(row["setting"]), row["steps"]))
    costs = ["gradients of a rank", f"bytes, {options.unit} is 1"]
    heads = ["setting", *costs, "last round", "mean", "standard error", "worst", *graphs]
    print("| " + " | ".join(heads) + " |")
    print("|---" * len(heads) + "|")
    points = []
    for name in dict.fromkeys(map(name_of, rows)):
        own = [row for row in rows if name_of(row) == name]
        share = statistics.mean(row["bytes"] / sent[row["graph"]] for row in own)
        means = {}
        for graph in graphs:
            if gains := [100 * (row["test"] - whole[where(row)]) for row in own if row["graph"] == graph]:
                means[graph] = statistics.mean(gains)
        mean, worst = statistics.mean(means.values()), min(means.values())
        error = statistics.stdev(means.values()) / math.sqrt(len(means)) if len(means) > 1 else 0.0
        cells = " | ".join(f"{means[graph]:+.1f}" if graph in means else "" for graph in graphs)
        computed = [row["gradients"] for row in own if "gradients" in row]
        gradients = f"{statistics.mean(computed):.0f}" if computed else ""
        swings = [100 * (row["last"] - row["test"]) for row in own if "last" in row]
        last = f"{statistics.mean(swings):+.1f}" if swings else ""
        print(f"| {name} | {gradients} | {share:.3f} | {last} | {mean:+.1f} | {error:.1f} | {worst:+.1f} | {cells} |")
        if share > 0:
            points.append((name, share, mean))
    draw(points, options)


def draw(points: list[tuple[str, float, float]], options: argparse.Namespace) -> None:
    from matplotlib.figure import Figure  # where nothing is drawn, it need not be installed

    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log")
    for name, share, mean in points:
        axes.plot(share, mean, "o")
        axes.annotate(name, (share, mean), (5, 2), textcoords="offset points", fontsize=8)
    axes.set(xlabel=f"bytes sent, {options.unit} is 1", ylabel="points from one process, mean over graphs")
    axes.set_title("Test accuracy over bytes")
    axes.grid(alpha=0.3)
    figure.savefig(options.show)


def where(row: dict[str, Any]) -> tuple[str, int]:
    return row["graph"], row["seed"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("file", type=Path, help="the runs, one JSON object a line")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--model", choices=["sage", "gcn"], default="sage")
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 50, 200], help="local steps in a round")
    parser.add_argument("--whole", action="store_true", help="take each part as one batch")
    parser.add_argument("--batch_size", type=int, default=64, help="seeds in a rank's batch")
    parser.add_argument("--train_share", type=float, help="of a real graph's nodes, drawn anew with each seed")
    parser.add_argument("--width", type=int, help="turn wider features into as many numbers, by a random rotation")
    parser.add_argument("--graphs", nargs="+")
    parser.add_argument("--settings", nargs="+", choices=SETTINGS)
    parser.add_argument("--unit", default="Grappa", choices=SETTINGS, help="the setting whose bytes are 1 in the table")
    parser.add_argument("--show", type=Path, help="print the table, and draw the picture into this file")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    (show if options.show else measure)(options)


if __name__ == "__main__":
    main()
