"""How far a trainer has come, what it says of that and logs, and what strategies add to its loops."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from traceback import walk_tb
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.loops import fetchers, training_epoch_loop
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync
from lightning.pytorch.trainer.states import TrainerFn


def accumulated_batches(trainer: Trainer, epoch: int) -> int:
    """Return the number of batches whose gradients make one step in an epoch."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            return callback.get_accumulate_grad_batches(epoch)
    return trainer.accumulate_grad_batches


def resume_loader(trainer: Trainer) -> None:
    """Give the training loader its place in a checkpoint, where it was made before that was read.

    Lightning does so as it makes the loader, which ``estimated_stepping_batches`` asks for earlier.
    """
    trainer.fit_loop._load_combined_loader_states()


def watch_loops(
    trainer: Trainer,
    *,
    on_epoch_start: Callable[[], None],
    before_step_ends: Callable[[], None],
    after_step: Callable[[], None],
    after_epoch: Callable[[], None],
) -> None:
    """Call these around the loops' looks at ``trainer.should_stop``, where Lightning has no hooks."""
    epoch_loop, fit_loop = trainer.fit_loop.epoch_loop, trainer.fit_loop

    def start_epoch(data_fetcher: Any) -> None:
        type(epoch_loop).on_run_start(epoch_loop, data_fetcher)
        on_epoch_start()

    def end_step(data_fetcher: Any) -> None:
        before_step_ends()  # what follows may validate, because of a stop
        type(epoch_loop).on_advance_end(epoch_loop, data_fetcher)
        after_step()

    def end_epoch() -> None:
        type(fit_loop).on_advance_end(fit_loop)
        after_epoch()

    epoch_loop.on_run_start = start_epoch  # type: ignore[method-assign]
    epoch_loop.on_advance_end = end_step  # type: ignore[method-assign]
    fit_loop.on_advance_end = end_epoch  # type: ignore[method-assign]


def give_back_loops(trainer: Trainer) -> None:
    """Undo :func:`watch_loops`."""
    for name in ("on_run_start", "on_advance_end"):
        trainer.fit_loop.epoch_loop.__dict__.pop(name, None)
    trainer.fit_loop.__dict__.pop("on_advance_end", None)


def hear_skips(module: LightningModule, on_answer: Callable[[bool], None]) -> None:
    """Tell ``on_answer`` whether the module's ``on_train_batch_start`` returned -1, which ends the epoch."""
    hook = module.on_train_batch_start
    if getattr(hook, "__func__", None) is LightningModule.on_train_batch_start:
        return  # not the user's: it says nothing

    def listen(*args: Any) -> Any:
        answer = hook(*args)
        on_answer(answer == -1)
        return answer

    listen.heard = module.__dict__.get("on_train_batch_start")  # type: ignore[attr-defined]
    module.on_train_batch_start = listen  # type: ignore[method-assign,assignment]


def hear_no_skips(module: LightningModule) -> None:
    """Undo :func:`hear_skips`."""
    listen = module.__dict__.get("on_train_batch_start")
    if not hasattr(listen, "heard"):
        return
    del module.on_train_batch_start
    if listen.heard is not None:  # type: ignore[union-attr]
        module.on_train_batch_start = listen.heard  # type: ignore[union-attr,method-assign]


def refuse_stop_iteration(trainer: Trainer) -> None:
    """Turn a StopIteration of the user's code into an error: Lightning takes it for the end of the data."""
    epoch_loop = trainer.fit_loop.epoch_loop
    evaluations = (epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop)
    steps: list[tuple[Any, str]] = [(loop, "_evaluation_step") for loop in evaluations]
    steps += [(trainer.predict_loop, "_predict_step"), (epoch_loop, "advance"), (epoch_loop, "on_advance_end")]
    for loop, name in steps:
        if name not in vars(loop):
            setattr(loop, name, _refusing(getattr(loop, name)))


