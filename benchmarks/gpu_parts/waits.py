"""How often the host waits for the device in a step, and where."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import lightning.pytorch as pl
import torch
from gpu_parts.common import (
    IS_PRETENDED,
    Module,
    Net,
    Scale,
    Training,
    attached,
    best_places,
    data_of,
    made_graph,
    notes_of_pretending,
    trainer_on,
)
from gpu_parts.rows import Rows

from lightning_gnn_dist import EverySteps, GrappaStrategy, LocalSGDStrategy

STRATEGIES: dict[str, Any] = {
    'strategy="auto"': lambda _: "auto",
    "GrappaStrategy()": lambda _: GrappaStrategy(),
    "LocalSGDStrategy()": lambda steps: LocalSGDStrategy(EverySteps(steps)),
}
LISTED = 6


class Waits:
    """Counts by place how often the host waits between :meth:`begin` and :meth:`end`, in any thread."""

    def __init__(self) -> None:
        self.places: Counter[str] = Counter()
        self._seen: Any = None

    def begin(self) -> None:
        if IS_PRETENDED:
            notes_of_pretending().clear()
            return
        self._seen = warnings.catch_warnings(record=True)
        self._said = self._seen.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def end(self) -> None:
        if IS_PRETENDED:
            self.places.update({at: n for (kind, _, at), n in notes_of_pretending().items() if kind == "sync"})
            return
        torch.cuda.set_sync_debug_mode("default")
        self._seen.__exit__(None, None, None)
        said = [each for each in self._said if "synchronizing CUDA operation" in str(each.message)]
        self.places.update(f"{each.filename.split('site-packages/')[-1]}:{each.lineno}" for each in said)

    def tell(self, rows: Rows, name: str, steps: int) -> None:
        most = ", ".join(f"{at} {times / steps:.1f}" for at, times in self.places.most_common(LISTED))
        rows.add(name, self.places.total() / steps, "waits a step", note=most)


class Counting(pl.Callback):
    """Counts in the second epoch, its begin and end included."""

    def __init__(self) -> None:
        self.waits = Waits()

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.waits.begin()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 1:
            self.waits.end()


def measure(rows: Rows, scale: Scale, _: Any) -> None:
    steps = scale.pass_batches
    graph = made_graph(scale, steps)
    for place, loading in best_places().items():
        with rows.guarded(f"a plain loop, {place}"):
            data, waits = data_of(graph, scale, loading), Waits()
            loader, training = attached(data), Training(Net(scale))
            for counted in (Waits(), waits):  # the first pass compiles, copies and allocates
                counted.begin()
                for batch in loader:
                    training.step(batch)
                counted.end()
            waits.tell(rows, f"a plain loop, {place}", steps)
            data.teardown("fit")
        for name, strategy in STRATEGIES.items():
            with rows.guarded(f"{name}, {place}"):
                counting = Counting()
                trainer = trainer_on(strategy=strategy(steps), max_epochs=2, callbacks=[counting])
                trainer.fit(Module(scale), data_of(graph, scale, loading))
                counting.waits.tell(rows, f"{name}, {place}", steps)
