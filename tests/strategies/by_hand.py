"""Steps of optimizers on a few weights, by a CorrectionOptimizer and by hand."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_gnn_dist import Correction, Graph
from lightning_gnn_dist.strategies.correction import CorrectionOptimizer
from tests.sage import SAGE
from tests.strategies.graph_fitting import small_graph

Make = Callable[[Any], Optimizer]


ADAM: Make = lambda parameters: torch.optim.Adam(parameters, lr=0.01)  # noqa: E731


KINDS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


def weights(seed: int = 0, count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(2, width + 1, generator=generator)) for width in range(count)]


def gradient(step: int, like: list[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return [torch.randn(parameter.shape, generator=generator) for parameter in like]


def step_by_hand(optimizer: Optimizer, parameters: list[Tensor], step: int) -> None:
    for parameter, direction in zip(parameters, gradient(step, parameters), strict=True):
        parameter.grad = direction
    optimizer.step()
    optimizer.zero_grad()


def beside(local: list[Optimizer], mode: Any, lr: Any = "local", **options: Any) -> CorrectionOptimizer:
    correction = Correction(optimizer=mode) if callable(mode) else Correction(optimizer=mode, lr=lr)
    return CorrectionOptimizer(correction, local, **options)


def correct(own: CorrectionOptimizer, parameters: list[Tensor], rounds: range, steps: int = 2) -> None:
    for round_idx in rounds:
        own.prepare(parameters, round_idx)
        for step in range(steps):
            own.step(parameters, gradient(steps * round_idx + step, parameters))


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def decay_by_hand(before: Sequence[Tensor], now: Sequence[Tensor]) -> float:
    """Four fifths, and up to 1 where the shift is as ``before``, which is empty in the first round."""
    if not before or not any(each.any() for each in now):
        return 0.8
    then, here = (torch.cat([each.flatten() for each in shift]) for shift in (before, now))
    return 0.8 + 0.2 * math.exp(-100 * float((here - then) @ (here - then) / (here @ here + then @ then)))


def agreement(ways: list[Tensor], old: list[Tensor]) -> float:
    """How much of the last round this one repeats, in 1024ths."""
    if not old:
        return 0.0
    now, then = (torch.cat([way.flatten() for way in each]) for each in (ways, old))
    return round(1024 * min(1.0, max(0.0, float(now @ then / (then @ then))))) / 1024


class Plain(SAGE):
    """In float64, on edges as they are."""

    def __init__(self, optimizer: Make) -> None:
        super().__init__(12, 4, blocks=False)
        self.make = optimizer
        self.double()

    def between(self, x: Tensor) -> Tensor:
        return x.relu()

    def logits(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.convs[1](self.between(self.convs[0](x, edge_index)), edge_index)

    def forward(self, batch: Any) -> Tensor:
        return self.logits(batch.x, batch.edge_index)[: batch.batch_size]

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def double_graph() -> Graph:
    graph = small_graph()
    graph.node_arrays["x"] = graph.node_arrays["x"].double()
    return graph


def gradient_among(net: Plain, graph: Graph, nodes: Tensor) -> list[Tensor]:
    """Of the loss of the training nodes among these, over the edges among them."""
    x, y, train = (graph.node_arrays[name][nodes] for name in ("x", "y", "train_mask"))
    edges = torch.stack([graph.indices.long(), torch.arange(graph.num_nodes).repeat_interleave(graph.degrees())])
    place = torch.full((graph.num_nodes,), -1).index_put((nodes,), torch.arange(len(nodes)))
    inside = place[edges][:, (place[edges] >= 0).all(0)]
    loss = nn.functional.cross_entropy(net.logits(x, inside)[train], y[train])
    return list(torch.autograd.grad(loss, net.parameters()))