def _refusing(step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def refuse(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except StopIteration as error:
            if _is_end_of_data(error, step.__name__, *args):
                raise
            raise RuntimeError(
                "StopIteration was raised while a batch was used, and not by its loader: by training_step or a hook. "
                "It would end the epoch as if all were done. Give next() a default, or catch it."
            ) from error

    return refuse


def _is_end_of_data(error: StopIteration, step: str, *args: Any) -> bool:
    if step != "advance":
        return False
    modules = [frame.f_globals.get("__name__") for frame, _ in walk_tb(error.__traceback__)]
    if modules[-1] == training_epoch_loop.__name__:
        return True  # a hook has returned -1
    return fetchers.__name__ in modules and (args[0].length is None or args[0].fetched >= args[0].length)


def set_global_step(trainer: Trainer, steps: int) -> None:
    """Set ``trainer.global_step`` to ``steps``."""
    loop = trainer.fit_loop.epoch_loop
    if trainer.lightning_module.automatic_optimization:
        progress = loop.automatic_optimization.optim_progress.optimizer.step.total
    else:
        progress = loop.manual_optimization.optim_step_progress.total
    progress.ready = progress.completed = steps


def set_epoch(trainer: Trainer, epochs: int, *, running: bool) -> None:
    """Set Lightning's count of begun epochs to ``epochs``; the last is still running or not."""
    for progress in (trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_progress.total):
        progress.ready = progress.started = epochs  # type: ignore[attr-defined]
        progress.processed = progress.completed = epochs - running  # type: ignore[attr-defined]
    trainer.fit_loop.restarting = False  # what a checkpoint said of where the epoch stood is out of date


def loop_state(trainer: Trainer) -> dict[str, Any]:
    """Return how far the fits of a trainer have come."""
    state = trainer.fit_loop.state_dict()
    counts = {name: content for name, content in state.items() if not name.endswith("state_dict")}
    return {"counts": counts, "logged": trainer.fit_loop.epoch_loop._batches_that_stepped, "stop": trainer.should_stop}


def load_loop_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Let a trainer be as far as that of :func:`loop_state`, without taking a next fit for one that is resumed."""
    fit_loop = trainer.fit_loop
    fit_loop.load_state_dict(state["counts"])
    for loop in (fit_loop, fit_loop.epoch_loop, *_loops_in(fit_loop.epoch_loop)):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    fit_loop.epoch_loop._batches_that_stepped = state["logged"]
    trainer.should_stop = state["stop"]


def _loops_in(loop: Any) -> list[Any]:
    return [inner for inner in vars(loop).values() if isinstance(inner, _Loop)]


def take_over_estimate(trainer: Trainer, estimate: Callable[[], float]) -> None:
    """Let ``trainer.estimated_stepping_batches`` be ``estimate()`` in a fit.

    Lightning offers no hook for it. Its property multiplies the length of the training loader, one number, by the
    epochs; but rounds may grow. Of a loader without length it returns ``trainer.max_steps``, which would also end the
    fit, and by a count that adds up the steps of all optimizers. A property belongs to a class, so this trainer gets a
    class of its own, which stays: the number may be asked for after the fit.
    """
    base: Any = type(trainer)
    if getattr(base, "estimates_rounds", False):
        return  # from an earlier fit

    def estimated_stepping_batches(self: Any) -> Any:
        return estimate() if self.state.fn == TrainerFn.FITTING else base.estimated_stepping_batches.fget(self)

    _give_members(trainer, estimates_rounds=True, estimated_stepping_batches=property(estimated_stepping_batches))


def take_over_bar(trainer: Trainer, num_batches: Callable[[], float]) -> None:
    """Let the progress bar show ``num_batches()`` as the total of an epoch in a fit, and the steps so far.

    Lightning shows the length of the training loader, and a loader of rounds has none. As with
    :func:`take_over_estimate`, this bar gets a class of its own.
    """
    bar: Any = trainer.progress_bar_callback
    base: Any = type(bar)
    if bar is None or getattr(base, "shows_rounds", False):
        return

    def get_metrics(self: Any, trainer: Trainer, *args: Any) -> dict[str, Any]:
        steps = {"step": trainer.global_step} if trainer.state.fn == TrainerFn.FITTING else {}
        return {**steps, **base.get_metrics(self, trainer, *args)}

    total = property(lambda self: num_batches())
    _give_members(bar, shows_rounds=True, total_train_batches=total, get_metrics=get_metrics)


def _give_members(owner: Any, **members: Any) -> None:
    """Give an object a class of its own, with members that its class has not."""
    base = type(owner)
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    owner.__class__ = type(base.__name__, (base,), names | members)


def show_one_bar(trainer: Trainer) -> None:
    """Show no bar for a validation below that of the fit: where text is all that can be shown, both take many lines."""
    bar: Any = trainer.progress_bar_callback
    if isinstance(bar, TQDMProgressBar):
        draw = bar.init_validation_tqdm
        is_fit = trainer.state.fn == TrainerFn.FITTING
        bar.init_validation_tqdm = lambda: Tqdm(disable=True) if is_fit else draw()  # type: ignore[method-assign]


def log_numbers(module: LightningModule, numbers: Mapping[str, float]) -> None:
    """Log the mean of each number over the epoch, as ``log_dict`` does; not collective, and no warning says so.

    Lightning walks through all that it keeps of a name whenever the name is logged, which takes a millisecond, and here
    it does not. A module with a ``log`` of its own hears each number.
    """
    if not numbers:
        return
    trainer, hook = module.trainer, module._current_fx_name
    is_lightnings = getattr(module.log, "__func__", None) is LightningModule.log
    if not is_lightnings or trainer._results is None or hook is None or trainer.barebones:
        flags: dict[str, Any] = {"on_step": False, "on_epoch": True, "batch_size": 1}
        # With both of these Lightning neither sends nor complains.
        module.log_dict(numbers, **flags, sync_dist=True, rank_zero_only=True)
        return
    metrics = [_logged_metric(trainer, hook, name) for name in numbers]
    begins = trainer._logger_connector.should_reset_tensors(hook)  # the means of a new epoch
    if begins:
        _reset_others(trainer._results, hook, metrics)
    one = torch.tensor(1, device=module.device)
    values = torch.tensor([*numbers.values()], dtype=torch.get_default_dtype(), device=module.device).unbind()
    for metric, value in zip(metrics, values, strict=True):
        metric.value = value if begins else metric.value + value
        metric.cumulated_batch_size = one if begins else metric.cumulated_batch_size + one
        metric._update_count, metric._computed, metric.has_reset = 1, None, False
    trainer._logger_connector._current_fx = hook


def _logged_metric(trainer: Trainer, hook: str, name: str) -> Any:
    """Return what keeps the mean of a name that a hook logs, as ``log`` makes it when the name is new."""
    results: Any = trainer._results
    if (key := f"{hook}.{name}") not in results:
        meta = _Metadata(fx=hook, name=name)
        is_distributed = trainer._accelerator_connector.is_distributed
        meta.sync = _Sync(fn=trainer.strategy.reduce, _should=is_distributed, rank_zero_only=True)
        results[key] = _ResultMetric(meta, is_tensor=True)
    return results[key]


def _reset_others(results: Any, hook: str, metrics: Sequence[Any]) -> None:
    """Forget what a hook has logged in the epoch before, but for metrics that are about to be given a number."""
    kept = {id(metric) for metric in metrics}
    for metric in results.values():
        if metric.is_tensor and metric.meta.fx == hook and id(metric) not in kept:
            metric.reset()


def metrics_of(trainer: Trainer) -> tuple[dict[str, Any], ...]:
    """Return the metrics that callbacks, loggers and the progress bar see."""
    return dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)


def set_metrics(trainer: Trainer, metrics: Sequence[dict[str, Any]]) -> None:
    """Give a trainer the metrics that :func:`metrics_of` returned on another rank."""
    connector = trainer._logger_connector
    connector._callback_metrics, connector._logged_metrics, connector._progress_bar_metrics = metrics
