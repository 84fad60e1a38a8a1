"""Imported by the server that ranks are forked from: what each of them would load anew is loaded once.

That is all that the package exports, compiled kernels, the code that torch_geometric writes for a layer, and what
Lightning finds out in its first fit. All but the first are found in a thread that ends here, so that no rank inherits
the scratch memory of another's samples.
"""

from __future__ import annotations

import gc
import threading
import warnings

import lightning.pytorch as pl
import torch

import lightning_gnn_dist
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from tests.ranks import quieten
from tests.sage import SAGE


def fit() -> None:
    graph = communities(60, 2, num_features=4, train_share=0.5)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([2, 2]), loading=Loading(num_threads=0))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=1, enable_checkpointing=False, **quiet)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        trainer.fit(SAGE(4, 2), data)


def train_on_a_part() -> None:
    graph = communities(60, 2, num_features=4, train_share=0.5)
    parts = MetisPartitioner()(graph, 2, 0)
    data = PartitionedDataModule(
        graph, partitioner=parts, sampler=NeighborSampler([2, 2]), loading=Loading(num_threads=0)
    )
    own = PartitionedDataModule(data.part(0, 2), sampler=NeighborSampler([2, 2]), loading=Loading(num_threads=0))
    with torch.random.fork_rng():
        module = SAGE(4, 2)
    for batch in (*own.train_dataloader(), *data.val_dataloader(), *data.correction_batches(0, stop=1)):
        module.training_step(batch).backward()


for name in lightning_gnn_dist.__all__:
    getattr(lightning_gnn_dist, name)
quieten()
thread = threading.Thread(target=lambda: (train_on_a_part(), fit()))
thread.start()
thread.join()
gc.enable()
gc.collect()
