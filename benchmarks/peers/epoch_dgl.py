"""Passes of DistDGL over a saved graph on two hosts: run it by two_hosts.sh, as run.py does.

Every host has a server, which this script starts beside its trainer, and half of the graph by METIS. The model is that
of epoch_ours.py with DGL's layers, in torch's DistributedDataParallel.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dgl_core import dgl_and_graphbolt
from torch import Tensor, nn
from torch.nn import functional

from lightning_gnn_dist import Graph

BATCH, FANOUTS = 1024, [15, 10]


class Net(nn.Module):
    def __init__(self, dgl: Any, width: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([dgl.nn.SAGEConv(width, 256, "mean"), dgl.nn.SAGEConv(256, classes, "mean")])

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            x = conv(block, (x, x[: block.num_dst_nodes()]))
            x = x.relu() if layer == 0 else x
        return x


def write_parts(dgl: Any, path: Path, folder: Path) -> None:
    graph = Graph.open(path)
    theirs = dgl.graph(("csc", (graph.indptr, graph.indices.long(), [])), num_nodes=graph.num_nodes)
    theirs.ndata.update({name: graph.node_arrays[name].clone() for name in ("x", "y", "train_mask")})
    dgl.distributed.partition_graph(theirs, "g", 2, str(folder), part_method="metis")


def start_server(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    address = os.environ["MASTER_ADDR"].rpartition(".")[0]
    (folder / f"hosts-{rank}").write_text(f"{address}.1 30050\n{address}.2 30050\n")
    of_both = {"DGL_IP_CONFIG": str(folder / f"hosts-{rank}"), "DGL_CONF_PATH": str(folder / "g.json")}
    of_both |= {"DGL_NUM_SERVER": "1", "DGL_NUM_CLIENT": "2", "DGL_NUM_SAMPLER": "0", "DGL_GRAPH_FORMAT": "csc"}
    os.environ.update(of_both, DGL_DIST_MODE="distributed", DGL_KEEP_ALIVE="0", DGL_ROLE="client")
    variables = os.environ | {"DGL_ROLE": "server", "DGL_SERVER_ID": str(rank)}
    return subprocess.Popen([sys.executable, __file__, "--server"], env=variables)


def serve() -> None:
    dgl, _ = dgl_and_graphbolt()
    dgl.distributed.initialize(os.environ["DGL_IP_CONFIG"])  # returns when both trainers have ended


def train(dgl: Any, folder: Path, passes: int) -> None:
    import dgl.distributed as of_dgl  # makes the submodule known

    of_dgl.initialize(os.environ["DGL_IP_CONFIG"])
    graph = of_dgl.DistGraph("g", part_config=str(folder / "g.json"))
    seeds = of_dgl.node_split(graph.ndata["train_mask"], graph.get_partition_book(), force_even=True)
    sampler = dgl.dataloading.NeighborSampler(FANOUTS[::-1])
    loader = dgl.dataloading.DistNodeDataLoader(graph, seeds, sampler, batch_size=BATCH, shuffle=True)
    classes = int(graph.ndata["y"][seeds].max()) + 1
    net = nn.parallel.DistributedDataParallel(Net(dgl, graph.ndata["x"].shape[1], max(classes, 32)))
    optimizer = torch.optim.Adam(net.parameters(), 0.003)
    for _ in range(passes):
        dist.barrier()
        start, cpu = time.perf_counter(), time.process_time()
        for inputs, outputs, blocks in loader:
            optimizer.zero_grad()
            functional.cross_entropy(net(blocks, graph.ndata["x"][inputs]), graph.ndata["y"][outputs]).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"pass: {time.perf_counter() - start:.2f} s, {time.process_time() - cpu:.2f} CPU-s", flush=True)


def main() -> None:
    if sys.argv[1:] == ["--server"]:
        serve()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path)
    parser.add_argument("--passes", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dgl, _ = dgl_and_graphbolt()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shared = [tempfile.mkdtemp(prefix="parts-") if rank == 0 else ""]
    dist.broadcast_object_list(shared)
    folder = Path(shared[0])
    if rank == 0:
        write_parts(dgl, options.graph, folder)
    dist.barrier()
    server = start_server(folder, rank)
    try:
        train(dgl, folder, options.passes)
        dist.barrier()
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
    os._exit(0)  # its own end waits for the servers


if __name__ == "__main__":
    main()
