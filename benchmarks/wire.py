"""The bytes that strategies count, against the counter of the network interface, on two hosts.

    sudo python benchmarks/wire.py      # two network namespaces joined by a cable (Linux, root)

Every strategy trains with one rank on each host and with two. It trains twice, the second
time for three times as many rounds (or, for TMA, seconds): the table compares what the longer run sent more. So what
belongs to the start alone is left out: rendezvous, and the first broadcast of the weights.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NUM_FEATURES = 1024  # so that a model has 0.53 MB
STEPS = "--trainer.strategy.init_args.clock.init_args.steps=1"
SECONDS = "--trainer.strategy.init_args.clock.init_args.seconds=0.05"
COUNTED = "comm/bytes_between_hosts"  # one rank on each host sends all that it sends there
STRATEGIES = {"local_sgd": (40, [STEPS]), "llcg": (10, [STEPS]), "tma": (40, [SECONDS]), "grappa": (15, [])}


def main() -> None:
    print("| strategy | ranks on each host | counted, MB | interface, MB | interface beyond |")
    print("|---|---|---|---|---|")
    for name, (rounds, more) in STRATEGIES.items():
        for devices in (1, 2):
            lengths = ([*more, f"--trainer.max_epochs={count}"] for count in (rounds, 3 * rounds))
            short, long = (train(name, devices, options) for options in lengths)
            counted, sent = (after - before for before, after in zip(short, long, strict=True))
            figures = f"{counted / 1e6:.2f} | {sent / 1e6:.2f} | {sent / counted - 1:+.2%}"
            print(f"| {name} | {devices} | {figures} |", flush=True)


def train(name: str, devices: int, more: list[str]) -> tuple[float, int]:
    """What rank 0, which sends for its host, counted, and what the host's interface sent."""
    with tempfile.TemporaryDirectory() as folder:
        options = [
            f"--config=configs/{name}.yaml",
            f"--model.init_args.num_features={NUM_FEATURES}",
            f"--data.graph.init_args.num_features={NUM_FEATURES}",
            "--data.graph.init_args.num_nodes=2000",
            f"--data.batch_size={64 // devices}",
            "--trainer.num_nodes=2",
            f"--trainer.devices={devices}",
            "--trainer.limit_val_batches=0",
            "--trainer.enable_progress_bar=false",
            f"--trainer.logger.init_args.save_dir={folder}",
        ]
        command = [str(ROOT / "benchmarks" / "two_hosts.sh"), "-m", "lightning_gnn_dist", "fit", *options, *more]
        environment = os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        environment["RANKS_PER_HOST"] = str(devices)
        done = subprocess.run(
            command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        (sent,) = re.findall(r"host 1 sent (\d+) bytes", done.stdout)
        with Path(folder, name, "version_0", "metrics.csv").open() as file:
            counted = [row.get(COUNTED) or row["comm/bytes_sent"] for row in csv.DictReader(file)]
        return float([each for each in counted if each][-1]), int(sent)


if __name__ == "__main__":
    main()
