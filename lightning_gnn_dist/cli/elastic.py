"""``lightning-gnn-dist elastic``: ranks that may die and come back, on one machine."""

from __future__ import annotations

import argparse
import shutil

from lightning_gnn_dist.wire.launching.elastic_launcher import Launcher


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise SystemExit("Say what each rank runs: lightning-gnn-dist elastic --ranks 4 -- python train.py")
    if shutil.which(command[0]) is None:
        raise SystemExit(f"There is no program {command[0]!r} that ranks could run.")
    launcher = Launcher(command, options.ranks, options.restarts, options.heartbeat, options.grace, _tell)
    raise SystemExit(launcher.run())


def _tell(line: str) -> None:
    print(f"[elastic] {line}", flush=True)
