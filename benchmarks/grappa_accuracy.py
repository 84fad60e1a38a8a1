"""What each part of Grappa is worth: accuracy with gradients alone, on real graphs.

    python benchmarks/grappa_accuracy.py DIRECTORY --graphs cora dblp --cuts metis random --arms fixed rotate --seeds 3

All parts of a step are computed one after the other in this process, and their gradients summed with the strategy's
weights: what ranks would do, without the ranks (tests hold the two against each other). Parts, coverage and halos
come from the data module. Same models, splits and reading of the curve as ``accuracy.py``; an epoch is one step.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import MODELS, NO_KEY, Model, load
from harness import keep
from torch_geometric.transforms import GCNNorm

from lightning_gnn_dist import (
    Coverage,
    Fixed,
    Graph,
    Halo,
    Holding,
    Isolated,
    MetisPartitioner,
    PartitionedDataModule,
    RandomPartitioner,
    Redeal,
    Rotate,
    SuperNodePartitioner,
    WholePartSampler,
)
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.homes.residency import default_period

ARMS: dict[str, dict[str, Any]] = {
    "fixed": {},
    "fixed-node": {"coverage": Coverage()},
    "fixed-shrunk": {"coverage": Coverage(shrinkage=1.0)},
    "rotate": {"holding": Holding(Rotate())},
    "rotate-batch": {"holding": Holding(Rotate()), "coverage": Coverage(level="batch")},
    "rotate-node": {"holding": Holding(Rotate()), "coverage": Coverage()},
    "halo": {"boundary": Halo()},
    "rotate-halo": {"holding": Holding(Rotate()), "boundary": Halo()},
    "redeal": {"holding": Holding(Redeal(400))},  # METIS chunks, dealt anew
}


def train(graph: Graph, cut: str, arm: str, options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Validation and test accuracy at the best step for validation."""
    parts = 1 if cut == "full" else options.parts
    partitioner = {"random": RandomPartitioner(), "supernodes": SuperNodePartitioner(options.supernodes)}.get(cut)
    settings: dict[str, Any] = {"holding": Holding(Fixed()), "coverage": None, "boundary": Isolated()} | ARMS[arm]
    sampler = WholePartSampler(options.layers)
    data = PartitionedDataModule(
        graph, partitioner=partitioner or MetisPartitioner(), sampler=sampler, seed=seed, **settings
    )
    sweep = settings["holding"].residency.sweep(parts)
    period = options.period or default_period(options.steps, sweep)
    pl.seed_everything(seed, verbose=False)
    sizes = [graph.node_arrays["x"].shape[1], *[64] * (options.layers - 1), int(graph.node_arrays["y"].max()) + 1]
    model = MODELS[options.model](sizes, options.dropout)
    optimizer, batches, curve = torch.optim.Adam(model.parameters(), lr=0.01), [], []
    for step in range(options.steps):
        if step % period == 0 and (step == 0 or sweep > 1):
            held = [data.part(rank, parts, step // period) for rank in range(parts)]
            level = settings["coverage"].level if settings["coverage"] else "node"
            batches = [whole_batch(part, sampler, level) for part in held if part.split("train").numel()]
        take_step(model, optimizer, batches)
        if (step + 1) % options.every == 0:
            curve.append(evaluate(model, graph, sampler))
    return max(curve, key=lambda point: point[0])


def whole_batch(part: Graph, sampler: WholePartSampler, level: str) -> Any:
    batch = assemble(part, sampler.sample_bulk(part, [part.split("train")], [NO_KEY])[0])
    if level == "batch":
        batch.coverage = torch.full_like(batch.coverage, float(batch.coverage[: batch.batch_size].mean()))
    return batch


def take_step(model: Model, optimizer: torch.optim.Optimizer, batches: list[Any]) -> None:
    """Along the sum of what ranks would contribute."""
    weights = [
        float(batch.coverage[: batch.batch_size].sum()) if "coverage" in batch else batch.batch_size
        for batch in batches
    ]
    optimizer.zero_grad()
    for batch, weight in zip(batches, weights, strict=True):
        (model.training_step(batch) * (weight / sum(weights))).backward()
    optimizer.step()


@torch.no_grad()
def evaluate(model: Model, graph: Graph, sampler: WholePartSampler) -> tuple[float, float]:
    everyone = torch.arange(graph.num_nodes)
    batch = assemble(graph, sampler.sample_bulk(graph, [everyone], [NO_KEY])[0])
    model.eval()
    right = (model(batch).argmax(1) == batch.y).float()
    model.train()
    return float(right[batch.val_mask].mean()), float(right[batch.test_mask].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["cora"])
    parser.add_argument("--cuts", nargs="+", default=["full", "metis", "random", "supernodes"])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--model", choices=MODELS, default="sage")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.5)
    parser.add_argument("--parts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=10, help="steps between two looks at the accuracy")
    parser.add_argument("--period", type=int, help="steps of a super-epoch; default: one sweep fits the run")
    parser.add_argument("--supernodes", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for name in options.graphs:
        for cut in options.cuts:
            for arm in ["fixed"] if cut == "full" else options.arms:
                if arm == "redeal" and cut != "metis":
                    continue  # its chunks are METIS clusters
                show(name, cut, arm, options)


def show(name: str, cut: str, arm: str, options: argparse.Namespace) -> None:
    tests = []
    for seed in range(options.seeds):
        data = load(options.directory, name, seed)
        graph = Graph.from_pyg(GCNNorm()(data) if options.model == "gcn" else data)
        val, test = train(graph, cut, arm, options, seed)
        tests.append(test)
        if options.out:
            run = {
                "graph": name,
                "cut": cut,
                "arm": arm,
                "seed": seed,
                "layers": options.layers,
                "model": options.model,
            }
            keep(options.out, run | {"val": val, "test": test})
    spread = statistics.stdev(tests) if len(tests) > 1 else 0.0
    print(f"{name:18} {cut:11} {arm:17} {options.layers} {statistics.mean(tests):.3f} +- {spread:.3f}", flush=True)


if __name__ == "__main__":
    main()
