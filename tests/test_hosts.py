"""Several hosts: the ways that docs/hosts.md names, tried as far as one machine goes."""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.distributed import run as distributed_run

from lightning_gnn_dist.cli.main import main
from lightning_gnn_dist.wire.addresses import held_port
from tests.python_server import fast_python

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
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable, **environment}
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def script(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.mark.slow
def test_the_batch_file_for_slurm_starts_every_rank(tmp_path: Path) -> None:
    script(tmp_path / "srun", SRUN)
    script(tmp_path / "lightning-gnn-dist", f'#!/bin/bash\nexec {fast_python()} -m lightning_gnn_dist "$@"\n')
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
    (tasks,) = re.findall(r"^#SBATCH --ntasks-per-node=(\d+)$", text, re.MULTILINE)
    assert '--trainer.devices="$SLURM_NTASKS_PER_NODE"' in text and '--trainer.num_nodes="$SLURM_NNODES"' in text
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "slurm.sbatch")], check=True)
    # And for a GPU for every task, where it is told to.
    assert re.findall(r"^##SBATCH --gpus-per-node=(\d+)", text, re.MULTILINE) == [tasks]
    assert not re.search(r"^#+SBATCH --(?:gpus-per-task|gpu-bind)", text, re.MULTILINE)
    assert re.search(r"^# export .*NCCL_SOCKET_IFNAME=", text, re.MULTILINE)
    options = [line.partition(" # ")[0] for line in text.splitlines() if "SBATCH" in line]
    on_gpus = [line.removeprefix("#") if line.startswith("##") else line for line in options]
    assert all(re.fullmatch(r"#SBATCH --[a-z-]+=\S+", line) for line in on_gpus)


