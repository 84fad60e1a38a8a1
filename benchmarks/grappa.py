"""What Grappa sends, by the network interface's own counter, and what a switch of parts costs.

    sudo python benchmarks/grappa.py wire      # two hosts: network namespaces joined by a cable (Linux, root)
    python benchmarks/grappa.py switch         # four ranks on this machine, parts that rotate every epoch

Both train a two-layer GraphSAGE (hidden 256, 128 features, 32 classes) on a graph of 1M nodes and 20M edges whose
degrees follow a power law, METIS parts, fan-out 15 and 10, batches of 1024. ``--num-nodes 50000 --num-edges 1000000``
is quick. The graph and its partition stay in ``--folder``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from sampling import power_law_communities
from torch import Tensor
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import (
    Coverage,
    Graph,
    GrappaStrategy,
    Holding,
    Isolated,
    Launch,
    NeighborSampler,
    PartitionedDataModule,
    Rotate,
)
from lightning_gnn_dist.wire.collectives import traffic

FEATURES, HIDDEN, CLASSES, BATCH = 128, 256, 32, 1024
HOSTS = {"gnn0": "10.77.0.1", "gnn1": "10.77.0.2"}
CABLE = "gnnwire"  # the name of either end, each in its own namespace


class SAGE(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.convs = torch.nn.ModuleList([SAGEConv(FEATURES, HIDDEN), SAGEConv(HIDDEN, CLASSES)])

    def training_step(self, batch: Any) -> Tensor:
        x = batch.x
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            x = conv((x, x[: block.num_dst]), block.adj)
            x = x.relu() if layer == 0 else x
        return functional.cross_entropy(x, batch.y[: batch.batch_size])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.003)


class Counters(pl.Callback):
    """Bytes that left the interface, bytes that the package counted and seconds, epoch by epoch."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self._at_start = (0.0, 0.0, 0.0)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._at_start = self._now()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        wire, ledger, seconds = (b - a for a, b in zip(self._at_start, self._now(), strict=True))
        self.epochs.append({"wire": wire, "ledger": ledger, "seconds": seconds})

    @staticmethod
    def _now() -> tuple[float, float, float]:
        counter = Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes")
        sent = float(counter.read_text()) if counter.exists() else 0.0
        return sent, traffic.bytes_sent, time.perf_counter()


def prepare(options: argparse.Namespace) -> Path:
    """The graph, saved once; the ranks read it from there."""
    path = Path(options.folder) / f"{options.num_nodes}-{options.num_edges}"
    if not path.exists():
        print(f"preparing {path}", flush=True)
        bare = power_law_communities(options.num_nodes, options.num_edges, CLASSES)
        generator = torch.Generator().manual_seed(0)
        arrays = {
            "x": torch.randn(options.num_nodes, FEATURES, generator=generator),
            "y": torch.randint(CLASSES, (options.num_nodes,), generator=generator),
            # 48 steps an epoch on two ranks with a million nodes.
            "train_mask": torch.rand(options.num_nodes, generator=generator) < 0.098,
        }
        Graph(bare.indptr, bare.indices, arrays).save(path)
    return path


def data_of(options: argparse.Namespace, **settings: Any) -> PartitionedDataModule:
    settings = {"sampler": NeighborSampler([15, 10]), "boundary": Isolated()} | settings
    return PartitionedDataModule(prepare(options), batch_size=BATCH, **settings)


def trainer_of(counters: Counters, **options: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(
        accelerator="cpu",
        callbacks=[counters],
        limit_val_batches=0,
        enable_checkpointing=False,
        **quiet,
        **options,
    )


# The wire.


def wire(options: argparse.Namespace) -> None:
    data_of(options).partition(2)  # in the cache before the hosts start
    out = Path(tempfile.mkdtemp()) / "epochs.json"
    with two_hosts():
        ranks = [host_process(options, rank, name, out) for rank, name in enumerate(HOSTS)]
        codes = [process.wait(timeout=options.timeout) for process in ranks]
    if any(codes):
        raise SystemExit(f"exit codes of the hosts: {codes}")
    epochs = json.loads(out.read_text())
    values = sum(parameter.numel() for parameter in SAGE().parameters())
    print(f"model: {values * 4 / 1e6:.3f} MB; an epoch on one host, {epochs[-1]['steps']} steps:")
    for number, epoch in enumerate(epochs):
        gradients = epoch["steps"] * 4 * values  # a ring of two sends each gradient once
        print(
            f"epoch {number}: gradients {gradients / 1e6:.2f} MB, counted {epoch['ledger'] / 1e6:.2f} MB, left the "
            f"interface {epoch['wire'] / 1e6:.2f} MB ({epoch['wire'] / gradients - 1:+.1%}), {epoch['seconds']:.1f} s"
        )
    fetched = remote_features(options)
    print(f"remote features that sampling the whole graph would fetch in an epoch, both hosts: {fetched / 1e6:.0f} MB")


@contextmanager
def two_hosts() -> Iterator[None]:
    """Two network namespaces with an address each, and a cable between them."""
    try:
        for name in HOSTS:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        first, second = HOSTS
        ip("link", "add", CABLE, "netns", first, "type", "veth", "peer", "name", CABLE, "netns", second)
        for name, address in HOSTS.items():
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
        yield
    finally:
        for name in HOSTS:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def host_process(options: argparse.Namespace, rank: int, name: str, out: Path) -> subprocess.Popen[bytes]:
    """What torchrun would start on this host."""
    place = {"MASTER_ADDR": HOSTS["gnn0"], "MASTER_PORT": "29411", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}
    place |= {"RANK": str(rank), "GROUP_RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "wire"}
    place |= {"GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
    command = ["ip", "netns", "exec", name, sys.executable, __file__, "host", *arguments_of(options), "--out", str(out)]
    return subprocess.Popen(command, env=os.environ | place)


def arguments_of(options: argparse.Namespace) -> list[str]:
    names = ("num_nodes", "num_edges", "folder", "epochs")
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(options, name)))]


