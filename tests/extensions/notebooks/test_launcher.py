"""A call of the trainer whose ranks are forked: what comes back, who is named when one fails, and that none stays."""

import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import Event
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.notebooks.launcher import ForkLauncher, RanksInterruptedError
from lightning_gnn_dist.graph.storage.mapped import all_maps
from lightning_gnn_dist.rounds.launching import start_method_here
from tests.data_fitting import full_graph_logits, model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.memory import reads_memory
from tests.ranks import run_ranks
from tests.sage import SAGE

FORK = lgd.Launch(PATIENCE["launch"].timeout, PATIENCE["launch"].start_timeout, start_method="fork")
WAITS = 600.0  # seconds that a rank is there unless it is ended


def strategy(launch: lgd.Launch = FORK) -> lgd.LocalSGDStrategy:
    return lgd.LocalSGDStrategy(lgd.EverySteps(4), launch=launch)


def data() -> lgd.PartitionedDataModule:
    return lgd.PartitionedDataModule(small_graph(), partitioner=lgd.RandomPartitioner(), batch_size=16)


def none_lives(running: Any) -> bool:
    return not any(process.is_alive() for process in running.strategy._launcher.procs)


def as_ranks(rank: int, world_size: int) -> dict[str, Tensor]:
    module = model()
    trainer(2, strategy(PATIENCE["launch"])).fit(module, data())
    return dict(module.state_dict())


def test_weights_and_metrics_come_back(tmp_path: Path) -> None:
    torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # threads of OpenMP, which do not survive a fork
    module, saver = model(), ModelCheckpoint(tmp_path, monitor="accuracy", mode="max")
    running = trainer(2, strategy(), callbacks=[saver], enable_checkpointing=True)
    running.fit(module, data())
    assert isinstance(running.strategy._launcher, ForkLauncher)
    expected, _ = run_ranks(as_ranks, 2)
    assert all(torch.equal(value, expected[name]) for name, value in module.state_dict().items())
    assert running.callback_metrics["accuracy"] == running.logged_metrics["accuracy"] > 0
    assert Path(saver.best_model_path).is_file()
    assert running.test(module, data(), ckpt_path="best", verbose=False)[0]["accuracy"] > 0
    with pytest.raises(ValueError, match=r"The ranks of the fit before have ended, .* take another Trainer"):
        running.fit(module, data())
    with pytest.raises(ValueError, match="The ranks that trained have ended, and their optimizers with them"):
        running.save_checkpoint(tmp_path / "late.ckpt")


def test_what_would_not_come_back_is_refused(tmp_path: Path) -> None:
    module, path = model(), tmp_path / "rows.npy"
    module.predict_step = module.forward  # type: ignore[method-assign]
    running = trainer(2, strategy(), callbacks=[lgd.PredictionWriter(path)])
    with pytest.raises(ValueError, match=r"Predictions of forked ranks stay .* PredictionWriter\(path\)"):
        running.predict(module, data())
    running.predict(module, data(), return_predictions=False)
    assert torch.allclose(torch.from_numpy(np.load(path)), full_graph_logits(module, small_graph()), atol=1e-5)
    with pytest.raises(ValueError, match="What a Tuner finds in forked ranks stays with them"):
        Tuner(running).lr_find(module, data())


class Late(SAGE):
    def configure_model(self) -> None:
        self.late = nn.Linear(2, 1)


def test_layers_that_only_ranks_have_are_told_of() -> None:
    with pytest.warns(UserWarning, match=r"layers that stay with them \(late\.bias\): make them in __init__"):
        trainer(2, strategy(), limit_val_batches=0).fit(Late(12, 4), data())


