"""Train on the whole graph in every step, with three processes that hold a part each and exchange the boundary's rows.

python examples/whole_graph.py
python examples/whole_graph.py --shards my_shares       # the same on shards: as if no host could hold the graph
"""

from argparse import ArgumentParser
from pathlib import Path

import lightning.pytorch as pl
from node_classification import SAGE

from lightning_gnn_dist import (
    Exchange,
    GrappaStrategy,
    MetisPartitioner,
    PartitionedDataModule,
    WholePartSampler,
    communities,
    save_shards,
)

NUM_RANKS = 3


def data_of(shards: Path | None) -> pl.LightningDataModule:
    options = {"sampler": WholePartSampler(2), "boundary": Exchange()}  # the model has two layers
    if shards is not None and shards.exists():
        return PartitionedDataModule(shards, **options)
    graph = communities(num_nodes=20_000, num_classes=8)  # cut by METIS; the cut decides what is sent, alone
    if shards is None:
        return PartitionedDataModule(graph, partitioner=MetisPartitioner(), **options)
    save_shards(graph, MetisPartitioner()(graph, NUM_RANKS, seed=0), shards)
    return PartitionedDataModule(shards, **options)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--shards", type=Path, help="the folder of the shards; made where there is none")
    data = data_of(parser.parse_args().shards)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=GrappaStrategy(),
        max_epochs=50,  # steps: each sees all training nodes and all their neighbours
        check_val_every_n_epoch=20,
        log_every_n_steps=1,
        logger=False,
    )
    model = SAGE(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)
