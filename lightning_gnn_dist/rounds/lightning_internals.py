"""What strategies replace or read of Lightning where it has no hook, beside its reason. Tried with Lightning 2.6."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from traceback import walk_tb
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops import fetchers, training_epoch_loop
from lightning.pytorch.trainer.states import TrainerFn

Told = Callable[[], None]


def datamodule_of(trainer: Trainer) -> Any:
    """Return the data module of a fit, None for bare loaders. Callers name the Protocol of ``joint`` that they read."""
    return trainer.datamodule  # type: ignore[attr-defined]


class Replaced:
    """Methods of a trainer's objects that a fit has replaced, until it gives them back."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def put(self, owner: Any, name: str, method: Callable[..., Any]) -> None:
        """Let an object have another method of this name."""
        if not hasattr(owner, name):
            raise RuntimeError(
                f"This Lightning has no {type(owner).__name__}.{name}, which strategies replace: "
                "install lightning>=2.6.6,<2.7."
            )
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    def watch(self, owner: Any, name: str, *, after: Told, before: Told | None = None) -> None:
        """Call these around a method."""
        method = getattr(owner, name)

        def watched(*args: Any) -> Any:
            if before is not None:
                before()
            result = method(*args)
            after()
            return result

        self.put(owner, name, watched)

    def give_back(self) -> None:
        """Undo it all."""
        while self._before:
            owner, name, before = self._before.pop()
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)


