"""The time and memory that the best links of nodes take, of a real graph or of one that is made.

    python benchmarks/best_links.py ogbl_ddi.npz --score dot model
    python benchmarks/best_links.py --num-nodes 200000 --senders 1000 --score dot

The rows are those of an untrained GraphSAGE of two layers. Time is the processor's, of one thread, and memory VmRSS
beyond what there is before; a first small run has compiled what is compiled.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from harness import LayeredSAGE, Peak

from lightning_gnn_dist import Graph, LinkSplit, best_links, communities, through_layers

WIDTH = 64


class SAGE(LayeredSAGE):
    def forward(self, batch: Any) -> torch.Tensor:
        rows, (sender, receiver) = through_layers(self, batch), batch.edge_label_index
        return (rows[sender] * rows[receiver]).sum(1)


def graph_of(options: argparse.Namespace) -> Graph:
    if options.graph is None:
        made = communities(options.num_nodes)
        return Graph(made.indptr, made.indices, {"x": made.node_arrays["x"]})
    with np.load(options.graph) as arrays:
        edges, count = torch.from_numpy(arrays["edge_index"]).long(), int(arrays["edge_index"].max()) + 1
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(0))
    return Graph.from_edge_index(edges, count, {"x": x})


def measured(split: LinkSplit, senders: torch.Tensor, score: Any, budget_bytes: int) -> tuple[float, float]:
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    torch.manual_seed(0)
    model = SAGE([split.graph.node_arrays["x"].shape[1], WIDTH, WIDTH])
    peak, start = Peak("VmRSS"), time.process_time()
    best_links(trainer, model, split, senders=senders, score=score, budget_bytes=budget_bytes)
    seconds = time.process_time() - start
    return seconds, peak.stop() / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path, nargs="?", help="an .npz with edge_index")
    parser.add_argument("--num-nodes", type=int, default=100_000)
    parser.add_argument("--senders", type=int, help="so many at random (default: all)")
    parser.add_argument("--score", nargs="+", choices=("dot", "model"), default=["dot"])
    parser.add_argument("--budget-megabytes", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    graph = graph_of(options)
    split, count = LinkSplit(graph, {}), graph.num_nodes
    senders = torch.randperm(count, generator=torch.Generator().manual_seed(0))[: options.senders or count]
    measured(split, senders[:2], options.score[0], 16 << 20)
    for score in options.score:
        seconds, megabytes = measured(split, senders, score, options.budget_megabytes << 20)
        pairs = len(senders) * count
        print(
            f"{count:,} nodes, {graph.num_edges:,} edges, {len(senders):,} senders, {score}: {seconds:.1f} s, "
            f"{1e9 * seconds / pairs:.1f} ns a pair, {megabytes:.0f} MB"
        )


if __name__ == "__main__":
    main()
