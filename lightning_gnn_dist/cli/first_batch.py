"""Compile the loops that make batches of a graph before its first training, in a process of its own.

It takes memory that ``prepare`` has promised not to take, and is not needed where they are kept from before.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch

from lightning_gnn_dist.engine.compiling import is_kept_of

_BATCH = 1024  # seeds, so that the loops for large batches are compiled, too


def is_compiled() -> bool:
    """Return whether a first batch would find its loops."""
    return is_kept_of("lightning_gnn_dist.engine.kernels", "sample")


def compile_for(path: Path) -> None:
    """Let another process make a batch of a saved graph. The graph is there, also if this fails."""
    ran = subprocess.run([sys.executable, "-m", __name__, str(path)], capture_output=True, text=True, check=False)
    if ran.returncode:
        why = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        print(f"The first training will compile the loops that make batches: {why}")


def make_batch(path: Path) -> None:
    """Make one batch, which compiles what is not kept."""
    from lightning_gnn_dist.batches.source import GraphSource  # takes seconds, as PyG does
    from lightning_gnn_dist.engine.sample import BatchKey
    from lightning_gnn_dist.graph.graph import Graph
    from lightning_gnn_dist.sampling.neighbor import NeighborSampler

    graph = Graph.open(path)
    of_one_type = graph.types.offsets[1]
    source = GraphSource(graph, NeighborSampler([15, 10]))
    next(source.make([torch.arange(min(_BATCH, of_one_type))], [BatchKey(0, 0, 0)]))


if __name__ == "__main__":
    make_batch(Path(sys.argv[1]))
