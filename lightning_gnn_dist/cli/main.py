"""The command ``lightning-gnn-dist``: run the subcommand that is named, and import no more than it needs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_gnn_dist.cli.options import OF_LIGHTNING, PROGRAM, parser, refuse_gone


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script."""
    given = sys.argv[1:] if arguments is None else arguments
    refuse_gone(given)
    command = given[:1]
    if command and command[0] in OF_LIGHTNING:
        from lightning_gnn_dist.cli import train  # takes seconds, as Lightning does

        _keep_imports(arguments)
        train.run(arguments)
        return
    options = parser(*command).parse_args(arguments)
    module, _, function = options.does.partition(":")
    run = getattr(import_module(module), function)
    _keep_imports(arguments)
    try:
        run(options)
    except options.refusals as error:  # of others the traceback says more
        raise SystemExit(f"{PROGRAM} {command[0]}: {error}") from error


def _keep_imports(arguments: Sequence[str] | None) -> None:
    """Let no collection of garbage walk through what was imported, if this process is the command."""
    if arguments is None:
        gc.freeze()
