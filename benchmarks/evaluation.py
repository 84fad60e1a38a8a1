"""What testing a model costs, on real graphs: CPU-seconds of a rank, beside a plain forward of the whole graph.

    python benchmarks/evaluation.py DIRECTORY [GRAPH ...]

DIRECTORY is that of ``accuracy.py``. The module is that of PyG's own Lightning example: ``GraphSAGE`` with 256 hidden
features and two layers, called on ``batch.edge_index``. All columns of a graph are measured in one run, each in one
thread and the second time; the two ranks are new processes each time, so that what a process does once is in their
column.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from accuracy import load
from harness import machine
from torch import Tensor
from torch_geometric.nn import GraphSAGE
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import (
    Evaluation,
    GrappaStrategy,
    Launch,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
)

GRAPHS = ["amazon_computers", "coauthor_cs", "dblp", "arxiv_topology"]
COLUMNS = ["plain forward", "batches of 1,024", "one budget", "validate, 1 rank", "test, 1 rank", "test, each of 2"]


class Model(pl.LightningModule):
    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.gnn = GraphSAGE(num_features, 256, 2, num_classes, dropout=0.5)
        self.accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.gnn(x, edge_index)

    def validation_step(self, batch: Any) -> None:
        rows = self(batch.x, batch.edge_index)[: batch.batch_size]
        self.accuracy(rows, batch.y[: batch.batch_size])
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)

    test_step = validation_step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("graphs", nargs="*", default=GRAPHS)
    options = parser.parse_args()
    print(machine())
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    print("| graph | test nodes |", " | ".join(COLUMNS), "|")
    print("|---" * (len(COLUMNS) + 2) + "|")
    for name in options.graphs:
        data = load(options.directory, name, seed=0)
        seconds = _seconds(data)
        plain, *others = seconds
        shown = [f"{plain:.2f}", *(f"{value:.2f} ({value / plain:.2f})" for value in others)]
        print(f"| {name} | {int(data.test_mask.sum()):,} |", " | ".join(shown), "|", flush=True)


def _seconds(data: Any) -> list[float]:
    """CPU-seconds of each column."""
    model = Model(data.num_features, int(data.y.max()) + 1).eval()
    plain = _second(lambda: model(data.x, data.edge_index))
    small, large = (_module(data, Evaluation(batch_size=size)) for size in (1024, int(data.test_mask.sum())))
    batches = [_second(lambda found=found: _evaluate(model, found)) for found in (small, large)]
    alone = [_of_ranks(model, data, 1, stage) for stage in ("validate", "test")]
    return [plain, *batches, *alone, _of_ranks(model, data, 2, "test")]


def _module(data: Any, evaluation: Evaluation) -> PartitionedDataModule:
    sampler = NeighborSampler([10, 10])
    return PartitionedDataModule(data, partitioner=RandomPartitioner(), sampler=sampler, evaluation=evaluation)


def _of_ranks(model: Model, data: Any, num_ranks: int, stage: str) -> float:
    """The most that any rank takes, from the start of its second evaluation to the end."""
    with tempfile.TemporaryDirectory() as folder:
        strategy = "auto" if num_ranks == 1 else GrappaStrategy(launch=Launch(start_method="fork"))
        quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        clock = Clock(Path(folder))
        trainer = pl.Trainer(accelerator="cpu", devices=num_ranks, strategy=strategy, callbacks=clock, **quiet)
        module = _module(data, Evaluation())
        for _ in range(2):
            getattr(trainer, stage)(model, module, verbose=False)
        return max(float(file.read_text()) for file in Path(folder).iterdir())


class Clock(pl.Callback):
    """Writes the CPU-seconds of an evaluation to a file of this rank."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.start = folder, 0.0

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        self.start = time.process_time()

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        (self.folder / str(trainer.global_rank)).write_text(str(time.process_time() - self.start))


def _evaluate(model: Model, data: PartitionedDataModule) -> None:
    """Full neighbourhoods, as the data module's loader yields them where no trainer knows the model."""
    for batch in data.test_dataloader():
        model(batch.x, batch.edge_index)


def _second(run: Any) -> float:
    with torch.inference_mode():
        for _ in range(2):
            start = time.process_time()
            run()
            spent = time.process_time() - start
    return spent


if __name__ == "__main__":
    main()
