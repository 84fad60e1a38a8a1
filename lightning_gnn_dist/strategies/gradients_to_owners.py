"""The base of strategies that hand the gradients of owned rows to their owners, which step at every step of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.rounds.partitioned_strategy import PartitionedStrategy
from lightning_gnn_dist.tables.owned_gradients import clip_owned_gradients, give_back_norm
from lightning_gnn_dist.tables.owned_moments import moments_of, own_state, whole_state


class GradientsToOwners(PartitionedStrategy):
    """Lets the optimizers of owners step the rows that lie there.

    A subclass exchanges gradients at every step, and then calls :meth:`has_gradients`.
    """

    def has_gradients(self) -> None:
        """Note that owners have the gradients of their rows."""
        if (
            self.ownership.owners is not None and self._module().automatic_optimization
        ):  # by hand other backwards may follow
            self.ownership.owners.begin_step()

    def _of_all_ranks(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return those parameters of which all ranks hold the same."""
        owned = self.ownership.parameters()
        return [each for each in parameters if id(each) not in owned]

    # What Lightning calls.

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if trainer.state.fn == TrainerFn.FITTING and self.ownership.owners is not None:
            clip_owned_gradients(self.precision_plugin, self.ownership.tables)

    def on_train_start(self) -> None:
        super().on_train_start()
        if self.ownership.owners is not None:
            self.ownership.owners.trains = True
            for table in self.ownership.tables:
                table.take_gradients()  # of an earlier fit

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self.ownership.owners is not None:
            self.ownership.owners.begin_batch()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
        result = super().optimizer_step(optimizer, closure, *args, **kwargs)
        if self.ownership.owners is not None:
            self.ownership.owners.has_changed()
        return result

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if self.ownership.owners is None or self.is_alone or not self.is_global_zero:
            return state
        return whole_state(state, optimizer, self.ownership.tables)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self.ownership.owners is not None:
            pairs = zip(checkpoint["optimizer_states"], self.optimizers, strict=False)
            states = [own_state(state, optimizer, self.ownership.tables) for state, optimizer in pairs]
            checkpoint = {**checkpoint, "optimizer_states": states}
        super().load_optimizer_state_dict(checkpoint)

    # What all strategies have.

    def _give_back(self, trainer: Trainer) -> None:
        super()._give_back(trainer)
        give_back_norm(self.precision_plugin)

    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        return moments_of(parameter, self.optimizers)
