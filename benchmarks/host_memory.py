"""Memory of a graph on a host whose ranks hold one part of it, by the share of its pages that each of them has.

    python benchmarks/host_memory.py FOLDER                      # a graph with 4.1 GB of features
    sudo env RANKS_PER_HOST=2 benchmarks/two_hosts.sh benchmarks/host_memory.py FOLDER --ranks 2

Two hosts, so each holds half of the graph. All ranks read all rows of their part; then those of a host add up the
shares of its pages (PSS) that Linux counts for each: one copy of the part where they share it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_gnn_dist import (
    Graph,
    GrappaStrategy,
    Holding,
    Isolated,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
)

NUM_NODES, WIDTH, DEGREE = 8_000_000, 128, 4


def make(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    is_train = torch.zeros(NUM_NODES, dtype=torch.bool)
    is_train[::100] = True
    rows = torch.randn(NUM_NODES, WIDTH, generator=generator)
    arrays = {"x": rows, "y": torch.zeros(NUM_NODES, dtype=torch.long), "train_mask": is_train}
    arrays |= {"val_mask": ~is_train, "test_mask": torch.zeros(NUM_NODES, dtype=torch.bool)}
    senders = torch.randint(NUM_NODES, (NUM_NODES * DEGREE,), generator=generator)
    Graph(torch.arange(0, NUM_NODES * DEGREE + 1, DEGREE), senders, arrays).save(folder)


def share_of_pages(array: Tensor) -> int:
    """This process's share of the memory that an array is mapped in, in bytes."""
    found, address = False, array.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            found = begin <= address < end
        elif found and line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


class Looks(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, 2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        x = self.trainer.datamodule._home.running_part().node_arrays["x"]  # type: ignore[attr-defined]
        x.sum()
        self.trainer.strategy.barrier()  # all of them have read all
        shares: list[Any] = [None] * self.trainer.world_size
        torch.distributed.all_gather_object(shares, share_of_pages(x))
        if self.global_rank == 0:
            of_host = sum(shares[: self.trainer.num_devices])
            copies = f"{of_host / x.nbytes:.3f} of one copy"
            print(f"{self.trainer.num_devices} ranks: {of_host / 1e9:.2f} GB, {copies}", flush=True)

    def training_step(self, batch: Any) -> Tensor:
        return self.linear(batch.x)[: batch.batch_size].square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(folder: Path, ranks: int) -> None:
    data = PartitionedDataModule(
        Graph.open(folder),
        partitioner=RandomPartitioner(),
        sampler=NeighborSampler([2]),
        boundary=Isolated(),
        holding=Holding(per="host"),
    )
    small: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    small |= {"max_epochs": 1, "limit_train_batches": 1, "limit_val_batches": 0, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", num_nodes=2, devices=ranks, strategy=GrappaStrategy(), **small)
    trainer.fit(Looks(), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, help="of each host")
    options = parser.parse_args()
    make(options.folder) if options.ranks is None else run(options.folder, options.ranks)


if __name__ == "__main__":
    main()
