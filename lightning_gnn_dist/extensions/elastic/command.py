"""``lightning-gnn-dist elastic``: ranks that may die and come back, on one machine."""

from __future__ import annotations

import argparse
import shutil

from lightning_gnn_dist.cli.options import Commands, count, positive, seconds


def add_to(commands: Commands) -> None:
    """Add what may stand on the command line."""
    elastic = commands.add_parser("elastic", help="start ranks that may die and come back, and their lighthouse")
    elastic.add_argument("--ranks", type=positive, required=True, help="processes on this machine")
    elastic.add_argument("--restarts", type=count, default=0, help="start dead ranks again, so often (default: 0)")
    elastic.add_argument("--heartbeat", type=seconds, default=5.0, help="seconds of silence of the dead (default: 5)")
    elastic.add_argument("--grace", type=seconds, default=30.0, help="seconds to end in on SIGTERM (default: 30)")
    elastic.add_argument("command", nargs=argparse.REMAINDER, help="-- python train.py ...")
    elastic.set_defaults(does=f"{__name__}:run")


def run(options: argparse.Namespace) -> None:
    """Do what the options say."""
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        raise SystemExit("Say what each rank runs: lightning-gnn-dist elastic --ranks 4 -- python train.py")
    if shutil.which(command[0]) is None:
        raise SystemExit(f"There is no program {command[0]!r} that ranks could run.")
    from lightning_gnn_dist.extensions.elastic.launcher import Launcher  # torch, which help does without

    launcher = Launcher(command, options.ranks, options.restarts, options.heartbeat, options.grace, _tell)
    raise SystemExit(launcher.run())


def _tell(line: str) -> None:
    print(f"[elastic] {line}", flush=True)
