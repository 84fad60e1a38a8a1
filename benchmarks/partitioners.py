"""What partitioners cost on graphs that grow: cut edges, CPU-seconds and memory, each in a process of its own.

    python benchmarks/partitioners.py make big --edges 20000000
    python benchmarks/partitioners.py cut big --parts 64 --out partitioners.jsonl

``make`` saves a graph of 1,024 communities, eight edges in ten inside of them, ten edges a node. ``cut`` prints a row
for each partitioner; with ``--only`` for one of them, in this process. Memory is the most that a process has
more than before, with the graph's pages. Loops are compiled on a small graph first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import torch
from harness import held, keep, machine

from lightning_gnn_dist import Graph, MetisPartitioner, StreamingPartitioner, communities
from lightning_gnn_dist.partition.base import Partitioner

DEGREE = 10
WAYS: dict[str, Partitioner] = {
    "streaming": StreamingPartitioner(),
    "metis": MetisPartitioner(),
}


def make(options: argparse.Namespace) -> None:
    """Save a graph with a single feature."""
    graph = communities(options.edges // DEGREE, 1024, mean_degree=DEGREE, homophily=0.8, num_features=1)
    graph.save(options.graph)


def cut_all(options: argparse.Namespace) -> None:
    """Start a process for each partitioner."""
    print(machine())
    for name in WAYS:
        more = ["--out", str(options.out)] if options.out else []
        command = [sys.executable, __file__, "cut", str(options.graph), "--parts", str(options.parts), "--only", name]
        if code := subprocess.run([*command, *more], check=False, timeout=options.minutes * 60).returncode:
            print(f"{name} ended with {code}")


def cut(options: argparse.Namespace) -> None:
    """Cut the graph, and print what that took."""
    partitioner, graph = WAYS[options.only], Graph.open(options.graph)
    partitioner(communities(1000, 4, num_features=1), 4, 0)
    Path("/proc/self/clear_refs").write_text("5")  # the most memory counts from here; METIS lets no thread look at it
    before, began, used = held("VmHWM"), time.perf_counter(), time.process_time()
    partition = partitioner(graph, options.parts, 0)
    seconds, cpu, most = time.perf_counter() - began, time.process_time() - used, held("VmHWM") - before
    share = partition.report(graph).cut_ratio
    run = {"graph": options.graph.name, "edges": graph.num_edges, "parts": options.parts, "partitioner": options.only}
    run |= {"cut": round(share, 4), "cpu": round(cpu, 1), "wall": round(seconds, 1), "bytes": most}
    keep(options.out, run)
    print(f"{options.only:18} cut {share:6.1%}, {cpu:7.1f} CPU-s, {seconds:7.1f} s, {most / 1e9:6.2f} GB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("make", "cut"))
    parser.add_argument("graph", type=Path)
    parser.add_argument("--edges", type=int, default=5_000_000)
    parser.add_argument("--parts", type=int, default=64)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--minutes", type=float, default=30.0, help="for each partitioner (default: 30)")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.what == "make":
        make(options)
    else:
        (cut if options.only else cut_all)(options)


if __name__ == "__main__":
    main()
