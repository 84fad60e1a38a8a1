"""The base of all strategies: a start without missing ranks, exact logged means, what each rank saves."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist.checks import check_choice, check_instance
from lightning_gnn_dist.names import extension
from lightning_gnn_dist.rounds import checkpoints, refusals
from lightning_gnn_dist.rounds.launching import Launch, ScriptLauncher, launcher_for
from lightning_gnn_dist.rounds.lightning_internals import (
    Replaced,
    announce_sigterm,
    datamodule_of,
    refuse_stop_iteration,
    take_over_sigterm,
)
from lightning_gnn_dist.rounds.meeting_hook import ReplicaState
from lightning_gnn_dist.wire import channel, collectives
from lightning_gnn_dist.wire.addresses import kept_on_host
from lightning_gnn_dist.wire.alike import Replica, check_ranks
from lightning_gnn_dist.wire.hosts import find_hosts
from lightning_gnn_dist.wire.launching.processes import LEFT_BY_SIGTERM
from lightning_gnn_dist.wire.launching.roll_call import Roll

Buffers = Literal["average", "local"]
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class PartitionedStrategy(DDPStrategy):
    """Ranks that start together with the same data, leave together, and save what each of them holds.

    It calls the roll before the process group is made, as the group would wait for half an hour and name no missing
    rank. Then ranks compare graphs, arrays and parts, and refuse to train if they differ. After all hooks of the start,
    and before a checkpoint, they compare weights and the settings of optimizers.

    Args:
        weights: One of ``weight_modes``: what a rank counts for.
        buffers: One of ``buffer_modes``: what becomes of the module's buffers.
        launch: How ranks are started, and how long they wait for each other.
        options: Arguments of :class:`torch.nn.parallel.DistributedDataParallel`.
    """

    weight_modes: ClassVar[Any]
    buffer_modes: ClassVar[Any] = Buffers
    _states: list[ReplicaState] | None = None  # of the module, which is asked once in a call of the trainer
    excluded: frozenset[str] = frozenset()  # the names of what nobody else has of them

    def __init__(self, *, weights: str, buffers: str, launch: Launch, **options: Any) -> None:
        check_choice("weights", weights, self.weight_modes)
        check_choice("buffers", buffers, self.buffer_modes)
        check_instance("launch", launch, Launch, "a Launch, such as Launch(timeout=timedelta(minutes=5))")
        super().__init__(timeout=launch.timeout, process_group_backend=launch.backend, **options)
        self.weights, self.buffers, self.launch = weights, buffers, launch
        self.processors_differ = self.sigterm_received = False
        self._replaced = Replaced()
        self._resumed: checkpoints.Resumed | None = None
        self._companion: Callback | None = None  # for hooks that strategies do not have

    def __repr__(self) -> str:  # a Trainer of pytorch_lightning names what it does not take
        return f"<{type(self).__name__} of lightning.pytorch, to use with: import lightning.pytorch as pl>"

    # What a subclass says.

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """Whether other ranks may be anywhere in their work, so that no collective may be called."""

    def _begin_fit(self, trainer: Trainer) -> None:
        """Refuse what cannot be trained, and forget the fit before."""

    def _training_loader(self, loader: Any) -> Any:
        """Return the loader that Lightning reads in place of ``loader`` in a fit."""
        return loader

    def _of_run(self) -> dict[str, Any]:
        """Return what a checkpoint holds once for all ranks."""
        return {}

    @abstractmethod
    def _of_rank(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint holds of this rank."""

    @abstractmethod
    def _take_state(self, checkpoint: dict[str, Any], path: object) -> checkpoints.Resumed | None:
        """Return this rank's state in a checkpoint, or None if it has none."""

    @abstractmethod
    def restore_extra_state(self, state: Mapping[str, Any]) -> None:
        """Restore what a checkpoint holds of this rank beside weights and optimizers."""

    def _must_leave_at_once(self) -> bool:
        """Whether other ranks may wait for what this one does not do any more, so that none can wait for their end."""
        return self.is_alone

    # What Lightning calls.

    def connect(self, model: LightningModule) -> None:
        super().connect(model)
        self._states, self.excluded = None, frozenset()
        if model.trainer.state.fn == TrainerFn.FITTING:
            collectives.traffic.begin_fit()
        callbacks: list[Callback | None] = model.trainer.callbacks  # type: ignore[attr-defined]
        if self._companion not in callbacks:
            callbacks.insert(0, self._companion)  # what ranks do together comes before checkpoints, EMA and the like

    def setup(self, trainer: Trainer) -> None:
        self._replaced.give_back()
        refuse_stop_iteration(self._replaced, trainer)
        is_fit = trainer.state.fn == TrainerFn.FITTING
        if is_fit:
            if trainer.world_size > 1:
                checkpoints.check_shapes(self._module())
            self._begin_fit(trainer)
            self.sigterm_received = False
            take_over_sigterm(self._replaced, trainer, self)
            self.processors_differ = self.world_size > 1 and check_ranks(datamodule_of(trainer), self.root_device)
        try:
            super().setup(trainer)
        finally:
            show_to_ddp(self._module())
        for state in self.states if is_fit else []:
            state.begin_fit(self.optimizers, self.precision_plugin)

    def model_to_device(self) -> None:
        super().model_to_device()
        self._divide_states()
        hide_from_ddp(self._module(), self.excluded)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        get = super().lightning_module_state_dict
        if self.is_global_zero and not self.is_alone:
            return get()
        for state in self.states:
            get = partial(state.model_state, get, is_alone=self.is_alone)
        return get()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._divide_states()  # so that each rank reads its own alone
        super().load_model_state_dict(checkpoint, strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        get = partial(super().optimizer_state, optimizer)
        if self.is_global_zero and not self.is_alone:
            for state in self.states:
                get = partial(state.optimizer_state, get, optimizer)
        return get()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for state in self.states:
            checkpoint = {**checkpoint, "optimizer_states": state.own_states(checkpoint["optimizer_states"])}
        super().load_optimizer_state_dict(checkpoint)

    def process_dataloader(self, dataloader: Any) -> Any:
        refusals.check_loader(type(self).__name__, dataloader)  # of a hook of the module, or of another data module
        return self._training_loader(dataloader) if self._module().trainer.training else dataloader

    def on_train_start(self) -> None:
        super().on_train_start()
        # Lightning does so as it makes the loader, which estimated_stepping_batches wants before a checkpoint is read.
        self._module().trainer.fit_loop._load_combined_loader_states()
        self._replica(buffers=self.buffers != "local").check(self.root_device)  # after all hooks of the start
        resumed, self._resumed = self._resumed, None
        if resumed is not None:
            checkpoints.restore_random_state(resumed.random_state)
            self.restore_extra_state(resumed.extra)

    def on_train_end(self) -> None:
        """Leave, on all ranks, for a SIGTERM that came after the last vote. Collective."""
        super().on_train_end()
        told = torch.tensor([float(self.sigterm_received)], device=self.root_device)
        collectives.sum_(told)
        if told.item():
            rank_zero_info("SIGTERM: stopping after the fit.")
            announce_sigterm(self._module().trainer)
            raise SIGTERMException

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        # Trainer.save_checkpoint() runs on all ranks, except after an exception.
        if self.is_alone:
            checkpoints.mark_alone(checkpoint, self._of_run())
        elif "optimizer_states" in checkpoint:  # else there is nothing to resume
            if isinstance(self._launcher, _MultiProcessingLauncher):
                raise ValueError(
                    "The ranks that trained have ended, and their optimizers with them, so this process has nothing "
                    "that a fit could go on from: add ModelCheckpoint, which saves in the ranks, or keep the weights, "
                    "trainer.save_checkpoint(path, weights_only=True)."
                )
            self._replica(weights=not self.processors_differ).check(self.root_device)
            checkpoints.add_to_checkpoint(checkpoint, self._of_run(), self._of_rank(checkpoint))
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        is_file = type(self.checkpoint_io) is TorchCheckpointIO and os.path.isfile(checkpoint_path)
        read = super().load_checkpoint
        if is_file and self.world_size > 1 and any(state.maps_files for state in self.states):
            read = partial(torch.load, map_location="cpu", mmap=True)  # tensors stay in the file until they are read
        checkpoint = read(checkpoint_path, weights_only=weights_only)
        if self._module().trainer.state.fn == TrainerFn.FITTING:
            self._resumed = self._take_state(checkpoint, checkpoint_path)
        return checkpoint

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        channel.explain(exception)
        if isinstance(exception, SIGTERMException):
            exception.code = LEFT_BY_SIGTERM  # Lightning's own is 0, as if the training had come to its end

    def teardown(self) -> None:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        is_fit = trainer is not None and trainer.state.fn == TrainerFn.FITTING
        for state in self._states or []:
            state.leave(
                at_once=self._must_leave_at_once(),
                stays=self._launcher is not None,  # else the process that started this rank gets one model of each host
                gathers=is_fit and self.local_rank == 0,
            )
        self._replaced.give_back()
        super().teardown()

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        environment = self.cluster_environment
        assert environment is not None
        collectives.check_group(self.world_size, self.root_device)
        if not collectives.is_joined():
            lost = self._launcher.lost if isinstance(self._launcher, ScriptLauncher) else dict
            who = (self.global_rank, self.world_size, self.launch.start_timeout, self.num_nodes, lost)
            roll = Roll(environment.main_address, environment.main_port, *who)
            store = roll.call()
            with kept_on_host(roll.on_one_host):  # Lightning's own group would listen at every address of the host
                device = self.root_device if self.root_device.type != "cpu" else None
                how: dict[str, Any] = {"store": store, "timeout": self._timeout, "device_id": device}
                _init_dist_connection(environment, self._get_process_group_backend(), **how)
        super().setup_distributed()
        if self.world_size > 1:
            channel.note_host()
        find_hosts(self.node_rank, self.num_nodes)  # also on one rank, behind a fit that had several hosts

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce as Lightning does, but compute means of scalars and of integers in float64.

        For ``self.log(..., batch_size=..., sync_dist=True)`` Lightning divides the mean over ranks of the summed values
        by the mean of the numbers of seeds, an integer that it truncates. In float64 both are exact, and their quotient
        is the mean over the seeds of all ranks.
        """
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg") and not tensor.is_complex():
            tensor = tensor.double() if tensor.dim() == 0 or not tensor.is_floating_point() else tensor
        return super().reduce(tensor, group, reduce_op)

    def _configure_launcher(self) -> None:  # Lightning asks for it once it knows where it runs
        if others := {getattr(each, "type", "xla") for each in self.parallel_devices or []} - {"cpu", "cuda"}:
            raise ValueError(
                f"{type(self).__name__} trains on CPUs and on CUDA devices, and this trainer computes on {min(others)}"
                ': give it accelerator="cpu", or leave the strategy out, which trains in one process.'
            )
        try:
            _ = self.root_device
        except IndexError:
            raise ValueError(
                f"This process is local rank {self.local_rank}, and the trainer has {len(self.parallel_devices or [])} "
                "device(s): devices= is the number of ranks on each host. In a worker of Ray derive the strategy from "
                f"Ray's, class Mine({type(self).__name__}, RayDDPStrategy), which takes the device that Ray gives."
            ) from None
        self._launcher = launcher_for(self, self.launch)

    def _replica(self, *, weights: bool = True, buffers: bool = False) -> Replica:
        """Return what all ranks must have alike. Steps on processors of different kinds differ in the last digits."""
        return Replica(self._alike(weights=weights, buffers=buffers), self.optimizers)

    def _alike(self, *, weights: bool = True, buffers: bool = False) -> dict[str, Tensor]:
        """Return the parameters, buffers or both that all ranks have, by name."""
        named: dict[str, Tensor] = dict(self._module().named_parameters() if weights else ())
        named |= self._module().named_buffers() if buffers else ()
        return {name: each for name, each in named.items() if name not in self.excluded}

    @property
    def states(self) -> list[ReplicaState]:
        """What ranks do not have alike of the module, in a call of the trainer."""
        if self._states is None:
            self._states = states_of(self._module())
        return self._states

    def _divide_states(self) -> None:
        """Let each rank keep what is its own, unless it does. Collective."""
        for state in self.states:
            state.divide(self.root_device)
        self.excluded = frozenset().union(*(state.excluded() for state in self.states))

    def _module(self) -> LightningModule:
        assert self.lightning_module is not None
        return self.lightning_module


def states_of(module: nn.Module) -> list[ReplicaState]:
    """Return what ranks do not have alike of a module, in the same order on every rank.

    A module of the model that has a method ``replica_state(module)`` brings one of a class for all that the
    LightningModule has of it. An embedding of torch with ``sparse=True`` brings that of its rows.
    """
    found: dict[type, ReplicaState] = {}
    for child in module.modules():
        bring = getattr(child, "replica_state", None)
        if bring is None and getattr(child, "sparse", False) is True and "weight" in child._parameters:
            bring = extension("sparse rows")
        if bring is not None:
            state = bring(module)
            found.setdefault(type(state), state)
    return [*found.values()]


def hide_from_ddp(module: nn.Module, names: Collection[str]) -> None:
    """Let DDP, and Lightning where it makes replicas equal, ignore parameters and buffers, by any name of theirs."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    hidden = {id(each) for name, each in named if name in names}
    ignored = [name for name, each in named if id(each) in hidden]
    show_to_ddp(module)
    if ignored:
        vars(module)[_IGNORED] = ignored


def show_to_ddp(module: nn.Module) -> None:
    """Undo :func:`hide_from_ddp`."""
    vars(module).pop(_IGNORED, None)