def host(options: argparse.Namespace) -> None:
    """One of the two ranks."""
    counters = Counters()
    trainer = trainer_of(counters, devices=1, num_nodes=2, strategy=GrappaStrategy(), max_epochs=options.epochs)
    trainer.fit(SAGE(), data_of(options))
    if trainer.is_global_zero:
        steps = trainer.global_step // options.epochs
        options.out.write_text(json.dumps([epoch | {"steps": steps} for epoch in counters.epochs]))


def remote_features(options: argparse.Namespace) -> float:
    """Bytes of the features that batches of an epoch would need from the other part, with neighbours of the graph."""
    graph, total = Graph.open(prepare(options)), 0
    assignment = data_of(options).partition(2).assignment
    for rank in range(2):
        seeds = {"train_mask": graph.node_arrays["train_mask"] & (assignment == rank)}
        of_rank = Graph(graph.indptr, graph.indices, {**graph.node_arrays, **seeds})
        data = PartitionedDataModule(of_rank, sampler=NeighborSampler([15, 10]), batch_size=BATCH)
        total += sum(int((assignment[batch.n_id] != rank).sum()) for batch in data.train_dataloader())
    return float(total * FEATURES * 4)


# The switch.


def switch(options: argparse.Namespace) -> None:
    data_of(options).partition(4)
    strategy = GrappaStrategy(launch=Launch(start_method="fork"))
    torch.set_num_threads(1)  # before ranks are forked
    report = Path(tempfile.mkdtemp()) / "switch.json"
    counters = SwitchReport(report)
    trainer = trainer_of(counters, devices=4, strategy=strategy, max_epochs=4 * options.every)
    data = data_of(options, holding=Holding(Rotate(), every=options.every), coverage=Coverage())
    trainer.fit(SAGE(), data)
    figures = json.loads(report.read_text())
    super_epoch = sum(epoch["seconds"] for epoch in figures["epochs"][options.every :]) / 3
    print(
        f"super-epoch of {options.every} epochs: {super_epoch:.2f} s; a switch reads {figures['bytes'] / 1e6:.0f} MB "
        f"in the background, training waits {figures['waited']:.3f} s for it: {figures['waited'] / super_epoch:.1%}"
    )


class SwitchReport(Counters):
    """Leaves rank 0's figures for the process that forked it."""

    def __init__(self, out: Path) -> None:
        super().__init__()
        self.out = out
        self.first: dict[str, float] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        self.first = self.first or dict(trainer.datamodule.figures)  # type: ignore[attr-defined]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.is_global_zero:
            later: dict[str, float] = trainer.datamodule.figures  # type: ignore[attr-defined]
            switches = later["data/switches"]
            waited = (later["data/switch_waited_seconds"] - self.first["data/switch_waited_seconds"]) / switches
            read = (later["data/switch_bytes"] - self.first["data/switch_bytes"]) / switches
            self.out.write_text(json.dumps({"epochs": self.epochs, "waited": waited, "bytes": read}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("what", choices=["wire", "switch", "host"])
    parser.add_argument("--num-nodes", type=int, default=1_000_000)
    parser.add_argument("--num-edges", type=int, default=20_000_000)
    parser.add_argument("--folder", default=str(Path(tempfile.gettempdir()) / "grappa-benchmark"))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", type=int, default=2, help="epochs between two switches")
    parser.add_argument("--timeout", type=float, default=1200)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    {"wire": wire, "switch": switch, "host": host}[options.what](options)


if __name__ == "__main__":
    main()
