"""Logs how long training waits for data, under strategies that do not log it themselves."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_gnn_dist.joint import HasFigures


class DataFigures(Callback):
    """Logs the data module's figures after every epoch: ``data/waited_share``, ``data/waited_seconds``, ...

    The strategies of this package log them by themselves. Ranks measure separately; the figures of rank 0 are logged.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, HasFigures):
            raise TypeError(f"DataFigures logs what a PartitionedDataModule measures, and the fit has {data!r}.")
        pl_module.log_dict(data.figures, sync_dist=True, rank_zero_only=True)
