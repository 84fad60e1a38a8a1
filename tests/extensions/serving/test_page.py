"""The page "From training to predictions", from its first line to its last."""

import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gnn_dist import communities
from lightning_gnn_dist.wire.addresses import held_port
from tests.extensions.serving.served import Client
from tests.pages import ROOT, blocks, write_files
from tests.python_server import fast_python

PORT = 8000  # the page's


def command_lines() -> list[str]:
    text = "".join(block.code for block in blocks("console", "serving")).replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]


def is_ready(port: int, server: subprocess.Popen[bytes]) -> bool:
    for _ in range(600):
        try:
            return bool(Client(port).get("/health")[0] == 200)
        except OSError:
            assert server.poll() is None
            time.sleep(0.2)
    return False


@pytest.fixture
def port() -> Iterator[int]:
    with held_port() as port:
        yield port


@pytest.mark.slow
def test_the_page_leads_from_a_fit_to_the_same_rows_by_file_and_by_http(tmp_path: Path, port: int) -> None:
    communities(2000, 8, num_features=64).save(tmp_path / "my_graph")
    write_files(tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    how: dict[str, Any] = {"cwd": tmp_path, "env": environment}
    pythons = [fast_python(), fast_python(), sys.executable, ""]  # the server is sent a signal
    fit, predict, serve, curl = (
        line.replace("lightning-gnn-dist", f"{python} -m lightning_gnn_dist").replace(str(PORT), str(port))
        for line, python in zip(command_lines(), pythons, strict=False)
    )
    for line in (fit, predict):
        subprocess.run(["bash", "-c", line], check=True, timeout=600, **how)
    with subprocess.Popen(["bash", "-c", f"exec {serve}"], **how) as server:
        try:
            assert is_ready(port, server)
            said = subprocess.run(shlex.split(curl), capture_output=True, check=True, timeout=60)
            (block,) = [block.code for block in blocks("python", "serving") if "urlopen" in block.code]
            scope: dict[str, Any] = {}
            exec(block.replace(str(PORT), str(port)), scope)
        finally:
            server.terminate()
        assert server.wait(60) == 0
    rows = torch.tensor(json.loads(said.stdout)["rows"])
    torch.testing.assert_close(rows, torch.from_numpy(np.load(tmp_path / "some.npy")), rtol=0, atol=1e-4)
    assert np.array(scope["rows"]).shape == (3, 8) and re.search(r"--nodes 3,141,59 ", predict)