def namespaces() -> bool:
    """Whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    made = subprocess.run(["ip", "netns", "add", f"probe{os.getpid()}"], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", f"probe{os.getpid()}"], capture_output=True, check=False)
    return made.returncode == 0


WIDE = 1024  # features, so that the model has 0.5 MB
STRATEGIES = {
    "local_sgd": ["--trainer.strategy.init_args.clock.init_args.steps=1", "--trainer.max_epochs=24"],
    "llcg": ["--trainer.strategy.init_args.clock.init_args.steps=1", "--trainer.max_epochs=12"],
    "tma": ["--trainer.strategy.init_args.clock.init_args.seconds=0.05", "--trainer.max_epochs=24"],
    "grappa": ["--trainer.max_epochs=11"],
}


def fit_each(folder: str) -> None:
    """In a rank of each host, one fit after the other, with the bytes that this host has sent before and after."""
    warnings.simplefilter("ignore")
    wide = [f"--model.init_args.num_features={WIDE}", f"--data.graph.init_args.num_features={WIDE}"]
    quiet = [f"--trainer.{name}=false" for name in ("enable_progress_bar", "enable_checkpointing")]
    quiet += ["--trainer.limit_val_batches=0", "--data.batch_size=64"]
    where = ["--trainer.num_nodes=2", "--trainer.devices=1", f"--trainer.logger.init_args.save_dir={folder}"]
    bytes_sent = [0]
    for name, options in STRATEGIES.items():
        small = [f"--config=configs/{name}.yaml", "--data.graph.init_args.num_nodes=2000"]
        sys.argv = ["lightning-gnn-dist", "fit", *small, *wide, *where, *quiet, *options]
        main()
        bytes_sent.append(int(Path("/sys/class/net/cable/statistics/tx_bytes").read_text()))
    Path(folder, f"host-{os.environ['GROUP_RANK']}.json").write_text(json.dumps(bytes_sent))


@pytest.mark.slow
def test_the_bytes_that_are_counted_are_those_on_the_wire(tmp_path: Path) -> None:
    if not namespaces():
        pytest.skip("needs root, to make network namespaces")
    run([str(ROOT / "benchmarks" / "two_hosts.sh"), "-m", "tests.test_hosts", str(tmp_path)])
    of_model = 4 * (2 * WIDE * 64 + 64 + 2 * 64 * 8 + 8)
    for name, (before, after) in zip(
        STRATEGIES, pairwise(json.loads((tmp_path / "host-0.json").read_text())), strict=True
    ):
        rows = csv.DictReader((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines())
        counted = max(float(row["comm/bytes_sent"] or 0) for row in rows)
        assert counted > 20 * of_model, name
        # The constant: rendezvous, the logs' directory, and DDP's own first broadcast.
        assert counted < after - before < 1.02 * counted + of_model + 200_000, name


def stub(folder: Path, name: str, text: str) -> str:
    """A PATH on which a command is another."""
    script(folder / name, text)
    return f"{folder}:{os.environ['PATH']}"


TORCHRUN = f'#!/bin/bash\nexec {sys.executable} -m torch.distributed.run "$@"\n'
TAKE_DOWN = '#!/bin/bash\nprintf \'%s\\0\' "$@" > "$0.$NODE"\n'
# Of a host that is this one. The host comes after "--", or it could be an option.
SSH = '#!/bin/bash\n[[ $1 == -- ]] || exit 9\nexport NODE=$2\nshift 2\nexec bash -c "$*"\n'


def check_accepted(taken: Path, node: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's parser takes what the host was given, and the command's takes the rest."""
    given = distributed_run.parse_args(taken.read_text().split("\0")[:-1])
    assert (given.nnodes, given.node_rank, given.master_port) == ("2", node, 29500)
    assert given.module and given.training_script == "lightning_gnn_dist"
    ranks = f"--trainer.devices={given.nproc_per_node}"
    assert ranks in given.training_script_args and "--trainer.num_nodes=2" in given.training_script_args
    monkeypatch.chdir(ROOT / "examples")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setattr(sys, "argv", ["lightning-gnn-dist", *given.training_script_args, "--print_config"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    service, job = yaml.safe_load_all((ROOT / "examples" / "kubernetes.yaml").read_text())
    return service, job


def pod(job: dict[str, Any], index: int, **environment: str) -> tuple[list[str], dict[str, str]]:
    """The command of a pod, and its environment."""
    (container,) = job["spec"]["template"]["spec"]["containers"]
    own = {entry["name"]: entry["value"] for entry in container["env"]}
    return [*container["command"], *container["args"]], own | {"JOB_COMPLETION_INDEX": str(index)} | environment


def test_the_pods_find_each_other_and_are_as_many_as_the_run_expects() -> None:
    service, job = kubernetes()
    spec, template = job["spec"], job["spec"]["template"]["spec"]
    _, environment = pod(job, 0)
    assert spec["completionMode"] == "Indexed"
    assert str(spec["completions"]) == str(spec["parallelism"]) == environment["NUM_HOSTS"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["selector"] == {
        "job-name": job["metadata"]["name"]
    }
    assert template["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert template["terminationGracePeriodSeconds"] > int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
    (container,) = template["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in template["volumes"]]


@pytest.mark.parametrize("resumed", [False, True])
def test_the_command_of_a_pod_is_accepted(resumed, tmp_path, monkeypatch, capsys) -> None:
    _, job = kubernetes()
    if resumed:
        (tmp_path / "preempted.ckpt").touch()
    path = stub(tmp_path, "torchrun", TAKE_DOWN)
    command, environment = pod(job, 1, CONFIG="configs/local_sgd.yaml", RUN=str(tmp_path), NODE="1", PATH=path)
    run(command, **environment)
    check_accepted(tmp_path / "torchrun.1", 1, monkeypatch)
    printed = yaml.safe_load(capsys.readouterr().out)
    (saver,) = printed["trainer"]["callbacks"]
    kind = "lightning_gnn_dist.callbacks.preemption.PreemptionCheckpoint"
    assert saver == {"class_path": kind, "init_args": {"dirpath": str(tmp_path)}}
    assert printed["ckpt_path"] == (f"{tmp_path}/preempted.ckpt" if resumed else None)


def test_hosts_that_ssh_reaches_are_given_commands_that_are_accepted(tmp_path, monkeypatch, capsys) -> None:
    stub(tmp_path, "torchrun", TAKE_DOWN)
    path = stub(tmp_path, "ssh", SSH)
    difficult = ["--config=configs/local_sgd.yaml", "--trainer.logger.init_args.save_dir=a place with 'quotes'"]
    run([str(ROOT / "examples" / "ssh.sh"), "one two", *difficult], PATH=path)
    for node, host in enumerate(["one", "two"]):
        check_accepted(tmp_path / f"torchrun.{host}", node, monkeypatch)
        printed = yaml.safe_load(capsys.readouterr().out)
        assert printed["trainer"]["logger"]["init_args"]["save_dir"] == "a place with 'quotes'"


@pytest.mark.slow
def test_hosts_that_ssh_reaches_train_and_stop_together(tmp_path: Path) -> None:
    stub(tmp_path, "torchrun", TORCHRUN)
    environment = os.environ | {"PATH": stub(tmp_path, "ssh", SSH), "PYTHONPATH": str(ROOT), "RANKS_PER_HOST": "1"}
    command = [str(ROOT / "examples" / "ssh.sh"), "localhost localhost", *SMALL, "--trainer.max_epochs=100000"]
    command.append(f"--trainer.logger.init_args.save_dir={tmp_path}")
    with (tmp_path / "said").open("w") as said, held_port() as port:
        environment["MASTER_PORT"] = str(port)
        process = subprocess.Popen(command, cwd=ROOT / "examples", env=environment, stdout=said, stderr=said)
        try:
            end = time.monotonic() + 300
            while not list(tmp_path.rglob("epoch=*.ckpt")):
                assert process.poll() is None and time.monotonic() < end, (tmp_path / "said").read_text()
                time.sleep(0.2)
        finally:
            process.terminate()
            code = process.wait(timeout=240)
    assert code == 1  # torchrun's, of a run that was stopped
    assert len(list(tmp_path.rglob("preempted.ckpt"))) == 1
    assert "Starting with 2 processes" in (tmp_path / "said").read_text()


if __name__ == "__main__":
    fit_each(sys.argv[1])
