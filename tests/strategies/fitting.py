"""A small fit to hold laws against: one module with switches, and data that differ from rank to rank."""

import logging
from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gnn_dist import LocalSGDStrategy
from tests.data_fitting import trainer
from tests.every_strategy import PATIENCE

State = dict[str, Tensor]


class Net(pl.LightningModule):
    """Regression on random numbers. Records what it saw, for tests to look at."""

    def __init__(
        self, *, lr: float = 0.1, dropout: float = 0.0, batch_norm: bool = False, optimizer: str = "SGD"
    ) -> None:
        super().__init__()
        norm = nn.BatchNorm1d(8) if batch_norm else nn.Identity()
        self.layers = nn.Sequential(nn.Linear(4, 8), norm, nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 1))
        self.lr, self.optimizer_name = lr, optimizer
        self.validated: list[State] = []

    def training_step(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor]) -> None:
        self.log("val_loss", self.training_step(batch), sync_dist=True, batch_size=len(batch[0]))

    def on_validation_start(self) -> None:
        self.validated.append(state_of(self))

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer_name)(self.parameters(), lr=self.lr)


def state_of(module: nn.Module) -> State:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def batches(rank: int, count: int = 6, size: int = 5) -> DataLoader[Any]:
    """The same for every call; another for every rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    x, y = (torch.randn(count * size, width, generator=generator) for width in (4, 1))
    return DataLoader(TensorDataset(x, y), batch_size=size)


def fit(
    rank: int,
    strategy: Any,
    module: pl.LightningModule,
    *,
    devices: int,
    train: Iterable[Any] | None = None,
    validate: bool = False,
    ckpt_path: str | None = None,
    **trainer_options: Any,
) -> pl.Trainer:
    """``Trainer.fit`` without the noise."""
    running = trainer(devices, strategy, **({"max_epochs": 3, "use_distributed_sampler": False} | trainer_options))
    train = batches(rank) if train is None else train
    running.fit(module, train, batches(rank) if validate else None, ckpt_path=ckpt_path)
    return running


def hear() -> list[str]:
    """Where Lightning writes its lines to from now on."""
    logger, lines = logging.getLogger("lightning.pytorch.utilities.rank_zero"), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    return lines


def differs(left: State, right: State) -> float:
    """The largest difference of any entry."""
    assert left.keys() == right.keys()
    return max(float((left[name].double() - right[name].double()).abs().max()) for name in left)


def local_sgd(clock: Any = None, **options: Any) -> LocalSGDStrategy:
    return LocalSGDStrategy(clock, **PATIENCE, **options)


def same_start(**options: Any) -> Net:
    torch.manual_seed(0)
    return Net(**options)


def before_and_after(
    rank: int, world_size: int, kind: Any, clock: Any, train: Any = None, **options: Any
) -> tuple[State, State]:
    """The weights of a rank before its first meeting and after it."""
    before: list[State] = []

    class Watch(kind):  # type: ignore[misc]
        def end_round(self) -> None:
            before.append(state_of(self._module()))
            super().end_round()

    module = same_start()
    fit(rank, Watch(clock, **PATIENCE, **options), module, devices=world_size, train=train, max_epochs=1)
    return before[0], state_of(module)
