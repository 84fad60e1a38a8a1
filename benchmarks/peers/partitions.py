"""What two METIS parts cost here and in DGL: seconds, CPU seconds, and memory beside the graph.

    python benchmarks/peers/partitions.py --num-nodes 1000000 --num-edges 20000000

Each cut runs in a process of its own that has cut a small graph before, in turns. Peaks of memory are what the process
holds at most during the call, less what it holds before; a peer's own form of the graph is made in the call, and the
edge cut is counted by one code.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from dgl_core import dgl_and_graphbolt
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from sampling import power_law_communities, receivers_of

from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.partition.metis import MetisPartitioner

PARTS = 2


def ours(graph: Graph) -> Tensor:
    return MetisPartitioner()(graph, PARTS, 0).assignment


def dgl(graph: Graph) -> Tensor:
    library, _ = dgl_and_graphbolt()
    theirs = library.graph(("csc", (graph.indptr, graph.indices.long(), [])), num_nodes=graph.num_nodes)
    found: Tensor = library.metis_partition_assignment(theirs, PARTS)
    return found


WAYS: dict[str, Callable[[Graph], Tensor]] = {"ours": ours, "dgl": dgl}


def measure(name: str, num_nodes: int, num_edges: int) -> dict[str, float]:
    graph = power_law_communities(num_nodes, num_edges)
    WAYS[name](power_law_communities(2000, 20_000))  # imports and compiles
    held = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    Path("/proc/self/clear_refs").write_text("5")  # peaks count from here
    start, cpu = time.perf_counter(), time.process_time()
    assignment = WAYS[name](graph)
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    cut = assignment[graph.indices.long()] != assignment[receivers_of(graph)]
    counts = assignment.long().bincount(minlength=PARTS)
    return {
        "seconds": seconds,
        "CPU-s": cpu,
        "GB": (1024 * int(line.split()[1]) - held) / 1e9,
        "cut": float(cut.float().mean()),
        "largest part": float(counts.max() / counts.sum()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=1_000_000)
    parser.add_argument("--num-edges", type=int, default=20_000_000)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--one", choices=WAYS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.num_nodes, options.num_edges)))
        return
    names = ["ours"] + (["dgl"] if dgl_and_graphbolt()[0] else [])
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(options.repeats):
        for name, rows in found.items():
            ran = subprocess.run([sys.executable, *sys.argv, "--one", name], capture_output=True, text=True)
            if ran.returncode:
                sys.exit(f"{name}: {ran.stderr}")
            rows.append(json.loads(ran.stdout.splitlines()[-1]))
    print(f"torch {torch.__version__}; {options.num_nodes:,} nodes, {options.num_edges:,} edges, {PARTS} parts")
    print("| | seconds | CPU-s | GB beside the graph | edges cut | largest part |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, rows in found.items():
        least = {key: min(row[key] for row in rows) for key in rows[0]}
        figures = " | ".join(f"{least[key]:.1f}" for key in ("seconds", "CPU-s", "GB"))
        print(f"| {name} | {figures} | {least['cut']:.1%} | {least['largest part']:.1%} |")


if __name__ == "__main__":
    main()
