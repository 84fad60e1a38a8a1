"""What a trainer says of its progress: the steps of a fit, and its bars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import TrainerFn


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
