"""Tools that users of Lightning know do on several ranks what their page says."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import lightning_gnn_dist as lgd
from tests.data_fitting import model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.pages import ROOT, blocks
from tests.ranks import run_ranks

STRATEGIES = {
    "rounds": lambda: lgd.LocalSGDStrategy(lgd.EverySteps(4), **PATIENCE),
    "grappa": lambda: lgd.GrappaStrategy(**PATIENCE),
}
SEARCH = """
import lightning.pytorch as pl
import torch
from lightning_gnn_dist import *
from tests.sage import SAGE as Net

graph, in_channels, out_channels = communities(600, 4, num_features=12), 12, 4


class SAGE(Net):
    def __init__(self, in_channels, out_channels, learning_rate):
        super().__init__(in_channels, out_channels)
        self.learning_rate = learning_rate

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)


"""


@pytest.mark.slow
def test_a_search_runs_its_trials_once(tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="optuna is not installed")
    (block,) = (block.code for block in blocks("python", "tools") if "import optuna" in block.code)
    code = SEARCH + block.replace("n_trials=20", "n_trials=2").replace("max_epochs=8", "max_epochs=2, logger=False")
    (tmp_path / "search.py").write_text(f"{code}    print('values', [trial.value for trial in study.trials])\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "search.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (values,) = re.findall(r"values \[(.*)\]", done.stdout)  # from one process
    assert all(0 < float(value) < 1 for value in values.split(",")) and values.count(",") == 1


def with_averages(rank: int, world_size: int, name: str) -> list[list[Tensor]]:
    """The weights with, and without, the mean over the last two of four epochs."""
    weights = []
    for callbacks in ([StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)], []):
        net, data = model(), lgd.PartitionedDataModule(small_graph(), batch_size=16)
        fit = trainer(world_size, STRATEGIES[name](), max_epochs=4, callbacks=callbacks, limit_val_batches=0)
        fit.fit(net, data)
        weights.append([each.detach().clone() for each in net.parameters()])
    return weights


@pytest.mark.parametrize("name", [pytest.param("grappa", marks=pytest.mark.slow), "rounds"])
def test_averages_over_time_are_equal_on_all_ranks(name: str) -> None:
    (mean, last), (other_mean, _) = run_ranks(with_averages, 2, name)
    assert all(map(torch.equal, mean, other_mean))
    assert not any(map(torch.equal, mean, last))


def logged(rank: int, world_size: int, folder: Path, name: str) -> None:
    data = lgd.PartitionedDataModule(small_graph(), batch_size=16)
    callbacks = [lgd.DiscrepancyProbe(), lgd.RunReport()] if name == "rounds" else [lgd.RunReport()]
    options = {"logger": CSVLogger(folder, ""), "callbacks": callbacks, "log_every_n_steps": 1}
    trainer(world_size, STRATEGIES[name](), **options).fit(model(), data)


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_logger_has_the_names_of_the_page(name: str, tmp_path: Path) -> None:
    run_ranks(logged, 2, tmp_path, name)
    (file,) = tmp_path.rglob("metrics.csv")  # of rank 0 alone
    rows = list(csv.DictReader(file.read_text().splitlines()))
    curves = {curve: sum(bool(row[curve]) for row in rows) for curve in rows[0]}
    (table,) = re.findall(r"^\| name \| what \|\n(.*?)\n\n", (ROOT / "docs" / "tools.md").read_text(), re.M | re.S)
    told = {found for found in re.findall(r"`([\w/]+)`", table) if "/" in found}
    assert {found for found in curves if "/" in found} <= told
    assert {"comm/bytes_sent", "data/waited_seconds"} <= set(curves) and curves["accuracy"] == 2
    assert name != "rounds" or {"round/index", "round/seconds", "round/discrepancy"} <= set(curves)
