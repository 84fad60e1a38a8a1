"""A session in a real Jupyter kernel: fits in a row, a test, a prediction, interrupts, and a kernel that is killed."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.test_nothing_stays import ROOT, wait_until_none

pytestmark = pytest.mark.slow
SECONDS = 300.0
FIRST = """
import warnings
warnings.filterwarnings("ignore")
import lightning.pytorch as pl, numpy, torch
from tests.sage import SAGE
from lightning_gnn_dist import EverySteps, Graph, Launch, LocalSGDStrategy, PartitionedDataModule, RandomPartitioner
from lightning_gnn_dist import PredictionWriter, communities

torch.randn(1000, 1000) @ torch.randn(1000, 1000)  # threads of OpenMP, which do not survive a fork

class Net(SAGE):
    fails = False
    def __init__(self):
        super().__init__(16, 4)
    def training_step(self, batch):
        if self.fails and self.global_rank == 1:
            raise KeyError("no such label")  # in rank 1
        return super().training_step(batch)
    def predict_step(self, batch):
        return self(batch)

pl.seed_everything(0)
graph = communities(3000, 4, num_features=16)
data = PartitionedDataModule(graph, partitioner=RandomPartitioner(), batch_size=64)
def trainer(rounds, strategy, **more):
    return pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=rounds, num_sanity_val_steps=0,
                      enable_model_summary=False, **more)
model = Net()
"""


class Said(NamedTuple):
    text: str
    error: str
    seconds: float
    outputs: list[dict[str, Any]]  # as the file of a notebook has them, but for lists of lines


def add_output(outputs: list[dict[str, Any]], kind: str, content: dict[str, Any]) -> None:
    """Add what a kernel has sent; texts that follow each other become one."""
    last = outputs[-1] if outputs else {}
    if kind == "stream" and last.get("name") == content["name"]:
        last["text"] += content["text"]
    else:
        names = ("name", "text", "data", "metadata", "execution_count")
        outputs.append({"output_type": kind} | {name: content[name] for name in names if name in content})


class Session:
    """A kernel, and a way to run cells in it."""

    def __init__(self, folder: Path, python: str = "") -> None:
        manager = pytest.importorskip("jupyter_client.manager", reason="needs jupyter_client and ipykernel")
        path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        environment = os.environ | {"PYTHONPATH": path, "TMPDIR": str(folder)}
        environment.pop("OMP_NUM_THREADS", None)  # as users have it: threads here, and for each rank its share of cores
        self.manager = manager.KernelManager(kernel_name="python3")
        if python:
            self.manager.kernel_spec.argv[0] = python
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=SECONDS)

    def run(self, cell: str, interrupt_at: str = "", alone: bool = False) -> Said:
        """Run a cell; when ``interrupt_at`` is said, interrupt the kernel, ``alone`` or with its process group."""
        start, text, error, outputs = time.monotonic(), "", "", []
        asked = self.client.execute(cell)
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != asked:
                continue
            if kind == "error":
                error = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(content["traceback"]))
            elif kind == "status" and content["execution_state"] == "idle":
                return Said(text, error, time.monotonic() - start, outputs)
            elif kind in ("stream", "display_data", "execute_result"):
                add_output(outputs, kind, content)
            text += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            if interrupt_at and re.search(interrupt_at, text):
                interrupt_at, start = "", time.monotonic()
                self.interrupt(alone)

    def interrupt(self, alone: bool) -> None:
        if alone:
            os.kill(self.manager.provisioner.pid, signal.SIGINT)
        else:
            self.manager.interrupt_kernel()

    def close(self) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path)
    try:
        assert not session.run(FIRST).error
        yield session
    finally:
        session.close()
        assert wait_until_none(tmp_path, 20.0) == []


def good(said: Said) -> str:
    assert not said.error, said.error
    return said.text


def test_a_session(session: Session, tmp_path: Path) -> None:
    said = good(session.run("first = trainer(2, 'llcg'); first.fit(model, data)"))
    assert re.search(r"Epoch 1: 100%.* (\d+)/\1 ", said), said[-500:]  # a bar with its total
    assert float(good(session.run("print(first.callback_metrics['accuracy'].item())"))) > 0
    assert good(session.run("print(first.test(model, data, ckpt_path='best', verbose=False))")).count("accuracy") == 1
    good(session.run("trainer(1, 'grappa', logger=False).fit(model, data)"))
    rows = "trainer(1, 'grappa', callbacks=[PredictionWriter('rows.npy')], logger=False)"
    good(session.run(f"{rows}.predict(model, data, return_predictions=False)"))
    alone = "torch.cat(pl.Trainer(accelerator='cpu', devices=1, logger=False).predict(model, data))"
    said = good(session.run(f"print(torch.allclose(torch.from_numpy(numpy.load('rows.npy')), {alone}, atol=1e-5))"))
    assert said.endswith("True\n"), said


def test_an_interrupt_ends_the_ranks_and_the_session_goes_on(session: Session, tmp_path: Path) -> None:
    fit = "one = trainer(10_000, LocalSGDStrategy(EverySteps(4)), logger=False, limit_val_batches=0)"
    for is_alone in (False, True):
        said = session.run(f"{fit}\none.fit(model, data)", interrupt_at="Epoch 3", alone=is_alone)
        assert "All ranks have ended, and the model is what it was before" in said.error, said
        assert said.seconds < 120  # of the hours that it would train
    said = session.run("model.fails = True; one = trainer(2, LocalSGDStrategy(EverySteps(4))); one.fit(model, data)")
    assert "Rank 1: KeyError: 'no such label'" in said.error
    assert 'raise KeyError("no such label")  # in rank 1' in said.error  # the line of the cell
    assert not list(tmp_path.glob("ranks-*"))


def test_no_rank_outlives_its_kernel(session: Session, tmp_path: Path) -> None:
    asked = session.client.execute("trainer(10_000, 'local_sgd', logger=False).fit(model, data)")
    text = ""
    while "Epoch 1" not in text:
        message = session.client.get_iopub_msg(timeout=SECONDS)
        text += message["content"].get("text", "") if message["parent_header"].get("msg_id") == asked else ""
    os.kill(session.manager.provisioner.pid, signal.SIGKILL)
    assert wait_until_none(tmp_path, 20.0) == []