class Acts(pl.Callback):
    """Rank 1 does something in its second round, and the others wait."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act, self.never = act, Event()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            self.act() if trainer.global_rank == 1 else self.never.wait(WAITS)


def wrong() -> None:
    raise ValueError("odd labels")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (wrong, r"^Rank 1: ValueError: odd labels\n(.*\n)*.*in wrong\n"),
        (lambda: sys.exit(0), "^Rank 1: SystemExit: 0"),
        (lambda: os._exit(0), "^Rank 1 ended with exit code 0 in the midst of its work"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "^Rank 1 was killed by SIGKILL in the midst of its work"),
    ],
)
def test_the_rank_that_fails_is_named_and_the_others_end(act: Any, message: str) -> None:
    running = trainer(2, strategy(), callbacks=[Acts(act)], limit_val_batches=0)
    with pytest.raises(RuntimeError, match=message):
        running.fit(model(), data())
    assert none_lives(running)


@pytest.mark.filterwarnings("ignore:.*was called without a model", "ignore:.*there is no last checkpoint")
def test_of_several_failures_the_first_is_raised_and_callbacks_of_ranks_hear_of_it(tmp_path: Path) -> None:
    heard = Event()

    class Fail(pl.Callback):  # rank 1 fails first, and ends last
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert trainer.global_rank == 1 or heard.wait(WAITS)
            raise ValueError("odd labels")

        def on_exception(self, trainer: pl.Trainer, *args: Any) -> None:
            heard.set()

    saver = OnExceptionCheckpoint(tmp_path)
    running = trainer(2, strategy(), callbacks=[Fail(), saver], limit_val_batches=0, enable_checkpointing=True)
    with pytest.raises(RuntimeError, match=r"^Rank 1: ValueError"):
        running.fit(model(), data())
    assert torch.load(saver.ckpt_path, weights_only=True)["optimizer_states"]
    assert saver in running.callbacks  # type: ignore[attr-defined]


def test_an_interrupt_ends_the_ranks_alone() -> None:
    here, module = os.getpid(), model()
    before = nn.utils.parameters_to_vector(module.parameters())
    running = trainer(2, strategy(), callbacks=[Acts(lambda: os.kill(here, signal.SIGINT))], max_epochs=10**6)
    # A shell that starts a command in the background lets it ignore interrupts.
    earlier = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(RanksInterruptedError, match=r"All ranks have ended, and the model is what it was"):
            running.fit(module, data())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert running.interrupted and none_lives(running)
    assert torch.equal(before, nn.utils.parameters_to_vector(module.parameters()))


class Looks(pl.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        x = trainer.datamodule.graph.node_arrays["x"]  # type: ignore[attr-defined]
        x.sum()  # every page is in memory
        trainer.strategy.barrier()
        (share,) = [each.sizes["Pss"] for each in all_maps() if each.start <= x.data_ptr() < each.end]
        (self.folder / str(trainer.global_rank)).write_text(str(share / x.nbytes))
        trainer.strategy.barrier()


@pytest.mark.slow
@reads_memory
@pytest.mark.parametrize("is_saved", [False, True])
def test_ranks_hold_one_copy_of_the_graph(is_saved: bool, tmp_path: Path) -> None:
    nodes = 1 << 18
    arrays = {"x": torch.rand(nodes, 64), "y": torch.zeros(nodes).long(), "train_mask": torch.arange(nodes) < 64}
    graph = lgd.Graph(torch.arange(nodes + 1), torch.arange(nodes, dtype=torch.int32), arrays)
    if is_saved:
        graph.save(tmp_path / "graph")
        graph = lgd.Graph.open(tmp_path / "graph")
    source = lgd.PartitionedDataModule(graph, partitioner=lgd.RandomPartitioner(), boundary=lgd.Isolated())
    (tmp_path / "shares").mkdir()
    looks = Looks(tmp_path / "shares")
    trainer(4, strategy(), max_epochs=1, limit_val_batches=0, callbacks=[looks]).fit(SAGE(64, 4), source)
    assert 0.2 < sum(float(file.read_text()) for file in looks.folder.iterdir()) < 2  # four copies would be 4


def test_ranks_are_started_as_the_place_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert start_method_here(lgd.Launch(), has_started=False) == "popen"
    assert start_method_here(FORK, has_started=False) == "fork"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert start_method_here(lgd.Launch(), has_started=False) == "fork"
    assert start_method_here(lgd.Launch(), has_started=True) == "popen"
    with pytest.raises(ValueError, match="start_method='popen' runs the script again for each rank, and here is none"):
        start_method_here(lgd.Launch(start_method="popen"), has_started=False)
    for launch in (lgd.Launch(), FORK):
        with pytest.raises(
            ValueError, match=r"Ranks on GPUs are not forked: .* !torchrun --nproc-per-node=2 train\.py"
        ):
            start_method_here(launch, has_started=False, is_on_gpus=True)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert start_method_here(lgd.Launch(), has_started=False) == "fork"
    for gone in ("spawn", "forkserver"):
        with pytest.raises(ValueError, match=rf"Launch\.start_method='{gone}' went: take 'fork' .*!python train\.py"):
            lgd.Launch(start_method=gone)  # type: ignore[arg-type]
