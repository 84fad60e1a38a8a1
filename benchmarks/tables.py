"""Markdown tables from the runs that ``accuracy.py`` and ``grappa_accuracy.py`` append to a file with ``--out``.

python benchmarks/tables.py accuracy benchmarks/results/accuracy.jsonl
python benchmarks/tables.py grappa benchmarks/results/grappa.jsonl
python benchmarks/tables.py tma benchmarks/results/accuracy.jsonl benchmarks/results/tma.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Run = dict[str, Any]
Runs = dict[int, Run]  # by seed


def accuracy(runs: list[Run]) -> Iterator[list[str]]:
    """A row per graph, model and method, against training on the whole graph with the same steps."""
    yield [
        "graph",
        "model",
        "method",
        "seeds",
        "test accuracy",
        "against full",
        "best round",
        "gradients",
        "MB",
        "of remote features",
    ]
    grouped = by_seed(runs, lambda run: (run["graph"], run["model"], run["rounds"], run["steps"], run["method"]))
    for (*setting, method), found in grouped.items():
        full = grouped.get((*setting, "full"), {})
        rounds = statistics.mean(run["round"] for run in found.values())
        sent = statistics.mean(run["bytes"] for run in found.values())
        graph, model, num_rounds, steps = setting
        remote = found[min(found)].get("remote_bytes_per_step", 0) * num_rounds * steps
        yield [
            graph,
            model,
            method,
            *scores(found, full),
            f"{rounds:.0f} of {num_rounds}",
            f"{statistics.mean(run['gradients'] for run in found.values()):.0f}"
            if "gradients" in found[min(found)]
            else "-",
            f"{sent / 1e6:.0f}",
            f"{sent / remote:.1%}" if remote and sent else "-",
        ]


def tma(runs: list[Run]) -> Iterator[list[str]]:
    """A row per graph and number of parts; columns for METIS and random parts, and for super-nodes by their number."""
    runs = [run for run in runs if run["model"] == "sage"]
    grouped = by_seed(runs, lambda run: (run["graph"], run["parts"], run["method"], run.get("supernodes")))
    numbers = sorted({number for *_, method, number in grouped if method.startswith("supernodes")})
    columns = [(cut, None) for cut in ("metis", "random")] + [("supernodes", number) for number in numbers]
    yield ["graph", "parts", "at the meeting", "whole graph", "METIS", "random", *(f"N = {n}" for n in numbers)]
    for graph, parts in dict.fromkeys(key[:2] for key in grouped if key[2] != "full"):
        full = any_number(grouped, graph, "full")
        for ending, what in (("", "average"), ("-llcg-1", "average, correct")):
            cells = [
                any_number(grouped, graph, cut + ending, parts)
                if number is None
                else grouped.get((graph, parts, cut + ending, number), {})
                for cut, number in columns
            ]
            if any(cells):
                yield [graph, str(parts), what, mean(full), *map(mean, cells)]


def any_number(grouped: dict[tuple[Any, ...], Runs], graph: str, method: str, parts: int | None = None) -> Runs:
    """Runs for which the number of super-nodes does not matter."""
    for (of, number_of_parts, name, _), found in grouped.items():
        if of == graph and name == method and parts in (None, number_of_parts):
            return found
    return {}


def grappa(runs: list[Run]) -> Iterator[list[str]]:
    """A row per graph, layers and cut, a column per arm."""
    arms = list(dict.fromkeys(run["arm"] for run in runs if run["cut"] != "full"))
    yield ["graph", "layers", "cut", "seeds", "whole graph", *arms]
    grouped = by_seed(runs, lambda run: (run["graph"], run["layers"], run["cut"], run["arm"]))
    for graph, layers, cut in dict.fromkeys(key[:3] for key in grouped if key[2] != "full"):
        full = grouped.get((graph, layers, "full", "fixed"), {})
        found = [grouped.get((graph, layers, cut, arm), {}) for arm in arms]
        seeds = max(map(len, found))
        yield [graph, str(layers), cut, str(seeds), *(mean(runs_of_arm) for runs_of_arm in (full, *found))]


def by_seed(runs: list[Run], key: Callable[[Run], tuple[Any, ...]]) -> dict[tuple[Any, ...], Runs]:
    """A later run of the same seed replaces an earlier one."""
    grouped: dict[tuple[Any, ...], Runs] = {}
    for run in runs:
        grouped.setdefault(key(run), {})[run["seed"]] = run
    return grouped


def scores(found: Runs, full: Runs) -> list[str]:
    """How many seeds, their mean and spread, and the mean difference to the whole graph in points, seed by seed."""
    shared = sorted(found.keys() & full.keys())
    differences = [found[seed]["test"] - full[seed]["test"] for seed in shared]
    return [str(len(found)), mean(found), f"{100 * statistics.mean(differences):+.1f}" if shared else "-"]


def mean(runs: Runs) -> str:
    if not runs:
        return "-"
    tests = [run["test"] for run in runs.values()]
    spread = f"{statistics.stdev(tests):.3f}" if len(tests) > 1 else "-"
    return f"{statistics.mean(tests):.3f} ± {spread}"


TABLES = {"accuracy": accuracy, "grappa": grappa, "tma": tma}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("files", type=Path, nargs="+")
    options = parser.parse_args()
    runs = [json.loads(line) for file in options.files for line in file.read_text().splitlines()]
    heading, *rows = TABLES[options.table](runs)
    for row in [heading, ["---"] * len(heading), *rows]:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
