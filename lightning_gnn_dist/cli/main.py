"""The command ``lightning-gnn-dist``: run the subcommand that is named, and import no more than it needs."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from lightning_gnn_dist.cli.options import OF_LIGHTNING, parser, refuse_gone
from lightning_gnn_dist.wire.launching.processes import LARGE_PAGES


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script."""
    given = sys.argv[1:] if arguments is None else arguments
    refuse_gone(given)
    command = given[:1]
    if command and command[0] in OF_LIGHTNING:
        if "torch" not in sys.modules:  # it reads this before its first tensor, and takes memory in pages of 2 MB then
            os.environ.setdefault(LARGE_PAGES, "1")  # ranks inherit it
        from lightning_gnn_dist.cli import train  # takes seconds, as Lightning does

        _keep_imports(arguments)
        train.run(arguments)
        return
    options = parser().parse_args(arguments)
    module = import_module(options.module)
    _keep_imports(arguments)
    module.run(options)


def _keep_imports(arguments: Sequence[str] | None) -> None:
    """Let no collection of garbage walk through what was imported, if this process is the command."""
    if arguments is None:
        gc.freeze()
