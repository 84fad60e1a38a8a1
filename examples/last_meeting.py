"""Meet rarely and lose no edge: local steps read what other ranks had computed of their nodes at the last meeting.

python examples/last_meeting.py
"""

import lightning.pytorch as pl
from node_classification import SAGE

from lightning_gnn_dist import (
    EverySteps,
    History,
    LocalSGDStrategy,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    communities,
)

if __name__ == "__main__":
    data = PartitionedDataModule(
        communities(num_nodes=20_000, num_classes=8),
        partitioner=RandomPartitioner(),  # cuts most edges, and its parts look alike
        sampler=NeighborSampler([10, 10]),
        batch_size=256,
        boundary=History(),
    )
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=LocalSGDStrategy(EverySteps(16)), max_epochs=20, logger=False
    )
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
