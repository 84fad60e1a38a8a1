"""The demo, run as a user runs it: as a command that starts its own processes."""

import re
import subprocess
from pathlib import Path

import pytest

from lightning_gnn_dist.cli.main import main
from tests.python_server import fast_python


def run(*command: str, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_demo_prints_the_reports_and_the_table(tmp_path: Path) -> None:
    sizes = ("--nodes", "2000", "--rounds", "3", "--steps", "4")
    output = run(fast_python(), "-m", "lightning_gnn_dist", "demo", *sizes, cwd=tmp_path)
    assert "2 parts:" in output and "worst label skew" in output
    rows = re.findall(
        r"^(one process|Grappa|local SGD|LLCG).*?(0\.\d{3})\s+([\d.]+) MB\s+([\d.]+)$", output, re.MULTILINE
    )
    assert len(rows) == 6
    assert float(rows[0][2]) == 0.0 and all(float(sent) > 0 for _, _, sent, _ in rows[1:])
    assert not list(tmp_path.iterdir())  # it leaves nothing behind


def test_one_rank_is_refused() -> None:
    with pytest.raises(SystemExit, match="--ranks must be at least 2"):
        main(["demo", "--ranks", "1"])
