"""Classify nodes with ranks that meet by the clock, on parts that look alike (SuperTMA).

python examples/tma.py                                                        # two processes
lightning-gnn-dist elastic --ranks 3 -- python examples/tma.py --elastic      # three, any of which may die
"""

import argparse

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from node_classification import SAGE

from lightning_gnn_dist import (
    EverySeconds,
    NeighborSampler,
    PartitionedDataModule,
    SuperNodePartitioner,
    TMAStrategy,
    communities,
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--elastic", action="store_true", help="every rank is a process of its own")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    data = PartitionedDataModule(
        communities(num_nodes=20_000, num_classes=8),
        partitioner=SuperNodePartitioner(1000),
        sampler=NeighborSampler([10, 10]),
        batch_size=256,
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1 if options.elastic else 2,
        strategy=TMAStrategy(EverySeconds(1), elastic=options.elastic),
        max_epochs=options.rounds,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True, enable_version_counter=False)],
        logger=False,
    )
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
