"""Numbers of a round are logged as ``log_dict`` logs them."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gnn_dist.rounds.lightning_internals import log_numbers


class Numbers(pl.LightningModule):
    """Logs a number of its own kind in each of two hooks, twice in an epoch, and a new name in the second epoch."""

    def __init__(self, faster: bool) -> None:
        super().__init__()
        self.weight, self.faster, self.heard = nn.Parameter(torch.ones(1)), faster, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.weight * batch).sum()

    def _log(self, **numbers: float) -> None:
        if self.faster:
            log_numbers(self, numbers)
        else:
            self.log_dict(numbers, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True)

    def on_train_start(self) -> None:
        self._log()  # nothing, when nothing is known

    def on_train_batch_end(self, outputs: Any, batch: Tensor, batch_idx: int) -> None:
        step = self.global_step
        self._log(**{"round/a": step / 3, "round/b": 1e9 + step}, **({"late": 2.0 * step} if step > 3 else {}))

    def on_train_epoch_end(self) -> None:
        self._log(whole=self.current_epoch + 0.5, other=-1.0)
        self.heard.append(dict(self.trainer.callback_metrics))

    def on_train_epoch_start(self) -> None:
        self.heard.append({name: float(value) for name, value in self.trainer.logged_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Overheard(Numbers):
    """A user's module with a ``log`` of its own."""

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        self.heard.append((name, value))
        super().log(name, value, **options)


def heard(module: Numbers) -> tuple[list[Any], dict[str, Tensor]]:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", max_epochs=3, enable_checkpointing=False, **quiet)
    trainer.fit(module, DataLoader([torch.ones(1)] * 2, batch_size=None))
    return module.heard, dict(trainer.callback_metrics)


@pytest.mark.parametrize("kind", [Numbers, Overheard])
def test_means_of_each_epoch_are_those_of_log_dict(kind: type[Numbers]) -> None:
    (faster, ended), (expected, as_expected) = heard(kind(True)), heard(kind(False))
    assert faster == expected
    assert ended == as_expected
    assert ended["round/a"] == pytest.approx((5 / 3 + 6 / 3) / 2)
    assert ended["late"] == 11 and ended["whole"] == 2.5


def test_a_name_is_logged_the_long_way_once(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    log = pl.LightningModule.log

    def counted(module: pl.LightningModule, name: str, *args: Any, **options: Any) -> None:
        logged.append(name)
        log(module, name, *args, **options)

    monkeypatch.setattr(pl.LightningModule, "log", counted)
    heard(Numbers(True))
    assert logged and max(map(logged.count, logged)) == 1


def test_what_is_kept_of_a_name_is_what_log_dict_keeps() -> None:
    kept = []
    for faster in (True, False):
        module = Numbers(faster)
        heard(module)
        metas = {key: metric.meta for key, metric in module.trainer.fit_loop.epoch_loop._results.items()}
        syncs = {key: (meta.sync.should, meta.sync.rank_zero_only, meta.sync.op) for key, meta in metas.items()}
        kept.append({key: vars(meta) | {"_sync": syncs[key]} for key, meta in metas.items()})
    assert kept[0] == kept[1] and len(kept[0]) == 5
