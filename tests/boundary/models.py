"""Models defined by their layers, and what one process learns with them on a whole graph, by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch_geometric.data import Data
from torch_geometric.nn import GATConv, GCNConv, GINConv, SAGEConv
from torch_geometric.transforms import GCNNorm

from tests.extensions import brought
from tests.layers.models import NUM_CLASSES, NUM_FEATURES, Stacked, uneven_data


class Model(Stacked):
    def training_step(self, batch: Any) -> Tensor:
        return functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def validation_step(self, batch: Any) -> None:
        self.log("loss", self.training_step(batch), batch_size=batch.batch_size, sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Weighted(Model):
    """GCN whose weights are normalised before the graph is cut."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(lambda a, b: GCNConv(a, b, normalize=False), num_layers)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        rows = conv(batch.x, batch.edge_index, batch.edge_weight)[: batch.batch_size]
        return self._between(conv, rows)

    def whole(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
        for conv in self.convs:
            x = self._between(conv, conv(x, edges, weights))
        return x


class Normed(Model):
    """A model with a norm over the rows of a batch."""

    def __init__(self) -> None:
        super().__init__(SAGEConv, 2)
        self.norm = nn.BatchNorm1d(5)


class Attention(Model):
    def __init__(self, num_layers: int) -> None:
        super().__init__(lambda a, b: GATConv(a, b, add_self_loops=False), num_layers)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        (block,) = batch.blocks
        return self._between(conv, conv((batch.x, batch.x[: block.num_dst]), block.edge_index))


class Jumping(Model):
    """Jumping knowledge: a layer's rows are those of all layers so far, and the input rows come in at the end."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(SAGEConv, num_layers)
        widths = NUM_FEATURES + 5 * (num_layers - 1) + NUM_CLASSES
        self.lin = nn.Linear(widths, NUM_CLASSES)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        (block,) = batch.blocks
        last = batch.x if conv is self.convs[0] else batch.x[:, -5:]
        rows = self._between(conv, conv((last, last[: block.num_dst]), block.adj))
        before = rows[:, :0] if conv is self.convs[0] else batch.x[: block.num_dst]
        rows = torch.cat([before, rows], 1)
        return self.lin(torch.cat([batch.x0[: block.num_dst], rows], 1)) if conv is self.convs[-1] else rows

    def whole(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
        kept = [x]
        for conv in self.convs:
            x = self._between(conv, conv(x, edges))
            kept.append(x)
        rows: Tensor = self.lin(torch.cat(kept, 1))
        return rows


def gin(width_in: int, width_out: int) -> Any:
    return GINConv(nn.Linear(width_in, width_out), train_eps=True)


def model(name: str, num_layers: int) -> Model:
    torch.manual_seed(7)
    made: dict[str, Callable[[], Model]] = {
        "SAGE": lambda: Model(SAGEConv, num_layers),
        "GCN": lambda: Weighted(num_layers),
        "GAT": lambda: Attention(num_layers),
        "GIN": lambda: Model(gin, num_layers),
        "JK": lambda: Jumping(num_layers),
    }
    for more in brought("models_by_layers"):
        made |= more.made(num_layers)
    return made[name]().double()


MODELS = ["SAGE", "GCN", "GAT", "GIN", "JK"]


def weighted_data(num_nodes: int = 90) -> Data:
    """The graph of the tests of evaluation, with normalised weights of its edges."""
    data: Data = GCNNorm(add_self_loops=False)(uneven_data(num_nodes))
    data.edge_weight = data.edge_weight.double()
    return data


Weights = dict[str, Tensor]


def weights_of(module: Any) -> Weights:
    return {key: value.detach().clone() for key, value in module.named_parameters()}


def learned_by_hand(name: str, num_layers: int, data: Data, steps: int) -> Weights:
    """The weights after some steps of one process on the whole graph, without a line of this package."""
    module, seeds = model(name, num_layers), data.train_mask
    optimizer = module.configure_optimizers()
    for _ in range(steps):
        optimizer.zero_grad()
        rows = module.whole(data.x, data.edge_index, data.edge_weight)
        functional.cross_entropy(rows[seeds], data.y[seeds]).backward()
        optimizer.step()
    return weights_of(module)


def check_learned(cases: Sequence[tuple[Any, ...]], of_ranks: list[list[Weights]], steps: int) -> None:
    """What ranks have learned is that by hand, of models by name and number of layers, and the same on all of them."""
    for case, (name, num_layers, *more) in enumerate(cases):
        expected = learned_by_hand(name, num_layers, weighted_data(), steps)
        for found in of_ranks:
            for key, value in expected.items():
                assert torch.allclose(found[case][key], value, rtol=0, atol=1e-12), (name, num_layers, more, key)
                assert torch.equal(found[case][key], of_ranks[0][case][key]), "replicas differ"
