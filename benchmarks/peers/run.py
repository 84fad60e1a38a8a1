"""This package, DGL and PyG side by side, by one command. It installs what they need into a folder of its own.

    python benchmarks/peers/run.py FOLDER GRAPH --target 0.72 | tee benchmarks/results/peers.txt    # 20 minutes
    python benchmarks/peers/run.py FOLDER GRAPH --target 0.72 --only batches partitions accuracy
    python benchmarks/peers/picture.py benchmarks/results/peers.txt docs/assets/peers.svg

GRAPH is one that prepare has saved, with features, labels and masks; the target is an accuracy that models reach on it.
All share one environment, so that torch is the same: torch as constraints.txt has it, this checkout, DGL 2.1 and, where
pip finds them, pyg-lib or torch-sparse, without which PyG draws no neighbours. What cannot be installed is left out,
and a line says so. Ways take turns in every part:

    batches     sampling_peers.py: CPU time of a batch of three hops, one thread
    partitions  partitions.py: seconds and memory of two METIS parts
    accuracy    accuracy.py: CPU time until a model has learned, one process
    hosts       epoch_ours.py and epoch_dgl.py by two_hosts.sh: a pass on two hosts, with and without RATE (Linux, root)
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OF_DGL = ["networkx", "requests", "scipy", "tqdm", "psutil", "pandas", "pyyaml", "pydantic", "packaging"]
PARTS = ("batches", "partitions", "accuracy", "hosts")
WAYS = ("grappa", "grappa-halo", "local_sgd", "llcg", "DistDGL")  # the last is no way of epoch_ours.py


class Environment:
    """A virtual environment in which all are installed."""

    def __init__(self, folder: Path) -> None:
        self.python, self._log = str(folder / "bin" / "python"), folder / "installed.log"
        if not (folder / "ready").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
            self._install(folder / "ready")

    def _install(self, mark: Path) -> None:
        constraint = ["--constraint", str(ROOT / "constraints.txt")]
        (torch,) = re.findall(r"^torch==[^ +;\n]*", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        needed = self._pip(torch) and self._pip(*constraint, str(ROOT), "scipy")
        if not needed:
            raise SystemExit(f"This package could not be installed: see {self._log}.")
        self._pip("--no-deps", "dgl==2.1.0", "torchdata==0.7.1") and self._pip(*OF_DGL)
        # Either suffices for PyG. Neither may be compiled here, which takes half an hour.
        self._pip("--only-binary", ":all:", "pyg-lib") or self._pip("--only-binary", ":all:", "torch-sparse")
        mark.touch()

    def _pip(self, *words: str) -> bool:
        with self._log.open("a") as log:
            command = [self.python, "-m", "pip", "install", "--quiet", *words]
            done = subprocess.run(command, stdout=log, stderr=log, check=False).returncode == 0
        if not done:
            print(f"pip could not install {words[-1]}: what needs it is left out", flush=True)
        return done

    def has(self, module: str) -> bool:
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
        return subprocess.run([self.python, "-c", code], check=False).returncode == 0

    def run(self, command: list[str], **variables: str) -> str:
        """What a command prints. It ends this run with what it said if it fails."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        kept |= {"OMP_NUM_THREADS": "1", "PYTHON": self.python, "PYTHONWARNINGS": "ignore"} | variables
        done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        return done.stdout


def machine() -> str:
    model = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    load = os.getloadavg()[0]
    return f"{(model or [platform.machine()])[0]}, {os.cpu_count()} cores, {gigabytes:.0f} GB; load {load:.1f}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions(environment: Environment) -> str:
    names = ("torch", "torch-geometric", "dgl", "pyg-lib", "torch-sparse", "numpy")
    found = environment.run([environment.python, "-m", "pip", "list", "--format=freeze"])
    return ", ".join(line for line in found.splitlines() if line.split("==")[0].replace("_", "-") in names)


def table_of(environment: Environment, script: Path, *words: str) -> str:
    said = environment.run([environment.python, str(script), *words])
    return "\n".join(line for line in said.splitlines() if line.startswith("|") or "left out" in line)


