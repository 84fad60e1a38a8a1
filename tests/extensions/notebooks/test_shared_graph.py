"""Ranks of one host have one copy of the graph between them: of a saved one, and of one that travels by value."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.memory import reads_memory

RANKS, MEGABYTES = 4, 64
SCRIPT = """
import sys, torch, lightning.pytorch as pl
from pathlib import Path
from lightning_gnn_dist import EverySteps, Graph, LocalSGDStrategy, PartitionedDataModule, RandomPartitioner
from lightning_gnn_dist.rounds.launching.launch import Launch

START, PLACE, MEGABYTES = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def made():
    nodes = MEGABYTES << 12  # 256 bytes of features each
    torch.manual_seed(0)
    mask = torch.arange(nodes) % 1000 == 0
    arrays = {"x": torch.rand(nodes, 64), "y": torch.zeros(nodes, dtype=torch.int64), "train_mask": mask}
    return Graph(torch.arange(nodes + 1), torch.arange(nodes, dtype=torch.int32), arrays)

def pss(address):
    # Of the map that an address lies in, and of the whole process, in bytes.
    maps, found, total = Path("/proc/self/smaps").read_text().splitlines(), False, 0
    for line in maps:
        if "-" in line.split()[0]:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            found = begin <= address < end
        elif found and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total, int(Path("/proc/self/smaps_rollup").read_text().split("Pss:")[1].split()[0]) << 10

class Looks(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 2)

    def training_step(self, batch, index):
        x = self.trainer.datamodule.graph.node_arrays["x"]
        x.sum()  # every page is in memory
        self.trainer.strategy.barrier()
        of_map, of_all = pss(x.data_ptr())
        (PLACE / f"rank_{self.global_rank}.txt").write_text(f"{of_map / x.nbytes} {of_all / x.nbytes}")
        self.trainer.strategy.barrier()
        return self.linear(batch.x)[: batch.batch_size].square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    saved = PLACE / "graph"
    strategy = LocalSGDStrategy(EverySteps(1), launch=Launch(start_method=START))
    trainer = pl.Trainer(accelerator="cpu", devices=4, strategy=strategy, max_epochs=1, logger=False,
                         enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    data = PartitionedDataModule(Graph.open(saved) if saved.exists() else made(), partitioner=RandomPartitioner())
    trainer.fit(Looks(), data)
"""
SAVE = "from script import made, PLACE; made().save(PLACE / 'graph')"


def copies(start: str, folder: Path, *, is_saved: bool, megabytes: int = MEGABYTES) -> tuple[float, float]:
    """The copies of the features that ranks hold between them, and their whole memory, in parts of the features."""
    (folder / "script.py").write_text(SCRIPT)
    variables = {name: value for name, value in os.environ.items() if name != "LOCAL_RANK"}
    arguments = [start, str(folder), str(megabytes)]
    for command in [["-c", SAVE]] * is_saved + [["script.py"]]:
        run = [sys.executable, *command, *arguments]
        ran = subprocess.run(run, env=variables, cwd=folder, capture_output=True, text=True, timeout=500)
        assert ran.returncode == 0, ran.stderr
    found = [(folder / f"rank_{rank}.txt").read_text().split() for rank in range(RANKS)]
    of_map, of_all = (sum(map(float, each)) for each in zip(*found, strict=True))
    return of_map, of_all


@pytest.mark.slow
@reads_memory
@pytest.mark.parametrize(
    ("start", "is_saved"), [("popen", True), ("forkserver", False), ("fork", False)], ids=["saved", "by value", "fork"]
)
def test_ranks_hold_one_copy(start: str, is_saved: bool, tmp_path: Path) -> None:
    of_map, _ = copies(start, tmp_path, is_saved=is_saved)
    assert 0.2 < of_map < 2  # a map of memory may hold more beside the features; four copies would be 4
