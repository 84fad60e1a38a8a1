"""Fits, tests, predictions and resumed fits on GPUs end as on CPUs: of all strategies, boundaries, samplers and homes.

They are the golden runs: each is done on a CPU and on the device, in float64, and every
value that it shows is compared. A weight whose gradient is rounding alone, such as a bias before a norm, is compared
with the largest of its array: Adam makes of such gradients steps of their own.
"""

import shutil
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.golden.device import computing
from tests.golden.fits import HOLDINGS
from tests.golden.runs import Job, jobs, prepare
from tests.gpu.needs import need_devices
from tests.ranks import run_ranks

CLOSE = 1e-6  # of the largest number of an array
LEAST = 1e-3  # below it numbers are compared as they are
TRAINED = ("fits/", "rows/", "resumed/", "evaluation/")
DRAWN = ("fits/llcg/sampler_", "fits/llcg/links_undirected", "fits/grappa/fetch/")
DRAWN_TOO = ("fits/llcg/links_labelled", "fits/llcg/links_events", "fits/llcg/links_typed", "fits/llcg/3_ranks")
OTHERS = """
/files /adagrad /sgd /little_memory /batches_of_17 /clipped /typed_labelled _paper /3_ranks
fits/local_sgd/halo fits/local_sgd/fetch fits/local_sgd/isolated fits/local_sgd/typed fits/tma/ /isolated
rows/sparse/tma rows/owned/tma rows/sparse/local_sgd/ rows/owned/local_sgd/ rows/sparse/llcg/ rows/sparse/grappa/
rows/sparse/local_sgd_drift rows/sparse/grappa_8 rows/owned/local_sgd_moments resumed/llcg/links_
resumed/grappa/links_typed resumed/tma resumed/local_sgd/owned resumed/grappa_8/owned resumed/llcg_persistent/owned
resumed/local_sgd_outer_8/owned resumed/llcg/rotate resumed/llcg/shards evaluation/links/ /estimate/ /limited
evaluation/typed/neighbor evaluation/plain/temporal/ram fits/llcg/links_typed fits/llcg/links_events
fits/llcg/links_labelled links_directed /links_undirected/sh grappa/links_typed/ grappa/links_labelled/
grappa/links_typed_events/ fits/local_sgd_growing fits/local_sgd_passes fits/local_sgd_drift_decay
fits/local_sgd_outer_16 fits/local_sgd_momentum fits/local_sgd_leave_out fits/local_sgd_outer_adam fits/tma_failed
fits/llcg_persistent fits/llcg_16_bits fits/llcg_32_bits fits/llcg_share fits/llcg_drift_of_ranks fits/grappa_16
fits/grappa_nodes fits/grappa_own_buffers fits/llcg/extra_of_graph fits/llcg/no_coverage fits/llcg/coverage_of_batches
fits/llcg/three_hops _ladies_weighted _temporal_edges halo_of_bytes exchange_16
exchange_share fits/llcg/typed/fetch fits/llcg/halo/ fits/grappa/typed/halo fits/grappa/halo/ fits/llcg/fetch/
ddp/exchange/shards
"""
ALIKE = [
    *OTHERS.split(),
    *(f"llcg/sampler_{name}" for name in ("neighbor_all", "neighbor_replaced", "fastgcn", "walk", "cluster")),
    *(f"fits/{strategy}/{holding}" for strategy in ("local_sgd", "grappa") for holding in HOLDINGS),
]


def is_alike(name: str) -> bool:
    """Whether other runs try what this one does on a device, so that it can be left to the slow tests."""
    return any(part in name for part in ALIKE)


PLACES = [("cpu", job) for job in jobs(lambda name: name.startswith(TRAINED) and not is_alike(name))]
PLACES += [("auto", job) for job in jobs(lambda name: name.startswith(DRAWN) and "/shards" not in name)]
MORE = [("cpu", job) for job in jobs(lambda name: name.startswith(TRAINED) and is_alike(name))]
MORE += [("auto", job) for job in jobs(lambda name: name.startswith(DRAWN_TOO) and "/shards" not in name)]
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("golden")
    run_ranks(prepare, 1, folder)
    return folder


def name_of(value: Any) -> str:
    return f"{value.names[0]}-and-{len(value.names) - 1}" if isinstance(value, Job) else f"sample_on-{value}"


@pytest.mark.parametrize(
    ("sample_on", "job"), [*PLACES, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)], ids=name_of
)
def test_a_device_computes_what_a_cpu_does(sample_on: str, job: Job, shared: Path, tmp_path: Path) -> None:
    need_devices(job.num_ranks)
    with computing(precision="64-true"):
        for place, options in (("cpu", {}), ("gpu", {"accelerator": "gpu", "sample_on": sample_on})):
            with computing(**options):
                do(job, shared, tmp_path / place)
            shutil.rmtree(shared / "own")  # what runs wrote, such as predictions, which may not be there before
    check_alike(job, tmp_path / "cpu", tmp_path / "gpu")


def do(job: Job, shared: Path, keep: Path) -> None:
    raised = [text for shown in job.done(shared, keep).values() for key, text in shown.items() if "raised" in key]
    assert not raised, f"{keep.name}: " + "\n".join(raised)


def check_alike(job: Job, ours: Path, theirs: Path) -> None:
    """All values that runs have kept in two folders are the same, or close."""
    paths = sorted(ours.iterdir())
    assert len(paths) == len(job.names) * job.num_ranks
    far = list(chain.from_iterable(differences(path, theirs / path.name) for path in paths))
    assert not far, f"{theirs.name}: " + "\n".join(far)


def differences(path: Path, other: Path) -> Iterator[str]:
    ours, theirs = (torch.load(each, weights_only=False) for each in (path, other))
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        assert len(values) == len(theirs[name]), name
        far = max((distance(*pair) for pair in zip(values, theirs[name], strict=True)), default=0.0)
        if far > CLOSE:
            yield f"{path.stem}: {name} differs by {far:.1e}"


def distance(ours: Any, theirs: Any) -> float:
    """How far two values are from each other, in parts of the larger; infinite where they are not alike."""
    if isinstance(ours, Path):
        return 0.0
    if not isinstance(ours, Tensor | float):
        return 0.0 if ours == theirs else float("inf")
    ours, theirs = torch.as_tensor(ours), torch.as_tensor(theirs).cpu()
    if not ours.is_floating_point() or ours.shape != theirs.shape:
        return 0.0 if ours.equal(theirs) else float("inf")
    size = float(ours.abs().amax()) if ours.numel() else 0.0
    return float((ours - theirs).abs().amax()) / max(size, LEAST) if ours.numel() else 0.0
