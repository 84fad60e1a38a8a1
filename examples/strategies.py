"""The module of node_classification.py under each strategy, on parts of the graph that suit it.

python examples/strategies.py llcg      # averages, then steps on the whole graph: METIS parts lose no accuracy
python examples/strategies.py tma       # ranks that meet by the clock, on parts that look alike (SuperTMA)
python examples/strategies.py history   # rare meetings, and no lost edge: reads rows of other ranks' nodes
python examples/strategies.py grappa    # gradients every step and nothing else: parts that rotate

lightning-gnn-dist elastic --ranks 3 -- python examples/strategies.py elastic    # TMA with ranks that may die
"""

import argparse
from functools import partial

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from node_classification import SAGE
from torch.nn import functional

from lightning_gnn_dist import (
    Correction,
    DiscrepancyProbe,
    Elastic,
    EverySeconds,
    EverySteps,
    GrappaStrategy,
    History,
    Holding,
    LLCGStrategy,
    LocalSGDStrategy,
    MetisPartitioner,
    NeighborSampler,
    PartitionedDataModule,
    RandomPartitioner,
    Rotate,
    SuperNodePartitioner,
    TMAStrategy,
    communities,
    coverage_mean,
)


def llcg():
    # Meets after 16 steps; half as many corrections as local steps, and drift correction, which is the default.
    strategy = LLCGStrategy(EverySteps(16), correction=Correction(0.5, lr="local"))
    # The probe logs how far parts are from the whole: use more corrections, or another partition, where it is high.
    fit({"partitioner": MetisPartitioner()}, strategy=strategy, max_epochs=10, callbacks=[DiscrepancyProbe()])


def tma(peers=None):
    strategy = TMAStrategy(EverySeconds(1), peers=peers)
    saver = ModelCheckpoint("checkpoints", save_last=True, enable_version_counter=False)
    parts = {"partitioner": SuperNodePartitioner(1000)}
    fit(parts, devices=2 if peers is None else 1, strategy=strategy, max_epochs=12, callbacks=[saver])


def history():
    parts = {"partitioner": RandomPartitioner(), "boundary": History()}  # cuts most edges; its parts look alike
    fit(parts, strategy=LocalSGDStrategy(EverySteps(16)), max_epochs=10)


def grappa():
    # A base chunk for good, and one that changes: all edges are seen in turn.
    parts = {"partitioner": RandomPartitioner(), "holding": Holding(Rotate())}
    fit(parts, WeighedSAGE, devices=3, strategy=GrappaStrategy(), max_epochs=20, check_val_every_n_epoch=10)


class WeighedSAGE(SAGE):
    """Returns the mean of its seeds' losses by coverage. With a plain mean, whole batches are weighed."""

    def training_step(self, batch):
        losses = functional.cross_entropy(self(batch), batch.y[: batch.batch_size], reduction="none")
        return coverage_mean(losses, batch)


def fit(parts, module=SAGE, devices=2, **options):
    graph = communities(num_nodes=20_000, num_classes=8)
    data = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=256, **parts)
    trainer = pl.Trainer(accelerator="cpu", devices=devices, logger=False, **options)
    model = module(num_features=64, num_classes=8)
    trainer.fit(model, data)
    trainer.test(model, data)


STRATEGIES = {"llcg": llcg, "tma": tma, "elastic": partial(tma, Elastic()), "history": history, "grappa": grappa}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy", choices=STRATEGIES)
    STRATEGIES[parser.parse_args().strategy]()
