"""A progress bar for a pass over the layers, where the trainer shows bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm

_SECONDS_UNSEEN = 1.0  # of a pass that needs no bar


@contextmanager
def progress_of(trainer: Trainer, total: int) -> Iterator[Callable[[int], object]]:
    """Yield a function that counts computed rows of ``total``, on a bar if rank 0 has one of tqdm's.

    Bars of other kinds redraw their lines themselves, and would be torn apart.
    """
    bar = trainer.progress_bar_callback
    if not isinstance(bar, TQDMProgressBar) or bar.is_disabled or not trainer.is_global_zero:
        yield lambda _: None
        return
    looks: dict[str, object] = {"unit": "rows", "leave": False, "dynamic_ncols": True, "delay": _SECONDS_UNSEEN}
    with Tqdm(total=total, desc="Layers of all nodes", **looks) as shown:
        yield shown.update
