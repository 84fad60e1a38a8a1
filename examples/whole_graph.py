"""Train on the whole graph in every step, with three processes that hold a part each and exchange the boundary's rows.

python examples/whole_graph.py
"""

import lightning.pytorch as pl
from node_classification import SAGE

from lightning_gnn_dist import Exchange, GrappaStrategy, PartitionedDataModule, WholePartSampler, communities

if __name__ == "__main__":
    data = PartitionedDataModule(
        communities(num_nodes=20_000, num_classes=8),  # cut by METIS, by default; the cut decides what is sent, alone
        sampler=WholePartSampler(2),  # the model has two layers
        boundary=Exchange(),
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=3,
        strategy=GrappaStrategy(),
        max_epochs=100,  # steps: each sees all training nodes and all their neighbours
        check_val_every_n_epoch=20,
        log_every_n_steps=1,
        logger=False,
    )
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
