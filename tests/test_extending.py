"""What docs/extending.md shows works from a package of its own, which registers nothing: its values are passed."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.pages import ROOT, blocks
from tests.python_server import fast_python

FIT = """
import lightning.pytorch as pl
from lightning_gnn_dist import NeighborSampler, PartitionedDataModule, communities
from other_package.boundaries import StrongTies
from other_package.samplers import EdgeSampler
from tests.sage import SAGE

if __name__ == "__main__":
    for options in ({"boundary": StrongTies(2), "sampler": NeighborSampler([3, 3])}, {"sampler": EdgeSampler(0.5)}):
        data = PartitionedDataModule(communities(200, 4, num_features=8), batch_size=32, **options)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "max_epochs": 1}
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="grappa", limit_val_batches=0, **quiet)
        trainer.fit(SAGE(8, 4), data)
        assert trainer.global_step > 0
    print("trained")
"""


@pytest.mark.slow
def test_a_boundary_and_a_sampler_come_from_another_package(tmp_path: Path) -> None:
    package = tmp_path / "other_package"
    package.mkdir()
    for name, section in (("boundaries", "A boundary"), ("samplers", "A sampler")):
        (block,) = blocks("python", "extending", section)
        (package / f"{name}.py").write_text(block.code.partition("\n\n\ndata = ")[0] + "\n")
    (tmp_path / "fits.py").write_text(FIT)
    command, found = [fast_python(), "fits.py"], os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=tmp_path, env=found, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and "trained" in run.stdout, run.stderr[-3000:]
