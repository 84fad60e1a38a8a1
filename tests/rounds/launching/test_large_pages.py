"""Ranks that are started as fresh processes take torch's memory in pages of 2 MB, unless the environment says no."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.wire.launching.processes import LARGE_PAGES, variables_added

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SCRIPT = """
import sys, torch, lightning.pytorch as pl
from pathlib import Path
from lightning_gnn_dist import EverySteps, LocalSGDStrategy, PartitionedDataModule, RandomPartitioner, communities
from lightning_gnn_dist.rounds.launching.launch import Launch

class Looks(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(16, 3)

    def training_step(self, batch, index):
        block = torch.ones(1 << 24)
        found = Path("/proc/self/smaps_rollup").read_text().split("AnonHugePages:")[1].split()[0]
        Path(f"rank_{self.global_rank}.txt").write_text(str(int(found) > block.nbytes / 2048))
        return self.linear(batch.x)[: batch.batch_size].square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    strategy = LocalSGDStrategy(EverySteps(1), launch=Launch(start_method=sys.argv[1]))
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Looks(), PartitionedDataModule(communities(300, 3, num_features=16), partitioner=RandomPartitioner()))
"""


@pytest.mark.parametrize("before", [None, "0"])
def test_the_starting_process_keeps_its_environment(before: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LARGE_PAGES, before or "")
    if before is None:
        monkeypatch.delenv(LARGE_PAGES)
    with variables_added({LARGE_PAGES: "1"}):
        assert os.environ[LARGE_PAGES] == ("1" if before is None else before)
    assert os.environ.get(LARGE_PAGES) == before


@pytest.mark.slow
@pytest.mark.skipif(not THP.exists() or "[madvise]" not in THP.read_text(), reason="the system decides by itself")
@pytest.mark.parametrize(
    ("start", "word", "in_large_pages"),
    [("forkserver", None, {0, 1}), ("spawn", None, {0, 1}), ("popen", None, {1}), ("forkserver", "0", set())],
)
def test_ranks_are_in_large_pages(start: str, word: str | None, in_large_pages: set[int], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name not in (LARGE_PAGES, "LOCAL_RANK")}
    variables |= {} if word is None else {LARGE_PAGES: word}
    command = [sys.executable, str(tmp_path / "script.py"), start]
    ran = subprocess.run(command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    found = {rank: (tmp_path / f"rank_{rank}.txt").read_text() for rank in (0, 1)}
    assert found == {rank: str(rank in in_large_pages) for rank in (0, 1)}