def take_over_sigterm(replaced: Replaced, trainer: Trainer, told: Any) -> None:
    """Let SIGTERM set ``told.sigterm_received`` and nothing else, and silence the broadcast before each batch.

    Lightning broadcasts "did anybody receive SIGTERM" before every batch and once more inside the signal handler. The
    first keeps ranks in lock-step all through a round; the second waits for ranks that are busy elsewhere. Strategies
    replace both by a vote where ranks exchange anyway.
    """
    # A flag only: a collective in a signal handler can wait for ever. All ranks hear of it where they meet next.
    notify = lambda signum, frame: setattr(told, "sigterm_received", True)  # noqa: E731
    replaced.put(trainer._signal_connector, "_sigterm_notifier_fn", notify)
    replaced.put(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", lambda: None)


def announce_sigterm(trainer: Trainer) -> None:
    """Make Lightning leave as if this rank had received SIGTERM: at the end of the epoch, with its hooks."""
    trainer._signal_connector.received_sigterm = True


def hear_skips(replaced: Replaced, module: LightningModule, told: Any) -> None:
    """Set ``told.skips`` to whether the module's ``on_train_batch_start`` returned -1, which ends the epoch.

    Lightning calls the strategy's hook behind it, and does not say.
    """
    hook = module.on_train_batch_start
    if getattr(hook, "__func__", None) is LightningModule.on_train_batch_start:
        return  # not the user's: it says nothing

    def listen(*args: Any) -> Any:
        answer = hook(*args)
        told.skips = answer == -1
        return answer

    replaced.put(module, "on_train_batch_start", listen)


def refuse_stop_iteration(replaced: Replaced, trainer: Trainer) -> None:
    """Turn a StopIteration of the user's code into an error: Lightning takes it for the end of the data."""
    epoch_loop = trainer.fit_loop.epoch_loop
    evaluations = (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    steps: list[tuple[Any, str]] = [(loop, "_evaluation_step") for loop in evaluations]
    steps += [(trainer.predict_loop, "_predict_step"), (epoch_loop, "advance"), (epoch_loop, "on_advance_end")]
    for loop, name in steps:
        replaced.put(loop, name, _refusing(getattr(loop, name)))


def _refusing(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except StopIteration as error:
            if step.__name__ == "advance" and _is_end_of_data(error, *args):
                raise
            raise RuntimeError(
                "StopIteration was raised while a batch was used, and not by its loader: by training_step or a hook. "
                "It would end the epoch as if all were done. Give next() a default, or catch it."
            ) from error

    return refuse


def _is_end_of_data(error: StopIteration, fetcher: Any) -> bool:
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    is_read = fetcher.length is None or fetcher.fetched >= fetcher.length
    # The loop itself raises it where a hook has returned -1.
    return modules[-1] == training_epoch_loop.__name__ or (fetchers.__name__ in modules and is_read)


def set_global_step(trainer: Trainer, steps: int) -> None:
    """Set ``trainer.global_step`` to ``steps``, after a round in which ranks have taken unequal numbers."""
    loop = trainer.fit_loop.epoch_loop
    automatic, by_hand = loop.automatic_optimization.optim_progress, loop.manual_optimization.optim_step_progress
    progress = automatic.optimizer.step if trainer.lightning_module.automatic_optimization else by_hand
    progress.total.ready = progress.total.completed = steps


def take_over_estimate(trainer: Trainer, estimate: Callable[[], float]) -> None:
    """Let ``trainer.estimated_stepping_batches`` be ``estimate()`` in a fit.

    Lightning multiplies the length of the training loader, one number, by the epochs; but rounds may grow. Of a loader
    without length it returns ``trainer.max_steps``, which would also end the fit, and by a count that adds up the steps
    of all optimizers. A property belongs to a class, so this trainer gets a class of its own, which stays: the number
    may be asked for after the fit.
    """
    base: Any = type(trainer)

    def estimated_stepping_batches(self: Any) -> Any:
        return estimate() if self.state.fn == TrainerFn.FITTING else base.estimated_stepping_batches.fget(self)

    _give_members(trainer, estimated_stepping_batches=property(estimated_stepping_batches))


def take_over_bar(trainer: Trainer, num_batches: Callable[[], float]) -> None:
    """Let the progress bar show ``num_batches()`` as the total of an epoch in a fit, and the steps so far.

    Lightning shows the length of the training loader, and a loader of rounds has none. As with
    :func:`take_over_estimate`, this bar gets a class of its own.
    """
    bar: Any = trainer.progress_bar_callback
    base: Any = type(bar)

    def get_metrics(self: Any, trainer: Trainer, *args: Any) -> dict[str, Any]:
        steps = {"step": trainer.global_step} if trainer.state.fn == TrainerFn.FITTING else {}
        return {**steps, **base.get_metrics(self, trainer, *args)}

    if bar is not None:
        _give_members(bar, total_train_batches=property(lambda self: num_batches()), get_metrics=get_metrics)


def _give_members(owner: Any, **members: Any) -> None:
    """Give an object a class of its own, with members that its class has not, unless an earlier fit has."""
    base = type(owner)
    if not getattr(base, "is_of_rounds", False):
        names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
        owner.__class__ = type(base.__name__, (base,), {**names, **members, "is_of_rounds": True})


def log_numbers(module: LightningModule, numbers: Mapping[str, float]) -> None:
    """Log the mean of each number over the epoch, as ``log_dict`` does; not collective, and no warning says so.

    Lightning walks through all that it keeps of a name whenever the name is logged, which takes a millisecond. Here it
    does so the first time alone. A module with a ``log`` of its own hears each number.
    """
    trainer, hook = module.trainer, module._current_fx_name
    is_lightnings = getattr(module.log, "__func__", None) is LightningModule.log
    results: Any = trainer._results if is_lightnings and hook is not None and trainer._results is not None else {}
    known = {name: number for name, number in numbers.items() if f"{hook}.{name}" in results}
    if new := {name: number for name, number in numbers.items() if name not in known}:
        # With the last two Lightning neither sends nor complains.
        module.log_dict(new, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)
    if hook is None or not known:
        return
    begins = trainer._logger_connector.should_reset_tensors(hook)  # the means of a new epoch
    for metric in results.values() if begins else ():
        if metric.is_tensor and metric.meta.fx == hook and metric.meta.name not in known:
            metric.reset()
    one = torch.tensor(1, device=module.device)
    values = torch.tensor([*known.values()], dtype=torch.get_default_dtype(), device=module.device).unbind()
    for name, value in zip(known, values, strict=True):
        metric = results[f"{hook}.{name}"]
        metric.value = value if begins else metric.value + value
        metric.cumulated_batch_size = one if begins else metric.cumulated_batch_size + one
        metric._update_count, metric._computed, metric.has_reset = 1, None, False
    trainer._logger_connector._current_fx = hook
