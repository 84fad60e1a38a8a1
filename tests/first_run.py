"""The files of the quick start, and its reader's shell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.pages import ROOT, blocks
from tests.python_server import fast_python


def write_files(folder: Path) -> None:
    """Write the module and the configuration of the page, for five passes in the place of thirty."""
    (module,) = [block.code for block in blocks("python", "quick-start") if "class SAGE" in block.code]
    (folder / "my_modules.py").write_text(module)
    config = blocks("yaml", "quick-start")[0].code
    assert "max_epochs: 30" in config
    (folder / "my.yaml").write_text(config.replace("max_epochs: 30", "max_epochs: 5"))


def run_commands(lines: Sequence[str], folder: Path) -> str:
    """Run lines of a console one after the other; return what they say."""
    (folder / "lightning-gnn-dist").write_text(f'#!/bin/bash\nexec {fast_python()} -m lightning_gnn_dist "$@"\n')
    (folder / "lightning-gnn-dist").chmod(0o755)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "\n".join(["set -e", *lines])
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr
