"""Models defined by their layers, or by a model of PyG, and what they compute on a whole graph in one process."""

import itertools
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.nn import GAT, GCN, GIN, GATConv, GraphNorm, GraphSAGE, SAGEConv
from torchmetrics.classification import MulticlassAccuracy

from lightning_gnn_dist import Graph, through_layers

NUM_FEATURES, NUM_CLASSES = 6, 3


class Judged(pl.LightningModule):
    """Remembers by node what it returned for the seeds it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.rows: dict[int, Tensor] = {}
        self.kinds: set[str] = set()

    def validation_step(self, batch: Any) -> None:
        out, y = self(batch), batch.y[: batch.batch_size]
        self.kinds.add(type(batch).__name__)
        self.rows |= dict(zip(batch.n_id[: batch.batch_size].tolist(), out.detach().clone(), strict=True))
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, batch_size=batch.batch_size)

    test_step = validation_step

    def training_step(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch), batch.y[: batch.batch_size])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Layered(Judged):
    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)


class Stacked(pl.LightningModule):
    """Some layers of one kind: ``convs`` takes two widths. On a batch layer by layer; on a whole graph by hand."""

    def __init__(self, kind: Any, num_layers: int) -> None:
        super().__init__()
        widths = [NUM_FEATURES, *[5] * (num_layers - 1), NUM_CLASSES]
        self.convs = nn.ModuleList(kind(a, b) for a, b in itertools.pairwise(widths))

    def layers(self) -> Any:
        return [lambda batch, conv=conv: self._layer(conv, batch) for conv in self.convs]

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        (block,) = batch.blocks
        return self._between(conv, conv((batch.x, batch.x[: block.num_dst]), block.adj))

    def _between(self, conv: Any, x: Tensor) -> Tensor:
        return x if conv is self.convs[-1] else x.tanh()

    def whole(self, x: Tensor, edges: Tensor, weights: Tensor | None = None) -> Tensor:
        for conv in self.convs:
            x = self._between(conv, conv(x, edges))
        return x

    def forward(self, batch: Any) -> Tensor:
        return through_layers(self, batch)


class Sage(Stacked, Judged):
    def __init__(self, num_layers: int) -> None:
        super().__init__(SAGEConv, num_layers)
        self.norm = nn.BatchNorm1d(5)

    def _between(self, conv: Any, x: Tensor) -> Tensor:
        return x if conv is self.convs[-1] else self.norm(x).relu()


class Appnp(Layered):
    """APPNP: the same rows enter every layer again."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.lin, self.num_layers = nn.Linear(NUM_FEATURES, NUM_CLASSES), num_layers
        self.conv = SAGEConv(NUM_CLASSES, NUM_CLASSES)

    def layers(self) -> Any:
        def first(batch: Any) -> Tensor:
            batch.x = self.lin(batch.x)
            return layer(batch)

        def layer(batch: Any) -> Tensor:
            start = self.lin(batch.x0[: batch.batch_size])
            return 0.5 * self.conv(batch.x, batch.edge_index)[: batch.batch_size] + 0.5 * start

        return [first, *[layer] * (self.num_layers - 1)]

    def whole(self, x: Tensor, edges: Tensor) -> Tensor:
        start = x = self.lin(x)
        for _ in range(self.num_layers):
            x = 0.5 * self.conv(x, edges) + 0.5 * start
        return x


class Attention(Stacked, Judged):
    """Its layers return rows of all nodes of a batch."""

    def __init__(self, num_layers: int) -> None:
        super().__init__(GATConv, num_layers)

    def _layer(self, conv: Any, batch: Any) -> Tensor:
        return self._between(conv, conv(batch.x, batch.edge_index))


class NormOfAll(Sage):
    def __init__(self, num_layers: int) -> None:
        super().__init__(num_layers)
        self.norm = GraphNorm(5)


class Ready(Judged):
    """A model of PyG's as PyG's own examples use it: nothing in it knows of this package."""

    def __init__(self, kind: Any, num_layers: int, **options: Any) -> None:
        super().__init__()
        self.gnn = kind(NUM_FEATURES, 5, num_layers, NUM_CLASSES, dropout=0.5, **options)

    def forward(self, batch: Any) -> Tensor:
        return self.gnn(batch.x, batch.edge_index)[: batch.batch_size]

    def whole(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.gnn(x, edges)


def model(name: str, num_layers: int) -> Any:
    torch.manual_seed(7)
    made = {
        "SAGE": lambda: Sage(num_layers),
        "APPNP": lambda: Appnp(num_layers),
        "GAT": lambda: Attention(num_layers),
        "GraphNorm": lambda: NormOfAll(num_layers),
        "PyG SAGE": lambda: Ready(GraphSAGE, num_layers, norm="BatchNorm"),
        "PyG GCN": lambda: Ready(GCN, num_layers),
        "PyG GAT": lambda: Ready(GAT, num_layers),
        "PyG GIN": lambda: Ready(GIN, num_layers),
        "PyG JK": lambda: Ready(GraphSAGE, num_layers, jk="cat"),
    }[name]().double()
    for child in made.modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            child.running_mean.normal_(), child.running_var.uniform_(0.5, 2)
    return made


MODELS = ["SAGE", "APPNP", "GAT", "GraphNorm", "PyG SAGE", "PyG GCN", "PyG GAT", "PyG GIN", "PyG JK"]


def uneven_data(num_nodes: int = 90, seed: int = 0) -> Data:
    """A directed graph with nodes without edges, self-loops, edges that come twice, and one node of many."""
    chance = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes - 5, (2, 4 * num_nodes), generator=chance)
    edges[1, : num_nodes // 2] = 3
    edges = torch.cat([edges, edges[:, :9]], 1)
    edges = torch.cat([edges[:, edges[0] != edges[1]], torch.tensor([[3, 4, 5], [3, 4, 5]])], 1)
    data = Data(edge_index=edges, num_nodes=num_nodes)
    data.x = torch.randn(num_nodes, NUM_FEATURES, generator=chance, dtype=torch.float64)
    data.y = torch.randint(NUM_CLASSES, (num_nodes,), generator=chance)
    order = torch.randperm(num_nodes, generator=chance)
    for name, some in zip(
        ("train", "val", "test"), order.split([num_nodes // 2, 11, num_nodes - num_nodes // 2 - 11]), strict=False
    ):
        data[f"{name}_mask"] = torch.zeros(num_nodes, dtype=torch.bool).index_fill(0, some, True)
    return data


def whole_rows(module: Any, data: Data) -> Tensor:
    """What one process computes on the whole graph, without a line of this package."""
    with torch.no_grad():
        rows: Tensor = module.eval().whole(data.x, data.edge_index)
    return rows


def graph_of(data: Data) -> Graph:
    return Graph.from_pyg(data)
