"""A rank of four holds a quarter of a table and of its moments."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch_geometric.data import Data

from lightning_gnn_dist import GrappaStrategy, LazyAdam, OwnedEmbedding
from tests.every_strategy import PATIENCE
from tests.memory import Peak, give_back_at_once, reads_memory
from tests.ranks import run_ranks
from tests.strategies.fitting import fit

NUM_ROWS, WIDTH, RANKS, TENSORS = 1_000_000, 64, 4, 3  # the table and two moments

pytestmark = [pytest.mark.slow, pytest.mark.alone, reads_memory]


class Large(pl.LightningModule):
    """Regression on rows of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = OwnedEmbedding(NUM_ROWS, WIDTH, seed=0)
        self.head = nn.Linear(WIDTH, 1)

    def training_step(self, batch: Any) -> Tensor:
        return (self.head(self.rows(batch.ids)) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        return LazyAdam(self.parameters(), lr=0.01)


def batches(rank: int) -> list[Data]:
    chance = torch.Generator().manual_seed(rank)
    return [Data(ids=torch.randint(NUM_ROWS, (1000,), generator=chance), batch_size=1000) for _ in range(5)]


def peaks(rank: int, world_size: int, path: str) -> list[int]:
    give_back_at_once()
    found = []
    for epochs, ckpt_path in ((1, None), (2, path)):
        loader: Any = DataLoader(batches(rank), batch_size=None)  # type: ignore[arg-type]
        options: dict[str, Any] = {"train": loader, "max_epochs": epochs, "ckpt_path": ckpt_path}
        with Peak("RssAnon") as peak:
            fitted = fit(rank, GrappaStrategy(**PATIENCE), Large(), devices=world_size, **options)
        found.append(peak.added_bytes)
        if ckpt_path is None:
            with Peak("RssAnon") as peak:
                fitted.save_checkpoint(path)
            found.append(peak.added_bytes)
    return found


def test_a_rank_holds_its_rows_alone(tmp_path: Any) -> None:
    whole = NUM_ROWS * WIDTH * 4
    most = TENSORS * whole / RANKS + (100 << 20)
    assert most < 1.2 * whole  # less than what a table with its moments takes, by far
    first, *others = run_ranks(peaks, RANKS, str(tmp_path / "large.ckpt"), timeout=300)
    for in_fit, in_save, resumed in others:
        assert in_fit < most
        assert in_save < 50 << 20
        assert resumed < most
    assert first[0] < most
    assert TENSORS * whole < first[1] < 2 * TENSORS * whole + (100 << 20)  # Lightning writes a copy in memory
    assert first[2] < most
