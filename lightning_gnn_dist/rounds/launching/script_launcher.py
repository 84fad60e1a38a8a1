"""Runs a script again for each rank, and lets none of them stay behind.

Written for Lightning 2.6, as it uses private names of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.pytorch.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.launching.processes import GRACE_SECONDS, end_of, start, wait_for
from lightning_gnn_dist.wire.launching.roll_call import give_key

_log = logging.getLogger(__name__)


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the script again for each further rank (``start_method="popen"``); this process is rank 0.

    Args:
        patience: Seconds that this process waits at its end for ranks that are not done, if none has failed.
        options: Arguments of Lightning's launcher.
    """

    is_interactive_compatible = True  # where there is no script, this is used for ranks that another has started

    def __init__(self, patience: float, **options: Any) -> None:
        super().__init__(**options)
        self._patience = patience
        self._has_failed = False

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return super().launch(function, *args, **kwargs)
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, SIGTERMException):
                self._watch_no_longer()
            raise

    def lost(self) -> dict[int, str]:
        """Return the ranks of this host that are gone, and how each ended."""
        codes = [process.poll() for process in self.procs]
        first = self.cluster_environment.global_rank() + 1
        return {first + index: end_of(code) for index, code in enumerate(codes) if code is not None}

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = str(environment.node_rank()), str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        if self.num_nodes == 1:  # else other hosts start ranks of this run, too
            give_key()
        atexit.register(self._wait_for_ranks)
        for local_rank in range(1, self.num_processes):
            command, folder = _own_command(local_rank)
            self.procs.append(start(command, {**os.environ, "LOCAL_RANK": str(local_rank)}, cwd=folder))

    def _watch_no_longer(self) -> None:
        """Let Lightning's observer end. All ranks leave now, and it would kill this one when another has left first."""
        watched, self.procs = self.procs, [*self.procs]
        watched.clear()

    def _wait_for_ranks(self) -> None:
        """Wait at the end of this process for the other ranks, which end with it, and kill those that do not end."""
        failed = self._has_failed or hasattr(sys, "last_value")  # an exception that ended the script
        collectives.leave()  # who waits for this rank in an exchange hears of its end now
        seconds = GRACE_SECONDS if failed else self._patience
        for index in wait_for(self.procs, seconds):
            pid = self.procs[index].pid
            _log.error("Process %d (local rank %d) did not end in %g s and was killed.", pid, index + 1, seconds)


def _own_command(local_rank: int) -> tuple[list[str], str | None]:
    """Return the command that starts a rank like this process, and its folder, as Lightning finds them out."""
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            command, folder = _hydra_subprocess_cmd(local_rank)
            return list(command), folder
    return list(_basic_subprocess_cmd()), None
