"""Imported by the server that ranks are forked from: what each of them would load anew is loaded once.

That is all that the package exports, compiled kernels, and the code that torch_geometric writes for a layer. The last
two are found in a thread that ends here, so that no rank inherits the scratch memory of another's samples.
"""

from __future__ import annotations

import threading

import torch

import lightning_gnn_dist
from lightning_gnn_dist.batches.loading import Loading
from lightning_gnn_dist.data.datamodule import PartitionedDataModule
from lightning_gnn_dist.graph.synthetic import communities
from lightning_gnn_dist.partition.metis import MetisPartitioner
from lightning_gnn_dist.sampling.neighbor import NeighborSampler
from tests.sage import SAGE


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
thread = threading.Thread(target=train_on_a_part)
thread.start()
thread.join()
