"""Train on the workers of a Ray cluster, with Ray Train's TorchTrainer; `pip install "ray[train]"` first.

python examples/ray_train.py
"""

import os

import lightning.pytorch as pl
import ray.train
from node_classification import SAGE
from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_gnn_dist import EverySteps, LLCGStrategy, NeighborSampler, PartitionedDataModule, communities


class RayLLCGStrategy(LLCGStrategy, RayDDPStrategy):
    """LLCG on the workers and the devices that Ray gives out. Any strategy of the package takes its place."""


def train(config):
    """What every worker runs. A run that Ray starts again goes on from its last checkpoint."""
    graph = communities(num_nodes=20_000, num_classes=8)  # or the path of a saved graph that every host can open
    data = PartitionedDataModule(graph, sampler=NeighborSampler([10, 10]), batch_size=256)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices="auto",  # one for each worker
        strategy=RayLLCGStrategy(EverySteps(16)),
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],  # metrics and a checkpoint to Ray after every epoch
        max_epochs=config["max_epochs"],
        logger=False,
        enable_checkpointing=False,  # they are Ray's
        enable_progress_bar=False,
    )
    checkpoint, model = ray.train.get_checkpoint(), SAGE(num_features=64, num_classes=8)
    if checkpoint is None:
        prepare_trainer(trainer).fit(model, data)
    else:
        with checkpoint.as_directory() as folder:
            path = os.path.join(folder, RayTrainReportCallback.CHECKPOINT_NAME)
            prepare_trainer(trainer).fit(model, data, ckpt_path=path)


if __name__ == "__main__":
    workers = ray.train.ScalingConfig(num_workers=2)  # use_gpu=True, and accelerator="gpu" above
    restarts = ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=2))
    trainer = TorchTrainer(train, train_loop_config={"max_epochs": 8}, scaling_config=workers, run_config=restarts)
    print("accuracy", trainer.fit().metrics["accuracy"])
