"""The same module, corrected on the whole graph: METIS parts without the loss of accuracy.

python examples/llcg.py
"""

import lightning.pytorch as pl
from node_classification import SAGE

from lightning_gnn_dist import (
    Correction,
    DiscrepancyProbe,
    EverySteps,
    LLCGStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    communities,
)

if __name__ == "__main__":
    data = PartitionedDataModule(
        communities(num_nodes=20_000, num_classes=8),
        partitioner=MetisPartitioner(),
        sampler=NeighborSampler([10, 10]),
        batch_size=256,
    )
    # Meets after 16 steps; half as many corrections as local steps, and drift correction, which is the default.
    strategy = LLCGStrategy(EverySteps(16), correction=Correction(0.5, lr="local"))
    # The probe logs how far parts are from the whole: use more corrections, or another partition, where it is high.
    probe = DiscrepancyProbe()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=10, callbacks=[probe], logger=False
    )
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
