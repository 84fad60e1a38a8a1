"""Ranks on GPUs, one each, started as users do, by the command and by a script; code without a script is refused."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = ["--data.graph.init_args.num_nodes=2000", "--trainer.max_epochs=2", "--trainer.enable_progress_bar=false"]
SMALL += ["--trainer.enable_checkpointing=false"]
LINES = """
import warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl, torch
from torch.nn import functional
from torch_geometric.nn import SAGEConv
from lightning_gnn_dist import GrappaStrategy, LocalSGDStrategy, EverySteps, PartitionedDataModule, communities

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(16, 4)
    def forward(self, batch):
        return self.conv(batch.x, batch.edge_index)[: batch.batch_size]
    def training_step(self, batch):
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])
    def predict_step(self, batch):
        return self(batch).argmax(1)
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

if __name__ == "__main__":
    pl.seed_everything(0)
    data, model = PartitionedDataModule(communities(2000, 4, num_features=16), batch_size=64), Net()
    for strategy in (GrappaStrategy(), LocalSGDStrategy(EverySteps(8))):
        trainer = pl.Trainer(accelerator="gpu", devices=2, strategy=strategy, max_epochs=2, num_sanity_val_steps=0,
                             limit_val_batches=0, logger=False, enable_checkpointing=False, enable_model_summary=False)
        trainer.fit(model, data)
        rows = trainer.predict(model, data)
        if trainer.is_global_zero:
            print("rows", len(torch.cat(rows)))
"""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")]


def said_by(*command: str, folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=dict(os.environ), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("config", ["grappa.yaml", "llcg.yaml"])
def test_the_command(config: str, tmp_path: Path) -> None:
    logger = f"--trainer.logger.init_args.save_dir={tmp_path}"
    on = ["--trainer.accelerator=gpu", "--trainer.devices=2"]
    said_by("-m", "lightning_gnn_dist", "fit", "--config", f"configs/{config}", *SMALL, *on, logger, folder=EXAMPLES)
    (figures,) = tmp_path.rglob("metrics.csv")
    found = [float(row["accuracy"]) for row in csv.DictReader(figures.read_text().splitlines()) if row["accuracy"]]
    assert found[-1] > 0.15  # of 8 classes, in two rounds or passes


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LINES)
    assert said_by("train.py", folder=tmp_path).count("rows 1000") == 2  # each rank predicts its share


def test_code_that_is_no_script(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LINES], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "Ranks on GPUs are not forked" in done.stderr and "!python train.py" in done.stderr
