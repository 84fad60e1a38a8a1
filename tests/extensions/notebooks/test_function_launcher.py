"""A call of the trainer whose ranks are processes of their own: what was changed there is changed here."""

import re
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from lightning_gnn_dist import (
    EverySteps,
    GrappaStrategy,
    Launch,
    LocalSGDStrategy,
    PartitionedDataModule,
    RandomPartitioner,
)
from lightning_gnn_dist.extensions.notebooks.function_launcher import FunctionLauncher
from lightning_gnn_dist.rounds.launching.launchers import start_method_here
from tests.data_fitting import full_graph_logits, model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.ranks import run_ranks
from tests.sage import SAGE

FORKED = {"launch": Launch(PATIENCE["launch"].timeout, PATIENCE["launch"].start_timeout, start_method="fork")}


class History(pl.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lock: Any = None
        self.model: Any = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps.append(trainer.global_step)
        self.lock, self.model = threading.Lock(), pl_module
        pl_module.noted = [*getattr(pl_module, "noted", []), {"step": trainer.global_step, "loss": torch.tensor(2.0)}]
        pl_module.locks = [self.lock]


class Interrupting(pl.Callback):
    """Rank 1 gets Ctrl-C in the middle of the second round."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 6:
            signal.raise_signal(signal.SIGINT)


def data() -> PartitionedDataModule:
    return PartitionedDataModule(small_graph(), partitioner=RandomPartitioner(), batch_size=16)


def state(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def as_ranks(rank: int, world_size: int, rounds: int, strategy: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    module = model()
    trainer(2, strategy(**options, **PATIENCE), max_epochs=rounds, limit_val_batches=0).fit(module, data())
    return state(module)


LOCAL = (LocalSGDStrategy, {"clock": EverySteps(4)})


def fits_in_a_row(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    warnings.filterwarnings("ignore", "Checkpoint directory .* not empty")  # that of the fit before
    module, source, history = model(), data(), History()
    module.own = [next(module.parameters()).data, *module.parameters()]
    saver = ModelCheckpoint(folder / "saved", monitor="accuracy", mode="max")
    logger = CSVLogger(folder)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    strategy = LocalSGDStrategy(EverySteps(4), **FORKED)
    shown = {"callbacks": [history, saver], "logger": logger}
    one = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=2, **shown, **quiet)
    assert isinstance(one.strategy._launcher, FunctionLauncher)
    one.fit(module, source)
    assert (history.steps, history.lock) == ([4, 8], None) and history.model is module
    assert [note["step"] for note in module.noted] == [4, 8] and not hasattr(module, "locks")
    assert module.own[0].data_ptr() == module.own[1].data_ptr() and module.own[1] is next(module.parameters())
    assert (one.current_epoch, one.global_step, one.strategy.state.round_idx) == (2, 8, 2)  # type: ignore[attr-defined]
    assert Path(saver.best_model_path).is_file() and Path(logger.log_dir, "metrics.csv").is_file()
    assert float(one.callback_metrics["accuracy"]) == float(one.logged_metrics["accuracy"]) > 0.0
    after_two = state(module)
    one.fit_loop.max_epochs = 3
    one.fit(module, source)
    assert history.steps == [4, 8, 12] and one.strategy.state.batches_done == 12  # type: ignore[attr-defined]
    rows = one.predict(module, source)
    tested = one.test(module, source, ckpt_path="best", verbose=False)
    assert len(Path(logger.log_dir, "metrics.csv").read_text().splitlines()) > 4  # of all of these
    nodes, logits = (torch.cat(parts) for parts in zip(*rows, strict=True))
    assert torch.equal(nodes, torch.arange(small_graph().num_nodes))
    return {"two": after_two, "rows": logits, "tested": tested, "weights": state(module)}


@pytest.mark.slow
def test_calls_in_a_row_leave_what_one_process_would(tmp_path: Path) -> None:
    (got,) = run_ranks(fits_in_a_row, 1, tmp_path)
    expected, _ = run_ranks(as_ranks, 2, 2, *LOCAL)
    assert all(torch.equal(got["two"][name], value) for name, value in expected.items())
    module = model()
    module.load_state_dict(got["weights"])
    assert torch.allclose(got["rows"], full_graph_logits(module, small_graph()), atol=1e-5)
    assert got["tested"][0]


class Late(SAGE):
    """Makes its layers where Lightning says that large ones should be made, and notes tensors as it trains."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.left_alone, self.written_into = torch.arange(3), torch.zeros(2)

    def configure_model(self) -> None:
        if not hasattr(self, "made"):
            self.made, self.scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any) -> Tensor:
        self.last = super().training_step(batch)
        self.written_into += 1
        return self.last

    def on_train_end(self) -> None:
        nn.init.constant_(self.made.weight, 3.0)
        nn.init.constant_(self.scale, 4.0)


