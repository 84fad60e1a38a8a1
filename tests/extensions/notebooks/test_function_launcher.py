"""A call of the trainer whose ranks are processes of their own: what was changed there is changed here."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn

import lightning_gnn_dist as lgd
from lightning_gnn_dist.extensions.notebooks.function_launcher import FunctionLauncher
from lightning_gnn_dist.extensions.notebooks.rank_processes import (
    How,
    InterruptedRankError,
    RankProcesses,
    RankTraceback,
)
from lightning_gnn_dist.rounds.launching import start_method_here
from tests.data_fitting import full_graph_logits, model, small_graph, trainer
from tests.every_strategy import PATIENCE
from tests.memory import reads_memory
from tests.python_server import fast_python
from tests.ranks import run_ranks
from tests.sage import SAGE
from tests.strategies import graph_fitting

FORKED = {"launch": lgd.Launch(PATIENCE["launch"].timeout, PATIENCE["launch"].start_timeout, start_method="fork")}


class History(pl.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.lock: Any = None
        self.model: Any = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps.append(trainer.global_step)
        self.lock, self.model = threading.Lock(), pl_module
        pl_module.noted = [*getattr(pl_module, "noted", []), {"step": trainer.global_step, "loss": 2.0}]
        pl_module.locks = [self.lock]


class Interrupting(pl.Callback):
    """Rank 1 gets Ctrl-C in the middle of the second round."""

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 1 and trainer.global_step == 6:
            signal.raise_signal(signal.SIGINT)


def data() -> lgd.PartitionedDataModule:
    return lgd.PartitionedDataModule(small_graph(), partitioner=lgd.RandomPartitioner(), batch_size=16)


def state(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def as_ranks(rank: int, world_size: int, rounds: int, strategy: Any, options: dict[str, Any]) -> dict[str, Tensor]:
    module = model()
    trainer(2, strategy(**options, **PATIENCE), max_epochs=rounds, limit_val_batches=0).fit(module, data())
    return state(module)


LOCAL = (lgd.LocalSGDStrategy, {"clock": lgd.EverySteps(4)})


def fits_in_a_row(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    module, source, history = model(), data(), History()
    module.own = [next(module.parameters()).data, *module.parameters()]
    saver = ModelCheckpoint(folder / "saved", monitor="accuracy", mode="max")
    logger = CSVLogger(folder)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    strategy = lgd.LocalSGDStrategy(lgd.EverySteps(4), **FORKED)
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
    """Makes its layers where Lightning says that large ones should be made."""

    left_alone: Tensor

    def configure_model(self) -> None:
        if not hasattr(self, "made"):
            self.made, self.scale = nn.Linear(2, 1), nn.Parameter(torch.ones(1))

    def on_train_end(self) -> None:
        self.left_alone = self.left_alone + 1
        nn.init.constant_(self.made.weight, 3.0)
        nn.init.constant_(self.scale, 4.0)


def fit_of_late_layers(rank: int, world_size: int) -> None:
    module = Late(12, 4)
    left_alone = module.left_alone = torch.arange(3)
    fits = trainer(2, lgd.LocalSGDStrategy(lgd.EverySteps(4), **FORKED), limit_val_batches=0, precision="64-true")
    fits.fit(module, data())
    assert module.left_alone is left_alone and left_alone.tolist() == [0, 1, 2]
    assert {weight.dtype for weight in module.parameters()} == {torch.float64}
    assert module.made.weight.tolist() == [[3.0, 3.0]] and module.scale.item() == 4.0
    assert {"made.weight", "made.bias", "scale"} <= module.state_dict().keys()


def test_layers_and_the_precision_of_ranks_come_back() -> None:
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
    ((said, got),) = run_ranks(interrupted, 1, lgd.GrappaStrategy, {})
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
    one = trainer(2, lgd.LocalSGDStrategy(lgd.EverySteps(4), **FORKED), **options)
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
    one = trainer(2, lgd.LocalSGDStrategy(lgd.EverySteps(4), launch=lgd.Launch(start_method="spawn")))
    with pytest.raises(TypeError, match=r"SAGE: cannot pickle '_thread.lock' object\. Ranks are .* in setup\(\)"):
        one.fit(module, data())


def test_what_cannot_travel_is_named() -> None:
    run_ranks(failing, 1)


def test_ranks_are_started_as_the_place_allows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys, "argv", [str(script)])
    assert start_method_here(lgd.Launch(), has_started=False) == "popen"
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert start_method_here(lgd.Launch(), has_started=False) in ("forkserver", "spawn")
    assert start_method_here(lgd.Launch(), has_started=True) == "popen"
    assert start_method_here(lgd.Launch(start_method="fork"), has_started=False) == "fork"
    with pytest.raises(ValueError, match="start_method='popen' runs the script again for each rank, and here is none"):
        start_method_here(lgd.Launch(start_method="popen"), has_started=False)
    assert start_method_here(lgd.Launch(), has_started=False, is_on_gpus=True) == "spawn"
    for forks in ("fork", "forkserver"):  # a rank on a GPU whose driver its server has started computes nothing
        assert start_method_here(lgd.Launch(start_method=forks), has_started=True, is_on_gpus=True) == forks  # not used
        with pytest.raises(ValueError, match=f"start_method='{forks}' forks the ranks .*: leave start_method out"):
            start_method_here(lgd.Launch(start_method=forks), has_started=False, is_on_gpus=True)
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert start_method_here(lgd.Launch(), has_started=False) in ("forkserver", "spawn")


# Ranks that a process starts: what comes back, who is named when one fails, and that none stays.


WAITS = 600.0  # seconds that a rank is there unless it is ended


@dataclass
class Task:
    """Does what ``act`` does, and what ``tear_down`` does when that has failed."""

    act: Callable[[int], Any]
    tear_down: Callable[[int], None] = lambda rank: None
    returned: Any = None
    failure: tuple[BaseException, float] | None = None

    def shared(self) -> list[object]:
        return [self]

    def run(self) -> How:
        rank = int(os.environ["LOCAL_RANK"])
        try:
            self.returned = self.act(rank)
        except ValueError as error:
            self.failure = error, time.monotonic()
            self.tear_down(rank)
            raise
        return "done"

    def result(self) -> Any:
        return self.returned, self

    def on_interrupt(self) -> None:
        raise InterruptedRankError


class TwoWordsError(Exception):
    def __init__(self, one: str, two: str) -> None:  # cannot be made again from its args
        super().__init__(f"{one} {two}")


def ranks_of(act: Callable[[int], Any], count: int = 2, **more: Any) -> RankProcesses:
    return RankProcesses(Task(act, **more), count, "fork", dict(os.environ))


def wait_unless(rank: int, act: Callable[[], Any]) -> Callable[[int], Any]:
    def do(own: int) -> None:
        if own == rank:
            act()
        time.sleep(WAITS)

    return do


def fail(error: BaseException) -> Callable[[], Any]:
    def act() -> None:
        raise error

    return act


def test_results_come_back_and_refer_to_what_is_here() -> None:
    ranks = ranks_of(lambda rank: rank * 10)
    assert ranks.run() is None and not ranks.was_interrupted
    assert [(each.how, each.result[0]) for _, each in sorted(ranks.outcomes.items())] == [("done", 0), ("done", 10)]
    assert ranks.outcomes[1].result[1] is ranks.work


@pytest.mark.slow
def test_a_module_beside_a_notebook_is_found_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_a_notebook.py").write_text("def tens(rank):\n    return 10 * rank + 10\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])  # as in a kernel
    ranks = RankProcesses(Task(import_module("beside_a_notebook").tens), 1, "spawn", dict(os.environ))
    assert ranks.run() is None
    assert (ranks.outcomes[0].how, ranks.outcomes[0].result[0]) == ("done", 10)


@pytest.mark.parametrize(
    ("act", "kind", "message"),
    [
        (fail(ValueError("odd labels")), ValueError, "odd labels"),
        (fail(TwoWordsError("odd", "labels")), RuntimeError, r"TwoWordsError: odd labels$"),
        (fail(SystemExit(0)), RuntimeError, r"sys.exit\(0\) was called before the end of the work"),
        (lambda: os._exit(0), RuntimeError, "Rank 1 ended with exit code 0, but not at the end of its work"),
        (lambda: os._exit(1), RuntimeError, "Rank 1 ended with exit code 1 and wrote down no reason: is the disk"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), RuntimeError, "Rank 1 was killed by SIGKILL. The other ranks"),
    ],
)
def test_the_rank_that_fails_is_heard_and_the_others_end(act: Any, kind: type[BaseException], message: str) -> None:
    start = time.monotonic()
    ranks = ranks_of(wait_unless(1, act))
    error = ranks.run()
    with pytest.raises(kind, match=message):
        raise error or AssertionError
    assert time.monotonic() - start < WAITS / 2
    assert all(not process.is_alive() for process in ranks._processes)
    if isinstance(error, ValueError):
        assert isinstance(error.__cause__, RankTraceback) and "in rank 1" in str(error.__cause__)
        assert "raise error\nValueError: odd labels" in str(error.__cause__)


def test_of_several_failures_the_first_is_the_cause() -> None:
    failed = [multiprocessing.Event() for _ in range(3)]

    def act(rank: int) -> None:  # rank 2 fails first, then rank 1, then rank 0
        assert rank == 2 or failed[rank + 1].wait(WAITS)
        raise ValueError(f"of rank {rank}")

    def tear_down(rank: int) -> None:  # rank 0 ends first; the others are interrupted then
        failed[rank].set()
        if rank > 0:
            time.sleep(WAITS)

    assert str(ranks_of(act, 3, tear_down=tear_down).run()) == "of rank 2"


@pytest.fixture
def listens_to_interrupts() -> Iterator[None]:
    """A shell that starts a command in the background lets it ignore them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listens_to_interrupts")
