"""What a newcomer does, with the documentation alone, and how long each step takes.

    python benchmarks/newcomer.py FOLDER [--constraint constraints.txt]

From an empty virtual environment to a model trained on two hosts, its predictions and its report. The hosts are two
network namespaces of this machine, which needs Linux and root; without them the run has one host, and says so. The
configuration is the one in the documentation, word for word; its module is that of examples/node_classification.py.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# A graph as it is found: a table of edges and one of nodes.
TABLES = """
import numpy, torch
from lightning_gnn_dist import communities
graph = communities(20000, 8)
receiver = torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())
edges = torch.stack([graph.indices.long(), receiver], 1).numpy()
numpy.savetxt("edges.csv", edges, "%d", ",", header="source,target", comments="")
x, y = (graph.node_arrays[name].numpy() for name in ("x", "y"))
names = ",".join(["id", "label", *(f"f{column}" for column in range(x.shape[1]))])
rows = numpy.column_stack([numpy.arange(len(y)), y, x])
numpy.savetxt("nodes.csv", rows, ["%d", "%d"] + ["%.5f"] * x.shape[1], ",", header=names, comments="")
"""
TWO_HOSTS = ["-m", "lightning_gnn_dist", "fit", "--config", "my.yaml", "--trainer.num_nodes=2", "--trainer.devices=1"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="is made, and must not be there")
    parser.add_argument("--constraint", type=Path, default=ROOT / "constraints.txt")
    parser.add_argument("--passes", type=int, default=8)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    newcomer = Newcomer(options.folder.resolve())
    newcomer.install(options.constraint.resolve())
    newcomer.prepare()
    newcomer.train(options.passes)
    newcomer.use()
    print(f"{'in all':<44} {sum(newcomer.seconds):7.1f} s")


class Newcomer:
    """Does one thing after the other in a folder, and reads the clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seconds = folder, list[float]()
        self._bin = folder / "env" / "bin"

    def install(self, constraint: Path) -> None:
        pip = [str(self._bin / "pip"), "install", "--quiet", "--constraint", str(constraint)]
        self._step("make a virtual environment", [sys.executable, "-m", "venv", "env"])
        self._step("pip install torch", [*pip, "torch"])
        self._step("pip install .", [*pip, str(ROOT)])

    def prepare(self) -> None:
        self._step("write the tables that a user has", [str(self._bin / "python"), "-c", TABLES])
        split = ["--undirected", "--split", "0.6", "0.2", "0.2"]
        self._command("prepare edges.csv my_graph --nodes nodes.csv", split)
        self._command("inspect my_graph --parts 2", [])
        (self.folder / "my.yaml").write_text(documented_configuration())
        shutil.copy(ROOT / "examples" / "node_classification.py", self.folder / "my_modules.py")

    def train(self, passes: int) -> None:
        more = [f"--trainer.max_epochs={passes}", "--trainer.enable_progress_bar=false"]
        if not may_make_hosts():
            print("Network namespaces need Linux and root: this run has one host instead of two.")
            self._command("fit --config my.yaml", ["--trainer.devices=2", *more])
            return
        hosts = [str(ROOT / "benchmarks" / "two_hosts.sh"), *TWO_HOSTS, *more]
        self._step(f"fit on two hosts, {passes} passes", hosts)

    def use(self) -> None:
        run = Path("lightning_logs", "version_0")
        (checkpoint,) = (self.folder / run / "checkpoints").glob("*.ckpt")
        trained = ["--ckpt_path", str(checkpoint), "--trainer.devices=2", "--trainer.enable_progress_bar=false"]
        self._command("test --config my.yaml", trained)
        self._command("predict --config my.yaml --output logits.npy", trained)
        assert (self.folder / "logits.npy").exists()

    def _command(self, words: str, more: Sequence[str]) -> None:
        command = [str(self._bin / "lightning-gnn-dist"), *words.split(), *more]
        self._step(f"lightning-gnn-dist {' '.join(words.split()[:2])}", command)

    def _step(self, name: str, command: Sequence[str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {"PYTHON": str(self._bin / "python"), "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        with (self.folder / "said.log").open("a") as said:
            done = subprocess.run(command, cwd=self.folder, env=environment, stdout=said, stderr=said, check=False)
        self.seconds.append(time.perf_counter() - start)
        if done.returncode:
            raise SystemExit(f"{name} failed with code {done.returncode}: see {said.name}")
        print(f"{name:<44} {self.seconds[-1]:7.1f} s", flush=True)


def documented_configuration() -> str:
    """The first YAML of the documentation that names a module of the reader's own."""
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL):
            if "my_modules.SAGE" in block:
                return str(block)
    raise SystemExit("The documentation has no configuration with my_modules.SAGE.")


def may_make_hosts() -> bool:
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    return made.returncode == 0


if __name__ == "__main__":
    main()
