"""A training step of PyG's ready-made models: on a whole batch, with ``layers_of``, and with blocks by hand.

    python benchmarks/ready_made.py                     # 1M nodes, 20M edges: 3 GB of memory, two minutes
    python benchmarks/ready_made.py --num-nodes 100000 --num-edges 2000000

128-256-32 channels, [15, 10] neighbours, one thread. The ways take turns; CPU time, the best of several repetitions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from harness import machine
from sampling import batches_of_seeds, parser_of, power_law_communities
from torch import Tensor
from torch_geometric.nn import GAT, GCN, GIN, GraphSAGE
from torch_geometric.nn.models.basic_gnn import BasicGNN

from lightning_gnn_dist import layers_of, through_layers
from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


class InLayers(torch.nn.Module):
    """A model by its layers."""

    def __init__(self, gnn: BasicGNN) -> None:
        super().__init__()
        self.gnn = gnn

    def layers(self) -> list[Any]:
        return layers_of(self.gnn)


def by_hand(gnn: BasicGNN, batch: SampledData) -> Tensor:
    """What a user writes who knows blocks: sparse matrices where a layer takes them."""
    x = batch.x
    for layer, (conv, block) in enumerate(zip(gnn.convs, batch.blocks, strict=True)):
        edges = block.edge_index if isinstance(gnn, GAT) else block.adj
        x = conv((x, x[: block.num_dst]), edges)
        x = x.relu() if layer == 0 else x
    return x


def gcn_by_hand(gnn: BasicGNN, batch: SampledData) -> Tensor:
    outermost, x = batch.blocks[0], batch.x
    degrees = torch.ones(outermost.num_src)
    degrees[: outermost.num_dst] += outermost.indptr.diff()
    scale = degrees.rsqrt()[:, None]
    for layer, (conv, block) in enumerate(zip(gnn.convs, batch.blocks, strict=True)):
        rows = x * scale[: block.num_src]
        x = conv.lin((block.adj @ rows + rows[: block.num_dst]) * scale[: block.num_dst]) + conv.bias
        x = x.relu() if layer == 0 else x
    return x


def step_ms(forward: Callable[[], Tensor], batch_size: int) -> float:
    start = time.process_time()
    forward()[:batch_size].square().mean().backward()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    options = parser_of(__doc__, repeats=7).parse_args()
    print(machine())
    torch.set_num_threads(1)
    graph = power_law_communities(options.num_nodes, options.num_edges)
    graph = Graph(graph.indptr, graph.indices, {"x": torch.randn(graph.num_nodes, 128)})
    seeds = batches_of_seeds(graph, options.batch_size, 1)
    batch = assemble(graph, NeighborSampler([15, 10]).sample_bulk(graph, seeds, [BatchKey(0, 0, 0)])[0])
    for kind in (GraphSAGE, GCN, GIN, GAT):
        gnn = kind(128, 256, 2, 32)
        ways = {
            "whole batch": lambda gnn=gnn: gnn(batch.x, batch.edge_index),
            "layers_of": lambda gnn=gnn: through_layers(InLayers(gnn), batch),
            "by hand": lambda gnn=gnn: (gcn_by_hand if isinstance(gnn, GCN) else by_hand)(gnn, batch),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, forward in ways.items():
                times[name].append(step_ms(forward, options.batch_size))
        print(kind.__name__, *(f"{name}: {min(found):,.0f} ms" for name, found in times.items()), sep="   ", flush=True)


if __name__ == "__main__":
    main()