def on_two_hosts(environment: Environment, graph: Path, rates: list[str], passes: int, runs: int) -> Iterator[str]:
    """A row for each way and rate: seconds and CPU seconds of a pass but the first, and bytes of host 1."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        yield "Left out: network namespaces need Linux and root."
        return
    names = [name for name in WAYS if name != "DistDGL" or environment.has("dgl")]
    found: dict[tuple[str, str], list[tuple[float, float, float]]] = {(n, r): [] for r in rates for n in names}
    for _ in range(runs):
        for (name, rate), rows in found.items():
            script, more = ("epoch_dgl.py", []) if name == "DistDGL" else ("epoch_ours.py", ["--way", name])
            command = [
                str(HERE.parent / "two_hosts.sh"),
                str(HERE / script),
                str(graph),
                "--passes",
                str(passes),
                *more,
            ]
            said = environment.run(command, **({} if rate == "none" else {"RATE": rate}))
            seconds = re.findall(r"^pass: ([\d.]+) s, ([\d.]+) CPU-s", said, re.MULTILINE)[1:]
            (counted,) = re.findall(r"host 1 sent (\d+) bytes and received (\d+)", said)
            wall, cpu = (statistics.median(map(float, each)) for each in zip(*seconds, strict=True))
            rows.append((wall, cpu, sum(map(int, counted)) / 1e6))
    yield "| | limit | seconds of a pass | CPU-s of rank 0 | MB of host 1, both ways, whole run |"
    yield "| --- | --- | --- | --- | --- |"
    for (name, rate), rows in found.items():
        wall, cpu, megabytes = (statistics.median(each) for each in zip(*rows, strict=True))
        spread = f"{min(row[0] for row in rows):.1f} to {max(row[0] for row in rows):.1f}"
        yield f"| {name} | {rate} | {wall:.1f} ({spread}) | {cpu:.1f} | {megabytes:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made for the environment, and used again")
    parser.add_argument("graph", type=Path, help="a graph that prepare has saved, with x, y and masks")
    parser.add_argument("--target", type=float, required=True, help="the accuracy to reach")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--num-nodes", type=int, default=200_000, help="of the graph of batches and partitions")
    parser.add_argument("--num-edges", type=int, default=4_000_000)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--passes", type=int, default=2, help="on two hosts, of which the first is not counted")
    parser.add_argument("--runs", type=int, default=1, help="on two hosts, of each way")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    if not (options.graph / "meta.json").exists():
        parser.error(f"{options.graph} is no graph that lightning-gnn-dist prepare has saved")
    if not 0 < options.target < 1:
        parser.error(f"--target is a share of the test nodes between 0 and 1, got {options.target}")
    if min(options.repeats, options.runs) < 1 or options.passes < 2 or options.num_nodes < 1000:
        parser.error(
            "--repeats and --runs must be at least 1, --passes 2 (the first is not counted), and --num-nodes 1000"
        )
    environment = Environment(options.folder.resolve())
    print(f"{machine()}\n{versions(environment)}")
    sizes = f"{options.num_nodes:,} nodes and {options.num_edges:,} edges generated"
    of_hosts = f"{options.runs} runs of {options.passes} passes on two hosts"
    print(f"{options.graph.name}, target {options.target}; {sizes}; {options.repeats} repeats, {of_hosts}")
    size = ["--num-nodes", str(options.num_nodes), "--num-edges", str(options.num_edges)]
    graph, again = options.graph.resolve(), ["--repeats", str(options.repeats)]
    for part in options.only:
        print(f"\n{part}\n", flush=True)
        start, load = time.monotonic(), os.getloadavg()[0]
        if part == "batches":
            print(table_of(environment, HERE.parent / "sampling_peers.py", *size, *again))
        elif part == "partitions":
            print(table_of(environment, HERE / "partitions.py", *size, *again))
        elif part == "accuracy":
            words = [str(graph), "--target", str(options.target), "--seeds", str(options.repeats)]
            print(table_of(environment, HERE / "accuracy.py", *words))
        else:
            rates = ["none", options.rate]
            for row in on_two_hosts(environment, graph, rates, options.passes, options.runs):
                print(row, flush=True)
        minutes = (time.monotonic() - start) / 60
        print(f"\n{minutes:.1f} minutes, at a load of {load:.1f} before and {os.getloadavg()[0]:.1f} after", flush=True)


if __name__ == "__main__":
    main()
