"""Several hosts: the ways the README names, tried as far as one machine goes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gnn_dist.record import RunRecord

ROOT = Path(__file__).parents[1]
SMALL = [
    "--config=configs/local_sgd.yaml",
    "--trainer.max_epochs=2",
    "--data.graph.init_args.num_nodes=2000",
    "--trainer.enable_progress_bar=false",
]
# What srun does with a task for every rank, all of them on this host.
SRUN = """#!/bin/bash
for task in $(seq 0 $((SLURM_NTASKS - 1))); do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 "$@" &
done
wait -n && wait -n
"""


def run(command: list[str], **environment: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_the_batch_file_for_slurm_starts_every_rank(tmp_path: Path) -> None:
    script(tmp_path / "srun", SRUN)
    script(tmp_path / "lightning-gnn-dist", f'#!/bin/bash\nexec {sys.executable} -m lightning_gnn_dist "$@"\n')
    job = {"JOB_ID": "4242", "JOB_NAME": "gnn", "NTASKS": "2", "NNODES": "1", "NTASKS_PER_NODE": "2"}
    job["NODELIST"] = "localhost"
    said = run(
        ["bash", str(ROOT / "examples" / "slurm.sbatch"), *SMALL, f"--trainer.logger.init_args.save_dir={tmp_path}"],
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        **{f"SLURM_{name}": value for name, value in job.items()},
    )
    assert "All distributed processes registered. Starting with 2 processes" in said
    assert list(tmp_path.rglob("metrics.csv"))


def test_the_batch_file_asks_for_as_many_tasks_as_ranks() -> None:
    text = (ROOT / "examples" / "slurm.sbatch").read_text()
    assert re.search(r"^#SBATCH --ntasks-per-node=\d+$", text, re.MULTILINE)
    assert '--trainer.devices="$SLURM_NTASKS_PER_NODE"' in text and '--trainer.num_nodes="$SLURM_NNODES"' in text
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "slurm.sbatch")], check=True)


def namespaces() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", f"probe{os.getpid()}"], capture_output=True, check=False)
    return made.returncode == 0


@pytest.mark.slow
def test_two_hosts_train_together(tmp_path: Path) -> None:
    if not namespaces():
        pytest.skip("needs root, to make network namespaces")
    hosts = ["--trainer.num_nodes=2", "--trainer.devices=1", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    said = run([str(ROOT / "benchmarks" / "two_hosts.sh"), "-m", "lightning_gnn_dist", "fit", *SMALL, *hosts])
    assert "All distributed processes registered. Starting with 2 processes" in said
    (sent,) = re.findall(r"host 1 sent (\d+) bytes", said)
    assert int(sent) > 2 * 9_288 * 4  # two averages of the model


WIDE = 1024  # features, so that the model has 0.5 MB
STRATEGIES = {
    "local_sgd": ["--trainer.strategy.init_args.clock.init_args.steps=1", "--trainer.max_epochs=60"],
    "llcg": ["--trainer.strategy.init_args.clock.init_args.steps=1", "--trainer.max_epochs=15"],
    "grappa": ["--trainer.max_epochs=20"],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STRATEGIES)
def test_the_bytes_that_are_counted_are_those_on_the_wire(name: str, tmp_path: Path) -> None:
    if not namespaces():
        pytest.skip("needs root, to make network namespaces")
    wide = [f"--model.init_args.num_features={WIDE}", f"--data.graph.init_args.num_features={WIDE}"]
    where = ["--trainer.num_nodes=2", "--trainer.devices=1", f"--trainer.logger.init_args.save_dir={tmp_path}"]
    quiet = ["--trainer.limit_val_batches=0", "--trainer.enable_progress_bar=false"]
    small = [f"--config=configs/{name}.yaml", "--data.graph.init_args.num_nodes=2000", "--data.batch_size=64"]
    command = ["-m", "lightning_gnn_dist", "fit", *small, *wide, *where, *quiet, *STRATEGIES[name]]
    said = run([str(ROOT / "benchmarks" / "two_hosts.sh"), *command])
    (sent,) = re.findall(r"host 1 sent (\d+) bytes", said)
    counted = sum(row.bytes_sent or 0 for row in RunRecord.load(tmp_path / name / "version_0").ranks[0])
    model = 4 * (2 * WIDE * 64 + 64 + 2 * 64 * 8 + 8)
    assert counted > 20 * model
    # The constant: rendezvous, the logs' directory, and DDP's own first broadcast.
    assert counted < int(sent) < 1.02 * counted + model + 200_000
