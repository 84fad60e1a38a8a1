"""The base of strategies under which each rank owns some rows of a module's tables, and the others ask for them."""

from __future__ import annotations

import os
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_gnn_dist.rounds.partitioned_strategy import PartitionedStrategy
from lightning_gnn_dist.rounds.rows.owned_embedding import OwnedEmbedding, divide, owned_tables, rows_here_alone
from lightning_gnn_dist.rounds.rows.owned_moments import read_mapped
from lightning_gnn_dist.rounds.rows.row_owners import RowOwners
from lightning_gnn_dist.rounds.rows.table_gradients import hidden_from_ddp


class OwningStrategy(PartitionedStrategy):
    """Divides the rows of each :class:`OwnedEmbedding` among ranks, and puts them together in checkpoints.

    A subclass says which moments of its rows a rank has, in ``_moments``, and how they come into checkpoints.
    """

    divides_tables: ClassVar[bool] = True
    _owners: RowOwners | None = None

    # What a subclass says.

    @abstractmethod
    def _moments(self, parameter: Tensor) -> dict[str, Any]:
        """Return what others may ask for beside the rows of a parameter that lie here, by name."""

    # What Lightning calls.

    def setup(self, trainer: Trainer) -> None:
        tables, is_fit = owned_tables(self._module()), trainer.state.fn == TrainerFn.FITTING
        if tables and trainer.world_size > 1:
            _refuse_copies(next(iter(tables)), trainer)
        # In a fit, what wraps the module hides them.
        hides = hidden_from_ddp(self._module(), [table.parameter for table in tables.values()])
        with nullcontext() if is_fit else hides:
            super().setup(trainer)

    def model_to_device(self) -> None:
        super().model_to_device()
        self._divide()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._owners is None or (self.is_global_zero and not self.is_alone):
            return super().lightning_module_state_dict()
        with rows_here_alone():
            state = super().lightning_module_state_dict()
        if self.is_alone:
            names = [f"{name}.weight" for name in owned_tables(self._module())]
            rank_zero_warn(f"This checkpoint lacks {', '.join(names)}, whose rows lie on ranks that may have ended.")
            for name in names:
                state.pop(name, None)
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._divide()  # so that each rank reads its rows alone
        super().load_model_state_dict(checkpoint, strict)

    def teardown(self) -> None:
        if self._owners is not None:
            self._leave(self._owners)
        super().teardown()

    # What all strategies have.

    def _read(self, path: Any, weights_only: bool | None) -> dict[str, Any]:
        is_file = type(self.checkpoint_io) is TorchCheckpointIO and os.path.isfile(path)
        if not is_file or self.world_size == 1 or not self._owned():
            return super()._read(path, weights_only)
        return read_mapped(path, weights_only)

    def _owned(self) -> list[OwnedEmbedding]:
        return [*owned_tables(self._module()).values()]

    def _owned_parameters(self) -> set[int]:
        """Return the weights of these tables, by ``id()``, where rows live with one rank each."""
        return set() if self._owners is None else {id(table.parameter) for table in self._owned()}

    def _divide(self) -> None:
        """Let each rank own some rows, unless it does. Collective."""
        self._owners = divide(self._owned(), self.root_device)
        if self._owners is not None:
            strategy = weakref.ref(self)  # owners may outlive it

            def moments(parameter: Tensor) -> dict[str, Any]:
                held = strategy()
                return {} if held is None else held._moments(parameter)

            self._owners.keep_moments(moments)

    def _must_leave_at_once(self) -> bool:
        """Whether other ranks may wait for what this one does not do any more, so that none can wait for their end."""
        return self.is_alone

    def _leave(self, owners: RowOwners) -> None:
        """End a fit or an evaluation; after it, ranks that go on may still ask each other for rows."""
        owners.trains = False
        if self._must_leave_at_once():
            owners.abort()
            self._owners = None
        elif self._launcher is None:  # the process that started this rank gets the model of the first on each host
            if self._module().trainer.state.fn == TrainerFn.FITTING and self.local_rank == 0:
                for table in self._owned():
                    table.gather()
            owners.close()
            self._owners = None


def _refuse_copies(name: str, trainer: Any) -> None:
    """Refuse callbacks that copy the module."""
    found = [each for each in trainer.callbacks if isinstance(each, WeightAveraging | StochasticWeightAveraging)]
    if found:
        raise ValueError(
            f"{type(found[0]).__name__} keeps a copy of all weights, and of {name}, an OwnedEmbedding, each rank has "
            "some rows: leave it out, or use nn.Embedding(..., sparse=True)."
        )