def fit_of_late_layers(rank: int, world_size: int) -> None:
    module = Late(12, 4)
    left_alone = module.left_alone
    fits = trainer(2, LocalSGDStrategy(EverySteps(4), **FORKED), limit_val_batches=0, precision="64-true")
    fits.fit(module, data())
    assert module.left_alone is left_alone and module.written_into.tolist() == [fits.global_step] * 2
    assert module.last.item() > 0 and not module.last.requires_grad
    assert {weight.dtype for weight in module.parameters()} == {torch.float64}
    assert module.made.weight.tolist() == [[3.0, 3.0]] and module.scale.item() == 4.0
    assert {"made.weight", "made.bias", "scale"} <= module.state_dict().keys()


def test_layers_tensors_and_the_precision_of_ranks_come_back() -> None:
    run_ranks(fit_of_late_layers, 1)


def interrupted(rank: int, world_size: int, strategy: Any, options: dict[str, Any]) -> tuple[str, dict[str, Tensor]]:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets its background jobs ignore it
    module = model()
    one = trainer(2, strategy(**options, **FORKED), callbacks=[Interrupting()], max_epochs=9, limit_val_batches=0)
    with pytest.raises(KeyboardInterrupt) as caught:
        one.fit(module, data())
    assert one.interrupted and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return str(caught.value), state(module)


@pytest.mark.slow
def test_an_interrupt_leaves_the_weights_of_the_last_meeting() -> None:
    ((said, got),) = run_ranks(interrupted, 1, *LOCAL)
    assert said == "All ranks have ended. The model has the weights of their last meeting, that of round 1."
    expected, _ = run_ranks(as_ranks, 2, 1, *LOCAL)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    ((said, got),) = run_ranks(interrupted, 1, GrappaStrategy, {})
    assert said == "All ranks have ended. The model has the weights of the last whole step."
    assert not torch.equal(next(iter(got.values())), next(iter(state(model()).values())))


class Fails(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise ValueError(f"of rank {trainer.global_rank}")


def failed(rank: int, world_size: int, folder: Path) -> tuple[int, list[str]]:
    warnings.filterwarnings("ignore", ".*was called without a model")  # Lightning, when it sees such a callback
    warnings.filterwarnings("ignore", ".*last.*, but there is no last checkpoint")
    saver = OnExceptionCheckpoint(folder)
    options: dict[str, Any] = {"callbacks": [Fails(), saver], "limit_val_batches": 0, "enable_checkpointing": True}
    one = trainer(2, LocalSGDStrategy(EverySteps(4), **FORKED), **options)
    with pytest.raises(ValueError, match="of rank") as caught:
        one.fit(model(), data())
    assert saver in one.callbacks  # type: ignore[attr-defined]
    saved = torch.load(saver.ckpt_path, weights_only=True)
    return len(saved["optimizer_states"]), [line for line in str(caught.value.__cause__).splitlines() if "rank" in line]


def test_callbacks_hear_of_a_failure_in_the_ranks(tmp_path: Path) -> None:
    ((optimizers, (first, *_)),) = run_ranks(failed, 1, tmp_path)
    assert optimizers == 1 and re.match(r"in rank [01]:", first)


def failing(rank: int, world_size: int) -> None:
    module = model()
    module.lock = threading.Lock()
    one = trainer(2, LocalSGDStrategy(EverySteps(4), launch=Launch(start_method="spawn")))
    with pytest.raises(TypeError, match=r"SAGE: cannot pickle '_thread.lock' object\. Ranks are .* in setup\(\)"):
        one.fit(module, data())


def test_what_cannot_travel_is_named() -> None:
    run_ranks(failing, 1)


def test_ranks_are_started_as_the_place_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert start_method_here(Launch(), has_started=False) == "popen"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert start_method_here(Launch(), has_started=False) in ("forkserver", "spawn")
    assert start_method_here(Launch(), has_started=True) == "popen"
    assert start_method_here(Launch(start_method="fork"), has_started=False) == "fork"
    with pytest.raises(ValueError, match="start_method='popen' runs the script again for each rank, and here is none"):
        start_method_here(Launch(start_method="popen"), has_started=False)
    assert start_method_here(Launch(), has_started=False, is_on_gpus=True) == "spawn"
    for forks in ("fork", "forkserver"):  # a rank on a GPU whose driver its server has started computes nothing
        assert start_method_here(Launch(start_method=forks), has_started=True, is_on_gpus=True) == forks  # not used
        with pytest.raises(ValueError, match=f"start_method='{forks}' forks the ranks .*: leave start_method out"):
            start_method_here(Launch(start_method=forks), has_started=False, is_on_gpus=True)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert start_method_here(Launch(), has_started=False) in ("forkserver", "spawn")
