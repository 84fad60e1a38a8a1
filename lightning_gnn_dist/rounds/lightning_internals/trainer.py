"""What strategies read and replace of a trainer: its module and data, SIGTERM and the process group.

Since 2.5.2 Lightning broadcasts "did anybody receive SIGTERM" before every batch and once more inside the signal
handler. The first keeps ranks in lock-step all through a round; the second waits for ranks that are busy elsewhere.
Strategies replace both by a vote where ranks exchange anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature


class HasModule(Protocol):
    """A strategy, as Lightning sees it."""

    @property
    def lightning_module(self) -> LightningModule | None: ...


def module_of(strategy: HasModule) -> LightningModule:
    """Return the module that a strategy trains."""
    assert strategy.lightning_module is not None
    return strategy.lightning_module


def datamodule_of(trainer: Trainer) -> Any:
    """Return the data module of a fit, None for bare loaders. Callers name the Protocol of ``joint`` that they read."""
    return trainer.datamodule  # type: ignore[attr-defined]


def take_over_sigterm(trainer: Trainer, on_signal: Callable[[], None]) -> None:
    """Let SIGTERM call ``on_signal`` and nothing else, and silence the broadcast before each batch."""
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    for owner, name in ((connector, "_sigterm_notifier_fn"), (loop, "_broadcast_sigterm_tensor")):
        if not hasattr(owner, name):
            raise RuntimeError(
                f"This Lightning has no {type(owner).__name__}.{name}, which rounds replace: "
                "install lightning>=2.6.6,<2.7."
            )

    def notify(signum: int, frame: Any) -> None:
        on_signal()  # a flag only: a collective in a signal handler can wait for ever

    connector._sigterm_notifier_fn = notify  # type: ignore[method-assign,assignment]
    loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]


def give_back_sigterm(trainer: Trainer) -> None:
    """Undo :func:`take_over_sigterm`, as there are no votes after a fit."""
    trainer._signal_connector.__dict__.pop("_sigterm_notifier_fn", None)
    trainer.fit_loop.epoch_loop.__dict__.pop("_broadcast_sigterm_tensor", None)


def announce_sigterm(trainer: Trainer) -> None:
    """Make Lightning leave as if this rank had received SIGTERM: at the end of the epoch, with its hooks."""
    trainer._signal_connector.received_sigterm = True


def join_process_group(strategy: DDPStrategy, store: Any) -> None:
    """Make the process group on ``store``; Lightning's own would listen at every address of the host."""
    environment, device = strategy.cluster_environment, strategy.root_device
    assert environment is not None
    _init_dist_connection(
        environment,
        strategy._get_process_group_backend(),
        store=store,
        timeout=strategy._timeout,
        device_id=device if device.type != "cpu" else None,
    )


def callback_states(trainer: Trainer) -> dict[str, Any]:
    """Return the states of all callbacks."""
    states: dict[str, Any] = call._call_callbacks_state_dict(trainer)
    return states


def load_callback_states(trainer: Trainer, states: dict[str, Any]) -> None:
    """Give the callbacks the states that :func:`callback_states` returned on another rank."""
    call._call_callbacks_load_state_dict(trainer, {"callbacks": states})


def takes_batch_idx(module: LightningModule) -> bool:
    """Return whether Lightning's loop calls ``training_step`` with ``batch_idx``, too."""
    if "training_step" in vars(module):  # of this module alone
        return is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
    return _takes_batch_idx(type(module).training_step)


@lru_cache(maxsize=8)
def _takes_batch_idx(step: Callable[..., Any]) -> bool:
    return is_param_in_hook_signature(step, "batch_idx", min_args=2)
