"""How ranks are started on a host: by nobody, by this script again for each rank, or for one call of the trainer.

A script is run again for each rank, by Lightning's launcher with what it lacks: it lets no rank stay behind. Written
for Lightning 2.6, of which it uses private names. Where there is no script to run again, as in a notebook, all ranks
are forked, and weights and metrics of rank 0 come back: what forks them is an extension.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import _basic_subprocess_cmd, _hydra_subprocess_cmd
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.launcher import _Launcher
from lightning.pytorch.strategies.launchers.subprocess_script import _HYDRA_AVAILABLE, _SubprocessScriptLauncher
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_gnn_dist.checks import check_choice, check_durations, in_bytes, shown
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.rounds.refusals import check_call
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.addresses import held_port
from lightning_gnn_dist.wire.launching.processes import GRACE_SECONDS, end_all, end_of, start
from lightning_gnn_dist.wire.launching.roll_call import give_key
from lightning_gnn_dist.wire.memory import free_bytes, own_bytes

log = logging.getLogger(__name__)
StartMethod = Literal["popen", "fork"]


@dataclass(frozen=True)
class Launch:
    """How ranks are started, how they exchange, and how long they wait for each other.

    Args:
        timeout: How long a collective may take before the ranks give up.
        start_timeout: How long the ranks wait for each other at the start. After it, the ranks that are there end and
            name those that are missing.
        backend: ``"gloo"``, ``"nccl"`` or another backend of torch. Default: the one that fits the device.
        start_method: How ranks are started when no launcher (torchrun, SLURM) did. ``"popen"`` runs the script again
            for each; ``"fork"`` copies this process for one call of the trainer, and brings back weights and metrics.
            Default: ``"popen"`` for a script; in a notebook, at a prompt, and for ``python -c`` ``"fork"``. Ranks on
            GPUs are never forked.
    """

    timeout: timedelta = timedelta(minutes=30)
    start_timeout: timedelta = timedelta(minutes=10)
    backend: str | None = None
    start_method: StartMethod | None = None

    def __post_init__(self) -> None:
        check_durations(timeout=self.timeout, start_timeout=self.start_timeout)
        if self.start_method is not None:
            check_choice("start_method", self.start_method, StartMethod)
        name = self.backend
        if name is not None and not (isinstance(name, str) and name and collectives.has_backend(name)):
            raise ValueError(
                'backend must be "gloo", "nccl" or another that this torch was built with, or None for what fits the '
                f"device, got {shown(name)}."
            )


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
        check_call(kwargs["trainer"], args)
        try:
            with held_port() as self._port:
                return super().launch(function, *args, **kwargs)
        except BaseException as error:
            self._has_failed = True
            if isinstance(error, SIGTERMException):
                # All ranks leave now, and Lightning's observer would kill this one when another has left first.
                watched, self.procs = self.procs, [*self.procs]
                watched.clear()
            raise

    def lost(self) -> dict[int, str]:
        """Return the ranks of this host that are gone, and how each ended."""
        codes = {rank: process.exitcode for rank, process in self._ranks().items()}
        return {rank: end_of(code) for rank, code in codes.items() if code is not None}

    def _ranks(self) -> dict[int, Any]:
        return dict(enumerate(self.procs, self.cluster_environment.global_rank() + 1))

    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ.setdefault("MASTER_PORT", str(self._port))  # who has named another sees to it that it is free
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = environment.main_address, str(environment.main_port)
        os.environ["NODE_RANK"], os.environ["LOCAL_RANK"] = str(environment.node_rank()), str(environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        if self.num_nodes == 1:  # else other hosts start ranks of this run, too
            give_key()
        atexit.register(self._wait_for_ranks)
        others, own, free = self.num_processes - 1, own_bytes() or 0, free_bytes()
        if others * own > free:  # they run the same script up to here
            log.warning(
                "This process takes %s before it trains, and each of %d further ranks here will take as much: %s are "
                "left, so ranks will be killed, or wait for the disk. Start fewer ranks on this host, or allow it more "
                "memory.",
                *(in_bytes(own), others, in_bytes(free)),
            )
        for local_rank in range(1, self.num_processes):
            command, folder = _own_command(local_rank)
            self.procs.append(start(command, {**os.environ, "LOCAL_RANK": str(local_rank)}, cwd=folder))

    def _wait_for_ranks(self) -> None:
        """Wait at the end of this process for the other ranks, which end with it, and kill those that do not end."""
        failed = self._has_failed or hasattr(sys, "last_value")  # an exception that ended the script
        collectives.leave()  # who waits for this rank in an exchange hears of its end now
        end_all(self._ranks(), GRACE_SECONDS if failed else self._patience)


def _own_command(local_rank: int) -> tuple[list[str], str | None]:
    """Return the command that starts a rank like this process, and its folder, as Lightning finds them out."""
    if _HYDRA_AVAILABLE:
        from hydra.core.hydra_config import HydraConfig

        if HydraConfig.initialized():
            command, folder = _hydra_subprocess_cmd(local_rank)
            return list(command), folder
    return list(_basic_subprocess_cmd()), None


def launcher_for(strategy: DDPStrategy, launch: Launch) -> _Launcher:
    """Return what starts the ranks of a strategy where this process runs."""
    environment = strategy.cluster_environment
    assert environment is not None
    if _is_interactive() and isinstance(environment, SLURMEnvironment):
        environment = strategy.cluster_environment = LightningEnvironment()  # a notebook is none of srun's tasks
    size = {"num_processes": strategy.num_processes, "num_nodes": strategy.num_nodes}
    is_alone = launch.start_method is None and [*size.values()] == [1, 1]  # such a rank is this process
    is_on_gpus = strategy.root_device.type == "cuda"
    if is_alone or start_method_here(launch, environment.creates_processes_externally, is_on_gpus) == "popen":
        return ScriptLauncher(launch.timeout.total_seconds(), cluster_environment=environment, **size)
    made: _Launcher = extension("ranks of a function")(strategy, "fork")
    return made


def start_method_here(launch: Launch, has_started: bool, is_on_gpus: bool = False) -> StartMethod:
    """Return how ranks are started here. ``has_started`` says that torchrun or SLURM have done so.

    No rank on a GPU is forked: importing torch_geometric can start the driver of CUDA, and no fork of a process that
    has done so can use a GPU, whatever ``torch.cuda.is_initialized`` says.
    """
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    can_run_again = not _is_interactive() and (is_module or os.path.isfile(sys.argv[0]))
    if launch.start_method == "popen" and not has_started and not can_run_again:
        raise ValueError(
            "start_method='popen' runs the script again for each rank, and here is none (a notebook, a prompt or "
            "python -c): leave start_method out."
        )
    method: StartMethod = launch.start_method or ("popen" if has_started or can_run_again else "fork")
    if method == "fork" and is_on_gpus and not has_started:
        raise ValueError(
            "Ranks on GPUs are not forked: this process may have started CUDA's driver, as an import of "
            "torch_geometric can, and its forks could not use a GPU. Write the cells to a file, %%writefile train.py, "
            "and run it, !python train.py or !torchrun --nproc-per-node=2 train.py."
        )
    return method


def _is_interactive() -> bool:
    """Return whether this is a notebook or a prompt, as Lightning finds it out."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
