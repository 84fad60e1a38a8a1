"""A training step of GraphSAGE on blocks in bfloat16 and in float32.

    python benchmarks/half_precision.py                     # 1M nodes, 20M edges: 3 GB of memory, a minute
    python benchmarks/half_precision.py --num-nodes 100000 --num-edges 2000000

128-256-32 channels, [15, 10] neighbours, one thread. Precisions take turns; CPU time, the best of several repetitions,
and what the logits and the gradients of the first layer differ from those in float32, as a share of the largest.
"""

from __future__ import annotations

import contextlib
import time
from copy import deepcopy
from dataclasses import dataclass

import torch
from harness import machine
from sampling import batches_of_seeds, parser_of, power_law_communities
from torch import Tensor, nn
from torch_geometric.nn import SAGEConv

from lightning_gnn_dist.batches.batch import SampledData
from lightning_gnn_dist.batches.source import assemble
from lightning_gnn_dist.engine.sample import BatchKey
from lightning_gnn_dist.graph.graph import Graph
from lightning_gnn_dist.sampling.neighbor import NeighborSampler


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(128, 256), SAGEConv(256, 32)])

    def forward(self, batch: SampledData, form: str) -> Tensor:
        x = batch.x
        for layer, (conv, block) in enumerate(zip(self.convs, batch.blocks, strict=True)):
            x = conv((x, x[: block.num_dst]), getattr(block, form))
            x = x.relu() if layer == 0 else x
        return x


@dataclass(frozen=True)
class Way:
    features: torch.dtype = torch.float32
    weights: torch.dtype = torch.float32
    mixed: bool = False
    form: str = "adj"


WAYS = {
    "float32": Way(),
    "bf16-mixed": Way(mixed=True),
    "bf16-mixed, features bfloat16": Way(torch.bfloat16, mixed=True),
    "bf16-true, features bfloat16": Way(torch.bfloat16, torch.bfloat16),
    "bf16-mixed on edge_index": Way(mixed=True, form="edge_index"),
    "bf16-mixed on edge_index, features bfloat16": Way(torch.bfloat16, mixed=True, form="edge_index"),
}


def step(net: Net, batch: SampledData, way: Way) -> tuple[float, Tensor, Tensor]:
    """CPU seconds, logits and the gradient of the first layer."""
    net.zero_grad()
    mixed = torch.autocast("cpu", torch.bfloat16) if way.mixed else contextlib.nullcontext()
    start = time.process_time()
    with mixed:
        logits = net(batch, way.form)
    logits.float().square().mean().backward()
    seconds = time.process_time() - start
    return seconds, logits.detach().float(), net.convs[0].lin_l.weight.grad.float()


def apart(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def main() -> None:
    options = parser_of(__doc__, repeats=7).parse_args()
    print(machine())
    torch.set_num_threads(1)
    graph = power_law_communities(options.num_nodes, options.num_edges)
    seeds = batches_of_seeds(graph, options.batch_size, 1)
    sample = NeighborSampler([15, 10]).sample_bulk(graph, seeds, [BatchKey(0, 0, 0)])[0]
    x, net = torch.randn(graph.num_nodes, 128), Net()
    batches = {
        dtype: assemble(Graph(graph.indptr, graph.indices, {"x": x.to(dtype)}), sample, widen=False)
        for dtype in (torch.float32, torch.bfloat16)
    }
    nets = {name: deepcopy(net).to(way.weights) for name, way in WAYS.items()}
    found: dict[str, list[tuple[float, Tensor, Tensor]]] = {name: [] for name in WAYS}
    for _ in range(options.repeats):
        for name, way in WAYS.items():
            found[name].append(step(nets[name], batches[way.features], way))
    least = {name: min(seconds for seconds, *_ in steps) for name, steps in found.items()}
    _, logits, gradient = found["float32"][0]
    for name, steps in found.items():
        print(
            f"{name:45}{1e3 * least[name]:6.1f} ms, {least[name] / least['float32']:.2f} of float32;"
            f" logits {apart(steps[0][1], logits):.4f}, gradients {apart(steps[0][2], gradient):.4f} apart"
        )


if __name__ == "__main__":
    main()
