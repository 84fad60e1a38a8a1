"""A command that computes each layer once for all nodes."""

from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_train import SMALL, command
from tests.ranks import run_ranks


@pytest.mark.slow
def test_predict_by_layer_says_what_batches_say(tmp_path: Path) -> None:
    config = ["predict", "--config=configs/local_sgd.yaml", *SMALL]
    writer = f"{{class_path: lightning_gnn_dist.PredictionWriter, init_args: {{path: {tmp_path}/batches.npy}}}}"
    run_ranks(command, 2, *config, f"--output={tmp_path}/layers.npy", "--budget_megabytes=16")
    run_ranks(command, 2, *config, f"--trainer.callbacks={writer}")
    np.testing.assert_allclose(np.load(tmp_path / "layers.npy"), np.load(tmp_path / "batches.npy"), atol=1e-5)
