"""Accuracy of training on parts of graphs with types, against training on the whole graph in one process.

    python benchmarks/typed_accuracy.py DIRECTORY --graphs openflights aifb acm --ranks 4 --seeds 3

DIRECTORY holds ``<graph>.npz`` files and a ``read_typed.py`` with ``to_hetero(name, reverse=True)``. Two layers of
GraphSAGE for each edge type, hidden size 64, dropout 0.5, a linear layer for each type with features, which are
standardised, and learned rows for the others; LazyAdam 0.01, fan-out 15 and 10 of each type, batches of 64 seeds of all
ranks together, 240 local steps. The accuracy is that of the weights of the best of 24 validations, on all test nodes.
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from events import hetero_of, spread
from harness import keep
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from rows import FORK, Outcome
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    EverySteps,
    Graph,
    GrappaStrategy,
    LazyAdam,
    LLCGStrategy,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
)

STEPS, ROUND, SEEDS, HIDDEN = 240, 10, 64, 64
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "one process": lambda: SingleDeviceStrategy(torch.device("cpu")),
    "GrappaStrategy": lambda: GrappaStrategy(launch=FORK),
    "LLCGStrategy": lambda: LLCGStrategy(EverySteps(ROUND), launch=FORK),
    "LocalSGDStrategy": lambda: LocalSGDStrategy(EverySteps(ROUND), launch=FORK),
}


def graph_of(directory: Path, name: str) -> Graph:
    """The graph with its reverse types and standardised features."""
    data = hetero_of(directory, name, reverse=True)
    for store in data.node_stores:
        if "x" in store:
            x = store.x.to_dense().float() if store.x.is_sparse else store.x.float()
            store.x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    for kind, store in data.edge_items():
        for key in [key for key in store if key != "edge_index"]:
            del data[kind][key]
    seeds = [store._key for store in data.node_stores if "train_mask" in store]
    return Graph.from_pyg(data).with_seeds(seeds[0])


class Layer(nn.Module):
    """A convolution for each edge type; a node adds up what it gets."""

    def __init__(self, kinds: list[tuple[str, str, str]]) -> None:
        super().__init__()
        self.convs = nn.ModuleDict({"__".join(kind): SAGEConv(HIDDEN, HIDDEN) for kind in kinds})

    def forward(self, x: dict[str, Tensor], blocks: Any) -> dict[str, Tensor]:
        rows: dict[str, list[Tensor]] = {}
        for kind, block in blocks.items():
            if "__".join(kind) in self.convs and kind[0] in x:
                ends = x[kind[0]], x[kind[2]][: block.num_dst]
                rows.setdefault(kind[2], []).append(self.convs["__".join(kind)](ends, block.adj))
        return {target: torch.stack(found).sum(0).relu() for target, found in rows.items()}


class Classifier(pl.LightningModule):
    """Rows of 64 numbers for all nodes, and two layers."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        types = graph.types
        assert types is not None and types.seeds is not None
        self.target = types.seeds
        to_target = [kind for kind in types.edge_types if kind[2] == self.target]
        read = {source for source, _, _ in to_target} | {self.target}  # what the last layer reads
        to_read = [kind for kind in types.edge_types if kind[2] in read]
        self.maps, self.rows = nn.ModuleDict(), nn.ModuleDict()
        for kind in sorted(read | {source for source, _, _ in to_read}):
            arrays = types.node_arrays[kind]
            if "x" in arrays:
                self.maps[kind] = nn.Linear(arrays["x"].shape[1], HIDDEN)
            else:
                self.rows[kind] = nn.Embedding(types.num_nodes[kind], HIDDEN, sparse=True)
                nn.init.normal_(self.rows[kind].weight, std=0.1)
        self.layers = nn.ModuleList([Layer(to_read), Layer(to_target)])
        num_classes = int(types.node_arrays[self.target]["y"].max()) + 1
        self.head = nn.Linear(HIDDEN, num_classes)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch: Any) -> Tensor:
        x = {kind: layer(batch[kind].x) for kind, layer in self.maps.items()}
        x |= {kind: rows(batch[kind].n_id) for kind, rows in self.rows.items()}
        for layer, blocks in zip(self.layers, batch.blocks, strict=True):
            dropped = partial(functional.dropout, p=0.5, training=self.training)
            x = layer({kind: dropped(rows) for kind, rows in x.items()}, blocks)
        scores: Tensor = self.head(functional.dropout(x[self.target], 0.5, self.training))
        return scores

    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch[self.target].y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        self.accuracy(self(batch), batch[self.target].y[: batch.batch_size])
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LazyAdam(self.parameters(), lr=0.01)


def run(graph: Graph, arm: str, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """One training, tested in one process."""
    ranks = 1 if arm == "one process" else options.ranks
    pl.seed_everything(seed, verbose=False)
    module = Classifier(graph)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([15, 10]), batch_size=SEEDS // ranks, seed=seed)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "accelerator": "cpu", "num_sanity_val_steps": 0}
    in_rounds = arm in ("LocalSGDStrategy", "LLCGStrategy")
    length: dict[str, Any] = {"max_epochs": STEPS // ROUND} if in_rounds else {"max_steps": STEPS, "max_epochs": -1}
    if not in_rounds:
        length |= {"check_val_every_n_epoch": None, "val_check_interval": ROUND}
    trainer = pl.Trainer(
        devices=ranks, strategy=STRATEGIES[arm](), callbacks=[Outcome(options.scratch)], **length, **quiet
    )
    trainer.fit(module, data)
    outcome = torch.load(options.scratch)
    module.load_state_dict(outcome["weights"])
    alone = PartitionedDataModule(graph, sampler=NeighborSampler([15, 10]), batch_size=256)
    (metrics,) = pl.Trainer(devices=1, **quiet).test(module, alone, verbose=False)
    return {"test": metrics["accuracy"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--graphs", nargs="+", default=["openflights", "aifb", "acm"])
    parser.add_argument("--arms", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path("typed.tmp.pt"), help="a file that may be overwritten")
    parser.add_argument("--out", type=Path, help="append every run to this file, one JSON object a line")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)  # before anything is forked
    print("| graph | strategy | accuracy | from one process |\n| --- | --- | --- | --- |")
    for name in options.graphs:
        graph, alone = graph_of(options.directory, name), [0.0] * options.seeds
        for arm in options.arms:
            found = [run(graph, arm, seed, options)["test"] for seed in range(options.seeds)]
            alone = found if arm == "one process" else alone
            for seed, test in enumerate(found):
                keep(options.out, {"graph": name, "arm": arm, "seed": seed, "test": test})
            apart = [one - other for one, other in zip(found, alone, strict=True)]
            print(f"| {name} | {arm} | {spread(found)} | {spread(apart)} |", flush=True)


if __name__ == "__main__":
    main()
