"""Predict links of a graph that no host holds: two processes, each with one shard of the split.

python examples/sharded_links.py                          # divides a split into link_shards/, and trains on it
lightning-gnn-dist divide my_split link_shards --parts 2  # does the same with a saved split of your own
"""

from argparse import ArgumentParser
from pathlib import Path

import lightning.pytorch as pl
from link_prediction import LinkPredictor

from lightning_gnn_dist import (
    LinkDataModule,
    LLCGStrategy,
    MetisPartitioner,
    NeighborSampler,
    communities,
    save_shards,
    split_edges,
)

NUM_RANKS = 2


def divide(shards: Path) -> None:
    """What one host does, once; then each host takes shares.json and its own shard."""
    graph = communities(num_nodes=8_000, num_classes=40, homophily=0.9, noise=1.0)
    split = split_edges(graph, val=0.02, test=0.05, negatives=50)
    save_shards(split, MetisPartitioner()(split.graph, NUM_RANKS, seed=0), shards)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--shards", type=Path, default=Path("link_shards"), help="their folder; made if there is none")
    shards = parser.parse_args().shards
    if not shards.exists():
        divide(shards)
    data = LinkDataModule(shards, sampler=NeighborSampler([10, 5]), batch_size=512)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=LLCGStrategy(),
        max_epochs=16,
        enable_checkpointing=False,
        check_val_every_n_epoch=4,
        logger=False,
    )
    model = LinkPredictor(num_features=64)
    trainer.fit(model, data)
    trainer.test(model, data)  # exact: every held edge once, among its negatives, wherever they lie
