"""``lightning-gnn-dist elastic``: ranks that may die and come back, on one machine."""

from __future__ import annotations

import argparse

from lightning_gnn_dist.cli.values import Commands, positive
from lightning_gnn_dist.launcher import Launcher


def add_to(commands: Commands) -> None:
    """Declare the command and its options."""
    elastic = commands.add_parser("elastic", help="start ranks that may die and come back, and their lighthouse")
    elastic.add_argument("--ranks", type=positive, required=True, help="processes on this machine")
    elastic.add_argument("--restarts", type=int, default=0, help="start dead ranks again, so often in all (default: 0)")
    elastic.add_argument("--heartbeat", type=float, default=5.0, help="seconds of silence of a dead rank (default: 5)")
    elastic.add_argument("--grace", type=float, default=30.0, help="seconds to end in on SIGTERM (default: 30)")
    elastic.add_argument("command", nargs=argparse.REMAINDER, help="-- python train.py ...")
    elastic.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise SystemExit("Say what each rank runs: lightning-gnn-dist elastic --ranks 4 -- python train.py")
    launcher = Launcher(command, options.ranks, options.restarts, options.heartbeat, options.grace, _tell)
    raise SystemExit(launcher.run())


def _tell(line: str) -> None:
    print(f"[elastic] {line}", flush=True)
