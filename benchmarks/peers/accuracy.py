"""CPU seconds until a model has learned, here and with DGL, on a saved graph.

    python benchmarks/peers/accuracy.py GRAPH --target 0.6

One process and one thread: GraphSAGE of two layers and 128 channels, [15, 10] neighbours, batches of 1024, Adam at
.003, dropout .5; layers of PyG on blocks here, DGL's own there. After each pass the whole graph is evaluated by one
code for both, which is not counted. Ways take turns, seed by seed. Making DGL's form of the graph is not counted,
compiling here neither.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from dgl_core import dgl_and_graphbolt
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist import Graph, NeighborSampler, PartitionedDataModule

HIDDEN, BATCH, FANOUTS, RATE = 128, 1024, [15, 10], 0.003
Batches = Callable[[int], Iterator[tuple[list[Any], Tensor, Tensor]]]  # of a seed: blocks, features, labels


def ours(graph: Graph) -> tuple[Batches, Callable[[int, int], nn.Module]]:
    def batches(seed: int) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
        data = PartitionedDataModule(graph, sampler=NeighborSampler(FANOUTS), batch_size=BATCH, seed=seed)
        for batch in data.train_dataloader():
            yield [block.adj for block in batch.blocks], batch.x, batch.y[: batch.batch_size]

    return batches, SAGEConv


def dgl(graph: Graph) -> tuple[Batches, Callable[[int, int], nn.Module]]:
    library, _ = dgl_and_graphbolt()
    theirs = library.graph(("csc", (graph.indptr, graph.indices.long(), [])), num_nodes=graph.num_nodes)
    theirs.ndata.update({name: graph.node_arrays[name] for name in ("x", "y")})
    sampler = library.dataloading.NeighborSampler(FANOUTS[::-1], prefetch_node_feats=["x"], prefetch_labels=["y"])

    def batches(seed: int) -> Iterator[tuple[list[Any], Tensor, Tensor]]:
        library.seed(seed)
        loader = library.dataloading.DataLoader(
            theirs, graph.split("train"), sampler, batch_size=BATCH, shuffle=True, num_workers=0
        )
        for _, _, blocks in loader:
            yield blocks, blocks[0].srcdata["x"], blocks[-1].dstdata["y"]

    return batches, lambda width, out: library.nn.SAGEConv(width, out, "mean")


class Net(nn.Module):
    def __init__(self, make: Callable[[int, int], nn.Module], width: int, classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([make(width, HIDDEN), make(HIDDEN, classes)])
        self.is_ours = isinstance(self.convs[0], SAGEConv)

    def forward(self, blocks: list[Any], x: Tensor) -> Tensor:
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            num_dst = block.size(0) if self.is_ours else block.num_dst_nodes()
            pair = x, x[:num_dst]
            x = conv(pair, block) if self.is_ours else conv(block, pair)
            x = functional.dropout(x.relu(), training=self.training) if layer == 0 else x
        return x

    @torch.no_grad()
    def whole(self, graph: Graph, adj: Tensor) -> Tensor:
        """The logits of all nodes: both kinds of layers compute W1 x + W2 mean(x of senders) + b."""
        x = graph.node_arrays["x"]
        for layer, conv in enumerate(self.convs):
            own, others = (conv.lin_r, conv.lin_l) if self.is_ours else (conv.fc_self, conv.fc_neigh)
            x = own(x) + others(adj @ x)
            x = x.relu() if layer == 0 else x
        return x


def seconds_to(target: float, graph: Graph, adj: Tensor, way: Any, seed: int, passes: int) -> tuple[float, float, int]:
    """CPU seconds of training, the best accuracy seen, and how many passes it took."""
    batches, make = way
    torch.manual_seed(seed)
    y, judged = graph.node_arrays["y"], graph.split("test")
    net = Net(make, graph.node_arrays["x"].shape[1], int(y.max()) + 1)
    optimizer = torch.optim.Adam(net.parameters(), RATE)
    spent, best = 0.0, 0.0
    for done in range(1, passes + 1):
        net.train()
        start = time.process_time()
        for blocks, x, labels in batches(seed * 1000 + done):
            optimizer.zero_grad()
            functional.cross_entropy(net(blocks, x), labels).backward()
            optimizer.step()
        spent += time.process_time() - start
        net.eval()
        best = max(best, float((net.whole(graph, adj)[judged].argmax(1) == y[judged]).float().mean()))
        if best >= target:
            break
    return spent, best, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("graph", type=Path, help="a graph that prepare has saved, with x, y and masks")
    parser.add_argument("--target", type=float, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--passes", type=int, default=30, help="at most")
    options = parser.parse_args()
    torch.set_num_threads(1)
    graph = Graph.open(options.graph)
    graph = Graph(graph.indptr, graph.indices, {name: array.clone() for name, array in graph.node_arrays.items()})
    share = (1 / graph.degrees().clamp(min=1)).repeat_interleave(graph.degrees())
    adj = torch.sparse_csr_tensor(graph.indptr, graph.indices.long(), share, (graph.num_nodes, graph.num_nodes))
    ways = {"ours": ours(graph)} | ({"DGL": dgl(graph)} if dgl_and_graphbolt()[0] else {})
    for batches, _ in ways.values():
        next(batches(0))  # compiles here, and makes forms of the graph there
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in ways}
    for seed in range(options.seeds):
        for name, rows in found.items():
            rows.append(seconds_to(options.target, graph, adj, ways[name], seed, options.passes))
    print(f"{options.graph.name}, target {options.target}, {options.seeds} seeds")
    print("| | CPU-s to the target, median | range | passes | best accuracy |")
    print("| --- | --- | --- | --- | --- |")
    for name, rows in found.items():
        spent = [seconds for seconds, _, _ in rows]
        passes = [number for *_, number in rows]
        best = statistics.mean(accuracy for _, accuracy, _ in rows)
        row = f"{statistics.median(spent):.1f} | {min(spent):.1f} to {max(spent):.1f} | {min(passes)} to {max(passes)}"
        print(f"| {name} | {row} | {best:.3f} |")


if __name__ == "__main__":
    main()
