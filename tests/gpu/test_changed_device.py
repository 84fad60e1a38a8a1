"""A fit that is stopped on one kind of device and goes on on another ends as one that never left its CPUs.

The runs are those of `tests/golden/stops.py`: every strategy, with moments, outer and correction optimizers, drifts,
learned rows, histories, types, links and shards.
"""

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gnn_dist import GrappaStrategy, PartitionedDataModule
from tests.data_fitting import small_graph, trainer
from tests.every_strategy import PATIENCE, every_strategy
from tests.golden.device import computing
from tests.golden.runs import Job, jobs
from tests.gpu.test_every_run import differences, name_of
from tests.gpu.test_every_run import shared as shared
from tests.gpu.test_precisions import LR, Seen
from tests.ranks import run_ranks
from tests.sage import SAGE

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader`:UserWarning")]
CHANGES = [("gpu", "cpu"), ("cpu", "gpu")]
FEW = (
    "local_sgd_outer_8",
    "llcg_persistent",
    "tma",
    "grappa_8",
    "local_sgd/history",
    "grappa/exchange",
    "grappa/1_rank",
)
FEW += ("local_sgd/owned", "llcg/sparse", "llcg/typed_owned", "grappa/typed", "grappa/shards", "grappa/mid_epoch")
SOME = jobs(lambda name: name.removeprefix("resumed/") in FEW)
MORE = jobs(lambda name: name.startswith("resumed/") and name.removeprefix("resumed/") not in FEW)


@pytest.mark.parametrize("job", [*SOME, *(pytest.param(job, marks=pytest.mark.slow) for job in MORE)], ids=name_of)
def test_a_fit_goes_on_on_another_device(job: Job, shared: Path, tmp_path: Path) -> None:
    if job.num_ranks > torch.cuda.device_count():
        pytest.skip(f"fewer than {job.num_ranks} CUDA devices")
    with computing(precision="64-true", dropout="0"):  # each device draws its own
        half_done("first", "cpu", job, shared, tmp_path / "stopped on cpu")
        half_done("second", "cpu", job, shared, tmp_path / "never changed")
        half_done("second", "gpu", job, shared, tmp_path / "to gpu")
        half_done("first", "gpu", job, shared, tmp_path / "stopped on gpu")
        half_done("second", "cpu", job, shared, tmp_path / "to cpu")
    shutil.rmtree(shared / "own")
    paths = sorted((tmp_path / "never changed").iterdir())
    assert len(paths) == len(job.names) * job.num_ranks
    for changed in ("to gpu", "to cpu"):
        far = list(chain.from_iterable(differences(path, tmp_path / changed / path.name) for path in paths))
        assert not far, f"{changed}: " + "\n".join(far)


def half_done(half: str, accelerator: str, job: Job, shared: Path, keep: Path) -> None:
    """Do one half of runs that are stopped, in processes of its own; the first leaves the checkpoint for the second."""
    with computing(accelerator=accelerator, half=half):
        found = job.done(shared, keep)
    raised = {name: text for name, shown in found.items() for key, text in shown.items() if "raised" in key}
    assert not raised, f"{half} half on {accelerator}: " + "\n".join(raised.values())


class Scheduled(Seen):
    """Halves its learning rate after each epoch, or round."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=LR)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


PRECISIONS = {"gpu": "16-mixed", "cpu": "bf16-mixed"}  # a CPU has no 16-mixed, and so no scale of gradients


def rate_after(rank: int, world_size: int, name: str, accelerator: str, path: Path) -> float:
    """Fit two epochs, or go on up to the fourth; return the learning rate at the end."""
    data, resumes = PartitionedDataModule(small_graph(), batch_size=16), path.exists()
    where: dict[str, Any] = {"accelerator": accelerator, "precision": PRECISIONS[accelerator], "limit_val_batches": 0}
    run = trainer(world_size, every_strategy()[name](), max_epochs=4 if resumes else 2, **where)
    run.fit(Scheduled(), data, ckpt_path=path if resumes else None)
    run.save_checkpoint(path)
    rate: float = run.optimizers[0].param_groups[0]["lr"]
    return rate


@pytest.mark.parametrize(("first", "second"), CHANGES)
@pytest.mark.parametrize("name", every_strategy())
def test_a_schedule_goes_on_with_or_without_a_scale(name: str, first: str, second: str, tmp_path: Path) -> None:
    for accelerator, epochs in ((first, 2), (second, 4)):
        (rate,) = run_ranks(rate_after, 1, name, accelerator, tmp_path / "stopped.ckpt")
        assert rate == LR * 0.5**epochs


def one_after_the_other(rank: int, world_size: int) -> str:
    for accelerator in ("gpu", "cpu"):
        data = PartitionedDataModule(small_graph(), batch_size=64)
        run = trainer(
            world_size, GrappaStrategy(**PATIENCE), accelerator=accelerator, max_epochs=1, limit_val_batches=0
        )
        try:
            run.fit(SAGE(12, 4), data)
        except RuntimeError as error:
            return f"{accelerator}: {error}"
    return ""


def test_a_fit_on_a_cpu_is_refused_in_a_process_of_a_fit_on_a_gpu() -> None:
    (said,) = run_ranks(one_after_the_other, 1)
    assert said.startswith("cpu: This process is in a group (nccl) of an earlier fit on GPUs")
    assert said.endswith("run it in another process.")
