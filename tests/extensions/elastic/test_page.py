"""What the page on ranks that may die says, run as it stands."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.extensions.elastic.membership import LIGHTHOUSE, RANK, RANKS
from tests.pages import ROOT, blocks
from tests.python_server import fast_python
from tests.test_readme_code import commands


@pytest.mark.slow
def test_the_elastic_block_runs_as_its_page_says(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason="torchft is not installed: pip install lightning-gnn-dist[elastic]")
    (block,) = [block for block in blocks("python", "elastic") if "peers=Elastic())" in block.code]
    (tmp_path / "block.txt").write_text(block.code)
    (tmp_path / "train.py").write_text(
        'from tests.test_readme_code import run_block\nrun_block(0, 1, open("block.txt").read(), ".")\n'
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "lightning_gnn_dist", "elastic", "--ranks", "2", "--", fast_python(), "train.py"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "[elastic]" not in done.stdout, done.stderr
    assert (tmp_path / "checkpoints" / "last.ckpt").is_file()


def test_the_variables_of_elastic_ranks_are_those_that_are_read() -> None:
    code = "".join(block.code for block in blocks("console", "elastic"))
    assert set(re.findall(r"\b([A-Z_]{6,})=", code)) == {LIGHTHOUSE, RANK, RANKS}


@pytest.mark.slow
def test_the_lighthouse_has_these_options() -> None:
    if (program := shutil.which("torchft_lighthouse", path=str(Path(sys.executable).parent))) is None:
        pytest.skip("torchft is not installed: pip install lightning-gnn-dist[elastic]")
    known = subprocess.run([program, "--help"], capture_output=True, text=True, timeout=240, check=True).stdout
    (words,) = commands("torchft_lighthouse")
    assert all(word in known for word in words if word.startswith("--"))
