"""The base of strategies whose replicas train copies of rows that live with one rank each, until ranks meet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.owning_strategy import OwningStrategy
from lightning_gnn_dist.rounds.rows.replica_tables import ReplicaTables


class ReplicaStrategy(OwningStrategy):
    """Lets replicas train each :class:`OwnedEmbedding`, and writes what owners and replicas have into checkpoints.

    A subclass makes ``replicas``, and tells it when rounds begin, end, and meet.
    """

    replicas: ReplicaTables
    _has_failed = False

    # What Lightning calls.

    def model_to_device(self) -> None:
        super().model_to_device()
        if self._module().trainer.state.fn == TrainerFn.FITTING:
            self._has_failed = False
            self.replicas.take(self._owned(), self._owners)

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.replicas.begin()

    def on_train_start(self) -> None:
        self.replicas.begin_training()
        super().on_train_start()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        if self.replicas.tables and self._companion not in self._module().trainer.callbacks:  # type: ignore[attr-defined]
            raise ValueError(
                "A Tuner searches without the callback that hands an OwnedEmbedding its rows at each step: use "
                "nn.Embedding(..., sparse=True) for the search."
            )
        try:
            return super().optimizer_step(optimizer, closure, *args, **kwargs)
        finally:
            self.replicas.end_step()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self._owners is None or self.is_alone or not self.is_global_zero:
            return state
        return self.replicas.whole_state(state, optimizer)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = self.replicas.own_states(checkpoint["optimizer_states"], self.optimizers)
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})

    def on_exception(self, exception: BaseException) -> None:
        self._has_failed = not isinstance(exception, SIGTERMException)
        super().on_exception(exception)

    def teardown(self) -> None:
        self.replicas.end()
        super().teardown()

    # What all strategies have.

    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        return self.replicas.moments(parameter)

    def _must_leave_at_once(self) -> bool:
        return self._has_failed or super()._must_leave_at_once()
