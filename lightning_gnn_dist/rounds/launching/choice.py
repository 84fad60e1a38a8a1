"""Who starts the ranks here: nobody, this script, or this process."""

from __future__ import annotations

import os
import sys

from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.strategies import DDPStrategy

from lightning_gnn_dist.rounds.launching.function_launcher import FunctionLauncher
from lightning_gnn_dist.rounds.launching.launch import Launch, StartMethod
from lightning_gnn_dist.rounds.launching.script_launcher import ScriptLauncher
from lightning_gnn_dist.wire.launching.rank_processes import Start

_FRESH: Start = "forkserver" if sys.platform == "linux" else "spawn"  # a fork of torch is not safe on macOS


def launcher_for(strategy: DDPStrategy, launch: Launch) -> ScriptLauncher | FunctionLauncher:
    """Return what starts the ranks of a strategy where this process runs."""
    environment = strategy.cluster_environment
    assert environment is not None
    if _is_interactive() and isinstance(environment, SLURMEnvironment):
        environment = strategy.cluster_environment = LightningEnvironment()  # a notebook is none of srun's tasks
    method = start_method_here(launch, environment.creates_processes_externally)
    is_alone = launch.start_method is None and strategy.num_processes * strategy.num_nodes == 1
    if method == "popen" or is_alone:  # a rank that is alone is this process
        size = {"num_processes": strategy.num_processes, "num_nodes": strategy.num_nodes}
        return ScriptLauncher(launch.timeout.total_seconds(), cluster_environment=environment, **size)
    return FunctionLauncher(strategy, method)


def start_method_here(launch: Launch, has_started: bool) -> StartMethod:
    """Return how ranks are started here. ``has_started`` says that torchrun or SLURM have done so."""
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    can_run_again = not _is_interactive() and (is_module or os.path.isfile(sys.argv[0]))
    if launch.start_method == "popen" and not has_started and not can_run_again:
        raise ValueError(
            "start_method='popen' runs the script again for each rank, and here is none (a notebook, a prompt or "
            "python -c): leave start_method out."
        )
    return launch.start_method or ("popen" if has_started or can_run_again else _FRESH)


def _is_interactive() -> bool:
    """Return whether this is a notebook or a prompt, as Lightning finds it out."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive)