@pytest.mark.parametrize("who", ["here", "a rank"])
def test_an_interrupt_ends_all_whoever_gets_it(who: str) -> None:
    if who == "here":
        begun = [multiprocessing.Event() for _ in range(2)]

        def interrupt() -> None:
            if all(event.wait(WAITS) for event in begun):
                os.kill(os.getpid(), signal.SIGINT)

        def act(rank: int) -> None:
            begun[rank].set()
            time.sleep(WAITS)

        threading.Thread(target=interrupt, daemon=True).start()
        ranks = ranks_of(act)
    else:
        ranks = ranks_of(wait_unless(1, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert ranks.run() is None and ranks.was_interrupted
    assert all(not process.is_alive() for process in ranks._processes)
    assert all(ranks.outcomes[rank].how == "interrupted" for rank in ranks.outcomes)


def test_words_of_ranks_are_shown_where_stdout_was_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    def act(rank: int) -> None:
        print(f"rank {rank} says é")
        os.write(2, b"and below Python\n")
        assert sys.stdout.line_buffering

    assert ranks_of(act).run() is None
    said = capsys.readouterr()
    assert sorted(said.out.splitlines()) == ["rank 0 says é", "rank 1 says é"]
    assert said.err.count("and below Python") == 2


# Ranks of one host have one copy of the graph between them: of a saved one, and of one that travels by value.


RANKS = 4
SCRIPT = """
import sys, torch, lightning.pytorch as pl
from pathlib import Path
from lightning_gnn_dist import EverySteps, Graph, LocalSGDStrategy, PartitionedDataModule, RandomPartitioner
from lightning_gnn_dist.cli.demo import SAGE
from lightning_gnn_dist.graph.storage.mapped import all_maps
from lightning_gnn_dist.rounds.launching import Launch

START, PLACE, MEGABYTES = sys.argv[1], Path(sys.argv[2]), 64

def made():
    nodes = MEGABYTES << 12  # 256 bytes of features each
    torch.manual_seed(0)
    mask = torch.arange(nodes) % 1000 == 0
    arrays = {"x": torch.rand(nodes, 64), "y": torch.zeros(nodes, dtype=torch.int64), "train_mask": mask}
    return Graph(torch.arange(nodes + 1), torch.arange(nodes, dtype=torch.int32), arrays)

class Looks(SAGE):
    def training_step(self, batch):
        x = self.trainer.datamodule.graph.node_arrays["x"]
        x.sum()  # every page is in memory
        self.trainer.strategy.barrier()
        (share,) = [each.sizes["Pss"] for each in all_maps() if each.start <= x.data_ptr() < each.end]
        (PLACE / f"rank_{self.global_rank}.txt").write_text(str(share / x.nbytes))
        self.trainer.strategy.barrier()
        return super().training_step(batch)

if __name__ == "__main__":
    saved = PLACE / "graph"
    strategy = LocalSGDStrategy(EverySteps(1), launch=Launch(start_method=START))
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, logger=False,
                         limit_val_batches=0, enable_checkpointing=False, enable_progress_bar=False)
    data = PartitionedDataModule(Graph.open(saved) if saved.exists() else made(), partitioner=RandomPartitioner())
    trainer.fit(Looks(64, 8), data)
"""
SAVE = "from script import made, PLACE; made().save(PLACE / 'graph')"


def copies(start: str, folder: Path, *, is_saved: bool) -> float:
    """The copies of the features that ranks hold between them."""
    (folder / "script.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    for command in [["-c", SAVE]] * is_saved + [["script.py"]]:
        run = [fast_python(), *command, start, str(folder)]
        ran = subprocess.run(run, env=variables, cwd=folder, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stderr
    return sum(float((folder / f"rank_{rank}.txt").read_text()) for rank in range(RANKS))


STARTS = {"saved": ("popen", True), "by value": ("forkserver", False), "fork": ("fork", False)}


@pytest.mark.slow
@reads_memory
@pytest.mark.parametrize(("start", "is_saved"), STARTS.values(), ids=STARTS)
def test_ranks_hold_one_copy(start: str, is_saved: bool, tmp_path: Path) -> None:
    # A map of memory may hold more beside the features; four copies would be 4.
    assert 0.2 < copies(start, tmp_path, is_saved=is_saved) < 2


def test_a_search_in_ranks_that_are_forked_comes_back() -> None:
    strategy = lgd.LocalSGDStrategy(launch=lgd.Launch(start_method="fork"))
    module = graph_fitting.model()
    module.save_hyperparameters({"lr": 0.5})
    module.lr = 0.5
    options: dict[str, Any] = {"num_training": 20, "early_stop_threshold": None}
    found = Tuner(trainer(2, strategy, max_epochs=9)).lr_find(module, graph_fitting.data_module(), **options)
    assert found is not None and len(found.results["lr"]) == 20
    assert module.lr == module.hparams.lr == found.suggestion() not in (0.5, None)  # the rate of the next fit
