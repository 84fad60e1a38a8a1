"""``serve``: from a configuration and a checkpoint to answers, and its end by SIGTERM."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_gnn_dist import Partition, best_links, communities, save_shards, split_edges
from lightning_gnn_dist.cli.demo import SAGE
from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.extensions.serving import command as serving
from tests.extensions.serving.served import Client
from tests.pages import ROOT

CONFIG = """\
seed_everything: 0
model: {class_path: lightning_gnn_dist.cli.demo.SAGE, init_args: {num_features: 64, num_classes: 8}}
data: {graph: {class_path: lightning_gnn_dist.communities, init_args: {num_nodes: 500}}}
trainer: {accelerator: cpu, devices: 1, logger: false}
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "fit.yaml").write_text(CONFIG)
    torch.save({"state_dict": SAGE(64, 8).state_dict()}, tmp_path / "model.ckpt")
    return [f"--config={tmp_path}/fit.yaml", f"--ckpt_path={tmp_path}/model.ckpt"]


@contextmanager
def running(*arguments: str) -> Iterator[int]:
    """Serve in another process while the block runs; it ends with status 0 when it is told to."""
    command = [sys.executable, "-m", "lightning_gnn_dist", "serve", "--port=0", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            said = next(line for line in server.stdout if line.startswith("Serving on http://127.0.0.1:"))
            (port,) = re.findall(r"127\.0\.0\.1:(\d+)", said)
            yield int(port)
        finally:
            server.terminate()
        assert server.wait(60) == 0


@pytest.mark.slow
def test_a_trained_model_is_served_until_it_is_told_to_end(files: list[str]) -> None:
    with running("--limits.nodes=3", *files) as port:
        status, answer = Client(port).post({"nodes": [0, 7]})
        assert status == 200
        assert Client(port).post({"nodes": [0, 1, 2, 3]})[0] == 400
    model = SAGE(64, 8)
    model.load_state_dict(torch.load(files[1].partition("=")[2], weights_only=True)["state_dict"])
    graph = communities(500).to_pyg()
    with torch.no_grad():
        x = model.convs[1](model.convs[0](graph.x, graph.edge_index).relu(), graph.edge_index)
    torch.testing.assert_close(torch.tensor(answer["rows"]), x[[0, 7]], rtol=0, atol=1e-5)


LINKS = """\
model: {{class_path: link_prediction.LinkPredictor, init_args: {{num_features: 64}}}}
data: {{class_path: lightning_gnn_dist.LinkDataModule, init_args: {{split: {path}/split}}}}
trainer: {{accelerator: cpu, devices: 1, logger: false}}
"""


@pytest.mark.slow
def test_links_of_a_trained_model_are_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import link_prediction  # type: ignore[import-not-found]

    (split := split_edges(communities(300), negatives=5)).save(tmp_path / "split")
    (tmp_path / "links.yaml").write_text(LINKS.format(path=tmp_path))
    module = link_prediction.LinkPredictor(64)
    torch.save({"state_dict": module.state_dict()}, tmp_path / "model.ckpt")
    with running(f"--config={tmp_path}/links.yaml", f"--ckpt_path={tmp_path}/model.ckpt", "--score=dot") as port:
        status, answer = Client(port).post({"nodes": [3, 7], "best_links": 4})
    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False)
    links = best_links(trainer, module, split, senders=[3, 7], k=4, score="dot")
    assert links is not None
    assert (status, answer["receivers"]) == (200, links.receivers.tolist())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What the console script does in this process."""

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", "serve", *arguments])
        main()

    return run


def test_what_is_missing_is_named_in_one_line(
    files: list[str],
    command: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    torch.save(SAGE(64, 8).state_dict(), tmp_path / "bare.ckpt")
    save_shards(communities(50, 8), Partition(torch.zeros(50).int(), 1), tmp_path / "shards")
    for arguments, sentence in (
        (files[:1], "serve needs the weights of a trained model: name a checkpoint, --ckpt_path=model.ckpt."),
        ([files[0], "--ckpt_path=none.ckpt"], "ckpt_path must be a file, and 'none.ckpt' is none."),
        ([*files, f"--data.graph={tmp_path}/shards"], "A server reads the whole graph, and "),
        ([*files, "--port=70000"], "host '127.0.0.1' and port 70000 cannot be had (bind(): port must be 0-65535.)"),
        (
            [files[0], f"--ckpt_path={tmp_path}/fit.yaml"],
            "ckpt_path must be a checkpoint of tensors and plain values, ",
        ),
        ([files[0], f"--ckpt_path={tmp_path}/bare.ckpt"], "bare.ckpt' has no state_dict."),
        ([*files, "--limits.nodes=0"], "limits.nodes must be an integer of at least 1, got 0."),
    ):
        with pytest.raises(SystemExit):
            command(*arguments)
        assert sentence in capsys.readouterr().err
    monkeypatch.setattr(serving, "_NEEDS", ("starlette", "no_such_library"))
    with pytest.raises(SystemExit, match=r"no_such_library must be installed to serve: pip install .*\[serve\]"):
        command(*files)


def test_a_checkpoint_that_runs_code_is_refused(
    files: list[str], command: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"state_dict": {}, "more": Path}, tmp_path / "model.ckpt")
    with pytest.raises(SystemExit):
        command(*files)
    assert "model.ckpt' is none (it holds pathlib.Path)." in capsys.readouterr().err
