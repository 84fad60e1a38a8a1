"""A small fit with a table, of which each rank touches other rows, and the same by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn_dist import LazyAdam, OwnedEmbedding

NUM_ROWS, WIDTH = 12, 3
# Rows that each rank touches. Ranks 0 and 1 share some; rank 2 has none, and nobody has row 11.
ROWS_OF = [range(6), range(4, 11), range(0)]
SIZES = [5, 3, 4]  # seeds of a batch

Made = dict[str, Tensor]


class Table(pl.LightningModule):
    """Regression on rows and on numbers."""

    def __init__(self, optimizer: str = "LazyAdam", *, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rows = nn.Embedding(NUM_ROWS, WIDTH, sparse=sparse)
        self.head = nn.Linear(WIDTH, 1)
        self.optimizer = optimizer
        self.double()

    def training_step(self, batch: Data) -> Tensor:
        return (self.head(batch.x + self.rows(batch.ids).sum(1)).tanh() - batch.y).square().mean()

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.optimizer, self.parameters())


def optimizer_of(name: str, parameters: Any) -> Any:
    make: dict[str, Callable[[Any], Any]] = {
        "LazyAdam": lambda parameters: LazyAdam(parameters, lr=0.05),
        "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.2),
    }
    return make[name](parameters)


def owned(module: Any, name: str = "rows") -> Any:
    """The model with a table whose rows live with one rank each, and begin as they are."""
    plain = getattr(module, name)
    table = OwnedEmbedding(*plain.weight.shape).to(plain.weight.dtype)
    table.load_state_dict(plain.state_dict())
    setattr(module, name, table)
    return module


def batches_of(rank: int, count: int) -> list[Data]:
    """The same for every call; others for every rank."""
    generator = torch.Generator().manual_seed(50 + rank)
    rows, size = ROWS_OF[rank], SIZES[rank]
    made = []
    for _ in range(count):
        numbers = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
        ids = torch.empty(size, 0, dtype=torch.int64)
        if len(rows):
            ids = torch.randint(rows.start, rows.stop, (size, 2), generator=generator)
        targets = torch.randn(size, 1, generator=generator, dtype=torch.float64)
        made.append(Data(x=numbers, ids=ids, y=targets, batch_size=size))
    return made


def loader_of(rank: int, count: int) -> DataLoader[Any]:
    return DataLoader(batches_of(rank, count), batch_size=None)  # type: ignore[arg-type]


def rows_by_hand(tensors: Sequence[Tensor], steps: Tensor, weights: Sequence[float]) -> Tensor:
    """The mean of each row by the steps (P, N) that have touched it. A row that nobody has touched is everybody's."""
    mean = tensors[0].clone()
    for row in range(len(mean)):
        shares = [weight * float(own) for weight, own in zip(weights, steps[:, row], strict=True)]
        if sum(shares):
            mean[row] = sum(share * each[row] for share, each in zip(shares, tensors, strict=True)) / sum(shares)
    return mean


def state_of(module: nn.Module) -> Made:
    return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
