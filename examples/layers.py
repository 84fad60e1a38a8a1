"""The same module, predicting all nodes one layer at a time: each layer once for every node, in a budget of memory.

python examples/layers.py
cd examples && lightning-gnn-dist predict --config configs/llcg.yaml --model layers.LayeredSAGE --output logits.npy
"""

import lightning.pytorch as pl
from node_classification import SAGE

from lightning_gnn_dist import (
    EverySteps,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    communities,
    predict_by_layer,
)


class LayeredSAGE(SAGE):
    """Reads the checkpoints of the other: it has the same weights."""

    def layers(self):
        first, last = self.convs
        return [lambda batch: conv_of_one_hop(first, batch).relu(), lambda batch: conv_of_one_hop(last, batch)]


def conv_of_one_hop(conv, batch):
    (block,) = batch.blocks  # and batch.x is what the layer before returned
    return conv((batch.x, batch.x[: block.num_dst]), block.adj)


if __name__ == "__main__":
    graph = communities(num_nodes=20_000, num_classes=8)
    sampler = NeighborSampler([10, 10])
    data = PartitionedDataModule(graph, partitioner=RandomPartitioner(), sampler=sampler, batch_size=256)
    strategy = LocalSGDStrategy(EverySteps(16))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=8, logger=False)
    model = LayeredSAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
    predict_by_layer(trainer, model, graph, "logits.npy", budget_bytes=64 << 20, overwrite=True)
