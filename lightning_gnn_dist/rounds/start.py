"""What all strategies here share: a start at which all ranks are there with the same data, and exact logged means."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from lightning_gnn_dist.checks import check_durations
from lightning_gnn_dist.rounds import refusals
from lightning_gnn_dist.rounds.launchers import FunctionLauncher, ScriptLauncher
from lightning_gnn_dist.rounds.lightning_internals import join_process_group, refuse_stop_iteration
from lightning_gnn_dist.wire import collectives
from lightning_gnn_dist.wire.roll_call import Roll


class StartsTogether(DDPStrategy):
    """Calls the roll before the process group is made, which would wait for half an hour and name nobody.

    Then ranks compare what they have to have alike, and refuse to train if they have not.

    Args:
        start_timeout: How long the ranks wait for each other.
        options: Those of :class:`lightning.pytorch.strategies.DDPStrategy`.
    """

    def __init__(self, *, start_timeout: timedelta, **options: Any) -> None:
        super().__init__(**options)
        check_durations(start_timeout=start_timeout)
        self.start_timeout = start_timeout
        self.processors_differ = False

    def setup(self, trainer: Trainer) -> None:
        refuse_stop_iteration(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.processors_differ = refusals.check_ranks(trainer, self.root_device)
        super().setup(trainer)

    def _configure_launcher(self) -> None:  # Lightning asks for it once it knows where it runs
        place = self.cluster_environment
        assert place is not None
        if self._start_method == "popen":
            patience = (self._timeout or timedelta(minutes=30)).total_seconds()
            size = {"num_processes": self.num_processes, "num_nodes": self.num_nodes}
            self._launcher = ScriptLauncher(patience, cluster_environment=place, **size)
        else:
            self._launcher = FunctionLauncher(self, start_method=self._start_method)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        place = self.cluster_environment
        assert place is not None
        if not collectives.is_joined():
            lost = self._launcher.lost if isinstance(self._launcher, ScriptLauncher) else dict
            who = (self.global_rank, self.world_size, self.start_timeout, self.num_nodes, lost)
            roll = Roll(place.main_address, place.main_port, *who)
            store = roll.call()
            with collectives.kept_on_host(roll.on_one_host):
                join_process_group(self, store)
        super().setup_distributed()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's, but the mean of numbers and of integers is exact.

        Of what ``self.log(..., batch_size=..., sync_dist=True)`` has summed, Lightning asks for the mean over ranks of
        the values, and for that of the seeds, an integer. It truncates the second one, and divides by it. In float64
        both are what they should be, and their quotient is the mean over the seeds of all ranks.
        """
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg") and not tensor.is_complex():
            tensor = tensor.double() if tensor.dim() == 0 or not tensor.is_floating_point() else tensor
        return super().reduce(tensor, group, reduce_op)
